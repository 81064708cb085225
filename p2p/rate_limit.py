"""Rate limits: token buckets, a rate shared in turn, counts of what runs at once, bans of flooding peers.

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
# Tokens of one claim on a shared rate.
MAX_PIECE = 16 * 1024

K = TypeVar("K", bound=Hashable)


class TokenBucket:
    """Holds `burst` tokens when full, and is refilled with `rate` tokens a second.

    A clock that was set back refills nothing.
    """

    __slots__ = ("_at", "burst", "left", "rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst, self.left, self._at = rate, burst, burst, now

    def refill(self, now: float) -> float:
        """Refill it, and return the tokens in it now."""
        self.left = min(self.burst, self.left + max(0.0, now - self._at) * self.rate)
        self._at = now
        return self.left

    def spend(self, tokens: float) -> None:
        """Take tokens, even into debt of at most one burst. Below 0 gives them back."""
        self.left = max(-self.burst, self.left - tokens)

    def wait(self, now: float, tokens: float = 1.0) -> float:
        """Take the tokens and return 0.0, or take none and return the seconds until there are enough.

        Rounding may leave a little more to wait for after these seconds. They are never so few that `now`
        stays the same when they are added, so whoever waits and asks again makes progress.
        """
        if self.refill(now) >= tokens:
            self.spend(tokens)
            return 0.0
        return max((tokens - self.left) / self.rate, math.ulp(now))


class TokenBuckets(Generic[K]):
    """A token bucket for each key. At `most` keys the least recently used is forgotten.

    An unused bucket fills up, so forgetting one gives away one burst at most.
    """

    def __init__(self, rate: float, burst: float, most: int = _MAX_PEERS) -> None:
        self.rate, self.burst = rate, burst
        self._buckets: Latest[K, TokenBucket] = Latest(most)

    def of(self, key: K, now: float) -> TokenBucket:
        """Return the bucket of this key; a new one is full."""
        bucket = self._buckets.get(key) or TokenBucket(self.rate, self.burst, now)
        self._buckets[key] = bucket
        return bucket

    def forget(self, key: K) -> None:
        self._buckets.pop(key, None)


@dataclass(eq=False, slots=True)
class Claim:
    """A claim on a shared rate.

    size: tokens; set it to 0 to give the claim up. grant: called when its turn has come.
    """

    size: float
    grant: Callable[[], object]


class _Share:
    """One network group, machine or connection in the tree of those that share a rate.

    Of the parts of a share, the one that has used fewest tokens is served next, so each gets as many as the
    others, however it cuts its claims.
    """

    def __init__(self, used: float = 0.0) -> None:
        self.waiting = 0  # claims in it and below
        self.used = used  # tokens, measured against the siblings
        self._even = 0.0  # tokens that those which wait have used on average
        self._parts: dict[Hashable, _Share] = {}
        self._claims = deque[Claim]()

    def put(self, by: Sequence[Hashable], claim: Claim) -> None:
        """Add a claim. by: group, machine and connection, for example; a shorter path is served first."""
        self.waiting += 1
        if not by:
            self._claims.append(claim)
            return
        part = self._parts.setdefault(by[0], _Share(self._even))
        if not part.waiting:
            # A part that pauses between its claims loses nothing, but a long pause earns nothing.
            part.used = max(part.used, self._even - MAX_PIECE)
        part.put(by[1:], claim)

    def pop(self) -> Claim:
        self.waiting -= 1
        if self._claims:
            return self._claims.popleft()
        # Of those that have used as much the newest comes first, as it may have claimed nothing until now.
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
    """One token bucket shared in turn, such as by network group, machine and connection.

    A claim is granted while anything is left, and the bucket goes into debt for it: a large claim need not
    find the bucket full. Keep claims small, `piece` at most, as each claim delays all that come after it.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        super().__init__()
        self._bucket = TokenBucket(rate, burst, now)
        self.piece = min(MAX_PIECE, burst / 2)

    def serve(self, now: float) -> float:
        """Grant what there are tokens for, and return the seconds until there are some again."""
        while self._bucket.refill(now) > 0:
            if not self.waiting:
                return 0.0
            claim = self.pop()
            self._bucket.spend(claim.size)
            claim.grant()
        return -self._bucket.left / self._bucket.rate


@contextmanager
def counted(counter: Counter[K], key: K) -> Iterator[None]:
    """Count one more of this key while the block runs. What is 0 takes no place in the counter."""
    counter[key] += 1
    try:
        yield
    finally:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]


class Bans:
    """Bans of peers, each twice as long as the one before it within a day.

    At _MAX_PEERS the one set least recently is forgotten.
    """

    def __init__(self) -> None:
        self._until: Latest[str, float] = Latest(_MAX_PEERS)
        # Peer -> how often it was banned by `ban_again`, end of the last of these bans
        self._again: Latest[str, tuple[int, float]] = Latest(_MAX_PEERS)

    def banned(self, peer: str, now: float) -> bool:
        return self._until.get(peer, -math.inf) > now

    def ban(self, peer: str, now: float, seconds: float) -> None:
        """Ban the peer, unless it has a longer ban already."""
        self._until[peer] = max(now + seconds, self._until.get(peer, 0.0))

    def ban_again(self, peer: str, now: float, longest: float = LONGEST_BAN_S) -> float:
        """Ban the peer for FIRST_BAN_S, or twice as long as the last time. Returns the seconds."""
        times, until = self._again.get(peer, (0, now))
        times = times if now - until < 24 * 3600 else 0
        seconds = min(longest, FIRST_BAN_S * float(1 << times))
        self.ban(peer, now, seconds)
        self._again[peer] = (min(times + 1, 16), now + seconds)
        return seconds


class RateLimit(Bans):
    """Token buckets for what each peer may send, and bans of those that send more.

    Engines use it. The peer that hands us a frame pays for it before anything in it is checked, as forged and
    broken frames have no author. A peer in the mesh passes on everybody's frames, so its rate is that of a
    busy swarm. A peer whose bucket is empty is banned.

    buckets: by what is sent.
    """

    def __init__(self, buckets: Mapping[str, TokenBuckets[str]]) -> None:
        super().__init__()
        self._buckets = buckets

    def pay(self, peer: str, now: float, what: str, amount: float = 1.0) -> bool:
        """Charge the peer, or ban it and return False where it has too few tokens."""
        if self._buckets[what].of(peer, now).wait(now, amount) == 0:
            return True
        self._buckets[what].forget(peer)
        self.ban_again(peer, now)
        return False
