"""Rate limits: token buckets, a fairly shared rate, counters of running tasks, bans of flooding peers.

Pure; `now` is an argument, in seconds.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from p2p.latest import Latest

FIRST_BAN_S, LONGEST_BAN_S = 60.0, 16 * 60.0
_MAX_PEERS = 1024
# Largest claim on a shared rate, in tokens.
MAX_PIECE = 16 * 1024

K = TypeVar("K", bound=Hashable)


class TokenBucket:
    """Holds `burst` tokens when full, and is refilled with `rate` tokens a second.

    If the clock is set back, nothing is refilled.
    """

    __slots__ = ("_at", "burst", "left", "rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst, self.left, self._at = rate, burst, burst, now

    def refill(self, now: float) -> float:
        """Refill the bucket up to `now` and return its tokens."""
        self.left = min(self.burst, self.left + max(0.0, now - self._at) * self.rate)
        self._at = now
        return self.left

    def spend(self, tokens: float) -> None:
        """Take tokens. The debt is at most one burst. A negative number gives tokens back."""
        self.left = max(-self.burst, self.left - tokens)

    def wait(self, now: float, tokens: float = 1.0) -> float:
        """Take the tokens and return 0.0, or take none and return the seconds until there are enough.

        Because of rounding, the tokens may still be a little short after that time. But the result is always
        so large that `now + result > now`, so a caller that waits and asks again makes progress.
        """
        if self.refill(now) >= tokens:
            self.spend(tokens)
            return 0.0
        return max((tokens - self.left) / self.rate, math.ulp(now))


class TokenBuckets(Generic[K]):
    """A token bucket for each key. Over `most` keys, the least recently used bucket is dropped.

    A key whose bucket was dropped starts with a full one, so it gains at most one burst.
    """

    def __init__(self, rate: float, burst: float, most: int = _MAX_PEERS) -> None:
        self.rate, self.burst = rate, burst
        self._buckets: Latest[K, TokenBucket] = Latest(most)

    def of(self, key: K, now: float) -> TokenBucket:
        """Return the bucket of this key; a new bucket is full."""
        bucket = self._buckets.get(key) or TokenBucket(self.rate, self.burst, now)
        self._buckets[key] = bucket
        return bucket

    def forget(self, key: K) -> None:
        self._buckets.pop(key, None)


@dataclass(eq=False, slots=True)
class Claim:
    """A waiting request for tokens of a shared rate.

    size: tokens; set it to 0 to withdraw the claim. grant: called when its turn has come.
    """

    size: float
    grant: Callable[[], object]


class _Share:
    """A node in the tree that shares a rate: a network group, machine or connection.

    The child that has used the fewest tokens is served next. So all children get equally many tokens, no
    matter how large their claims are.
    """

    def __init__(self, used: float = 0.0) -> None:
        self.waiting = 0  # claims in this share and its children
        self.used = used  # tokens, comparable among siblings
        self._even = 0.0  # average tokens used by the waiting children
        self._parts: dict[Hashable, _Share] = {}
        self._claims = deque[Claim]()

    def put(self, by: Sequence[Hashable], claim: Claim) -> None:
        """Add a claim.

        by: the path in the tree, for example group, machine and connection. Claims that stop higher in the
            tree are served first.
        """
        self.waiting += 1
        if not by:
            self._claims.append(claim)
            return
        part = self._parts.setdefault(by[0], _Share(self._even))
        if not part.waiting:
            # A child that pauses between claims keeps its turn, but a long pause saves up no more than one
            # piece.
            part.used = max(part.used, self._even - MAX_PIECE)
        part.put(by[1:], claim)

    def pop(self) -> Claim:
        self.waiting -= 1
        if self._claims:
            return self._claims.popleft()
        # Among equal children the newest comes first, because it may have got nothing so far.
        waiting = [part for part in reversed(self._parts.values()) if part.waiting]
        part = min(waiting, key=lambda one: one.used)
        claim = part.pop()
        part.used += claim.size
        self._even = max(self._even, sum(one.used for one in waiting) / len(waiting))
        self._parts = {
            key: part
            for key, part in self._parts.items()
            if part.waiting or part.used >= self._even - MAX_PIECE
        }
        return claim


class SharedRate(_Share):
    """A token bucket that is shared fairly, for example by network group, machine and connection.

    A claim is granted if the bucket has any tokens left, and may put it into debt. So a large claim need not
    wait for a full bucket. A claim delays all later ones, so claims must be at most `piece` tokens.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        super().__init__()
        self._bucket = TokenBucket(rate, burst, now)
        self.piece = min(MAX_PIECE, burst / 2)

    def serve(self, now: float) -> float:
        """Grant claims until the tokens are used up, and return the seconds until there are tokens again."""
        while self._bucket.refill(now) > 0:
            if not self.waiting:
                return 0.0
            claim = self.pop()
            self._bucket.spend(claim.size)
            claim.grant()
        return -self._bucket.left / self._bucket.rate


@contextmanager
def counted(counter: Counter[K], key: K) -> Iterator[None]:
    """Count one more of this key while the block runs. A key that falls to 0 is removed."""
    counter[key] += 1
    try:
        yield
    finally:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]


class Bans:
    """Bans of peers. A ban within a day of a peer's last ban is twice as long as that one.

    Over _MAX_PEERS, the ban set least recently is dropped.
    """

    def __init__(self) -> None:
        self._until: Latest[str, float] = Latest(_MAX_PEERS)
        # Peer -> number of bans by `ban_again`, and the end of the last one.
        self._again: Latest[str, tuple[int, float]] = Latest(_MAX_PEERS)

    def banned(self, peer: str, now: float) -> bool:
        return self._until.get(peer, -math.inf) > now

    def ban(self, peer: str, now: float, seconds: float) -> None:
        """Ban the peer for this time, or until its present ban ends if that is later."""
        self._until[peer] = max(now + seconds, self._until.get(peer, 0.0))

    def ban_again(self, peer: str, now: float, longest: float = LONGEST_BAN_S) -> float:
        """Ban the peer for FIRST_BAN_S, or twice as long as the last time. Return the seconds."""
        times, until = self._again.get(peer, (0, now))
        times = times if now - until < 24 * 3600 else 0
        seconds = min(longest, FIRST_BAN_S * float(1 << times))
        self.ban(peer, now, seconds)
        self._again[peer] = (min(times + 1, 16), now + seconds)
        return seconds


class RateLimit(Bans):
    """Token buckets that limit each peer's traffic to us; a peer that exceeds its limit is banned.

    The peer that hands us a frame pays for it before the frame is checked, because forged and broken frames
    have no author. A peer in the mesh forwards frames of the whole swarm, so its rate must be high enough for
    a busy swarm.

    buckets: a set of buckets for each sort of traffic.
    """

    def __init__(self, buckets: Mapping[str, TokenBuckets[str]]) -> None:
        super().__init__()
        self._buckets = buckets

    def pay(self, peer: str, now: float, what: str, amount: float = 1.0) -> bool:
        """Charge the peer and return True. If it has too few tokens, ban it and return False."""
        if self._buckets[what].of(peer, now).wait(now, amount) == 0:
            return True
        self._buckets[what].forget(peer)
        self.ban_again(peer, now)
        return False
