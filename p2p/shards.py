"""Where a node listens and publishes, so that what it hears stays the same however large the swarm is. Pure; `now` and `rng` are arguments.

**Shards.** Each node draws a number in [0, 1) once. The swarm is cut into as many shards as its size asks for, and a node's home is the
shard that its number falls into: it publishes there. A rover, which listens only, stays elsewhere for some minutes and moves on, so that
experience crosses the whole swarm. While all fit into little more than two shards there is but one, 0, where everybody always is.

**Numbers.** Shards are the leaves of a binary tree, numbered as a heap: level L has 2^L to 2^(L+1) − 1. They grow by linear hashing
(Litwin, 1980): K = 2^L + p shards are the leaves of level L, of which the first p are cut in two. So one more shard moves the members of
one, who know each other already, and nodes that differ a little about K differ about few shards. K is taken from a ladder of small steps.

**Size.** A node counts the authors that it hears at home; that, divided by its home's share of all numbers, is its own estimate. Now and
then somebody says his in a `hello` on shard 0: the swarm together says one every HELLO_EVERY seconds, whatever its size. The median of
what different authors said in the last WINDOW seconds is the size. Everybody hears the same hellos, so everybody comes to the same K.
Who has just come asks some of the peers that it is connected to, and need not wait for a hello.

**Liars.** Who brings more identities than there are honest hellos in the window, some twenty, has the median. A node that has counted for
COUNTED seconds therefore believes no hello whose size is more than TRUST times, or less than 1 / TRUST of, its own count, and moves K
once in PACE seconds, by at most a factor STEP: shards become at most TRUST times as thin or as full. A newcomer, which has counted
nothing, follows the liars to where nobody is, and comes back (`_search`). Who fills shards with authors moves the count itself; what an
author may cost is the inbox's business.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from p2p.types import PeerId

HELLO = "hello"  # the envelope's kind
QUESTION = b"\x04"  # to a connected peer: what do you take the swarm to be?
MAX_HELLO = 16  # bytes of a body
HELLO_VERSION = 1
HELLO_EVERY = 30.0  # seconds between two hellos in the whole swarm
HELLO_LEAST = 60.0  # seconds between two of one node
WINDOW = 600.0  # seconds for which a hello counts
KEPT_HELLOS = 512  # authors
MAX_SIZE = 10_000_000
MAX_SHARDS = 2**15  # then every number is below 2^16

BUDGET = 56 * 1024  # bytes of offers heard in a round: 3.5 times what a round trains on (J = 4 rollouts of 4 KiB)
OFFER_BYTES = 600  # one copy of an offer of 8 rollouts, GossipSub's and the transport's own bytes included
COPIES = 5  # of each offer that reach a node in a mesh of 6 to 12 …
GOSSIP_BYTES = 1000  # … and what those outside the mesh say of it

TOGETHER = 2.5  # of what a shard should have: so many stay in one, for of two shards everybody would be in both
LADDER = 1.1  # ratio of two neighbouring numbers of shards
GROW, SHRINK = 1.15, 0.8  # of what a shard should have: beyond, K changes
ROVE = 240.0  # seconds at one place, from half of it to one and a half
BRIDGE = 60.0  # seconds for which a node goes on listening at the home that it left
COUNTED = 150.0  # seconds at one home after which the count there is trusted
TRUST = 3.0
STEP = 2.0  # by which K changes at once, at most …
PACE = 60.0  # … and seconds until it may again
FOLLOW = 600.0  # seconds after which a node that differs from the others' K takes theirs, where it fits the size too
COMPANY = 8  # members connected, from which on the swarm may be a large one
PATIENCE = (60.0, 120.0)  # seconds after which a node that has heard nothing takes the swarm for a small one
FEW = 3  # authors on shard 0 who show the same, or peers who, when asked, do not know either
ASK = 3  # peers that a newcomer asks
_QUIET = 150.0  # seconds after which an author heard once counts as gone
_GAPS = 2.5  # … and one heard more often, in its own mean gaps
_QUIET_RANGE = (60.0, 900.0)
_ANYTHING = (0.0, float(MAX_SIZE))
_AUTHORS = 4096  # remembered at home


class _Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    version: int
    size: int
    shards: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class Hello:
    """What one node says of the swarm: how many authors it takes it to have, and into how many shards it is cut."""

    size: int
    shards: int


def encode_hello(hello: Hello) -> bytes:
    return _encoder.encode(_Body(HELLO_VERSION, hello.size, hello.shards))


def decode_hello(body: bytes) -> Hello | None:
    """None for what `encode_hello` would not have written, or a later version."""
    try:
        parsed = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    good = parsed.version == HELLO_VERSION and 0 < parsed.size <= MAX_SIZE and 0 < parsed.shards <= MAX_SHARDS
    return Hello(parsed.size, parsed.shards) if good and _encoder.encode(parsed) == body else None


def authors_of(
    budget: float = BUDGET, offer_bytes: float = OFFER_BYTES, copies: float = COPIES, gossip_bytes: float = GOSSIP_BYTES
) -> float:
    """Authors that one shard should have, for a node hears two."""
    return max(1.0, budget / (2 * (offer_bytes * copies + gossip_bytes)))


def shards_of(size: float, authors: float) -> int:
    """Into how many shards a swarm of `size` is cut: of the ladder's numbers the one nearest to size / authors; or 1."""
    if size <= TOGETHER * authors:
        return 1
    wanted = min(MAX_SHARDS, size / authors)
    lower = upper = 2
    while upper < wanted:
        lower, upper = upper, min(MAX_SHARDS, max(upper + 1, round(upper * LADDER)))
    return lower if wanted * wanted < lower * upper else upper


def shard_at(number: float, shards: int) -> int:
    """The shard that a number in [0, 1) falls into."""
    if shards < 2:
        return 0
    level = shards.bit_length() - 1
    if int(number * 2**level) < shards - 2**level:
        level += 1
    return int(2**level + int(number * 2**level))


def share_of(shard: int) -> float:
    """The part of all numbers that fall into this shard."""
    return 1.0 if shard < 2 else 0.5 ** (shard.bit_length() - 1)


@dataclass(frozen=True, slots=True)
class Placement:
    home: int | None  # where to publish; None: not known yet, keep the newest until it is
    listening: frozenset[int]  # besides shard 0, as `Engine.subscribe` takes it


class _Counting:
    """The authors heard at home: who is there, by how often each speaks."""

    def __init__(self, now: float) -> None:
        self.since = now
        self._heard: dict[PeerId, tuple[float, float]] = {}  # author -> when last, and the seconds after which it counts as gone

    def heard(self, author: PeerId, now: float) -> None:
        last, quiet = self._heard.pop(author, (None, _QUIET))
        if last is not None:
            low, high = _QUIET_RANGE
            quiet += 0.3 * (min(high, max(low, _GAPS * (now - last))) - quiet)
        self._heard[author] = (now, quiet)
        if len(self._heard) > _AUTHORS:
            del self._heard[next(iter(self._heard))]

    def count(self, now: float) -> int:
        gone = [author for author, (last, quiet) in self._heard.items() if now - last > quiet]
        for author in gone:
            del self._heard[author]
        return len(self._heard)


class Shards:
    """Where one node is.

    Call `look` and `hello_due` every few seconds, `heard` for each set of rollouts or offer admitted, `told` for each hello.
    """

    def __init__(self, rng: random.Random, now: float, *, authors: float | None = None) -> None:
        """authors: that a shard should have; by default what the budget allows."""
        self._rng = rng
        self._authors = authors or authors_of()
        self._number, self._rover = rng.random(), rng.random()
        self._settled = False
        self.shards = 1
        self._home = _Counting(now)
        self._ours: float | None = None  # what we counted when we last had counted for long enough
        self._at = 0  # the home's number
        self._left: tuple[int, float] | None = None  # the home that we left, and until when we listen there
        self._rove_at = now + self._stay()
        self._told: dict[PeerId, tuple[float, Hello]] = {}  # the latest said last
        self._credible = _ANYTHING  # sizes that this count does not contradict
        self._searched = 0  # homes in a row at which nobody was
        self._differs: float | None = None  # since when the others' K is another
        self._stepped = now
        self._due, self._saved = rng.expovariate(1.0), 0.0
        self._looked = now
        self._patience = now + rng.uniform(*PATIENCE)
        self._ignorant: set[PeerId] = set()  # who did not know either

    def heard(self, author: PeerId, shard: int, now: float) -> None:
        """A set of rollouts, or an offer of one, was admitted that came in this shard."""
        if shard == self._at:
            self._home.heard(author, now)

    def told(self, author: PeerId, hello: Hello, now: float) -> None:
        """A hello was admitted. An author's latest counts."""
        self._told.pop(author, None)
        self._told[author] = (now, hello)
        if len(self._told) > KEPT_HELLOS:
            del self._told[next(iter(self._told))]

    def whom(self, peers: Sequence[PeerId]) -> Sequence[PeerId]:
        """Which of the connected peers to ask the QUESTION now: a newcomer need not wait for a hello. Nobody, once we know."""
        return () if self._settled else self._rng.sample(peers, min(ASK, len(peers)))

    def answer(self, now: float) -> bytes:
        """What to say to a peer's QUESTION: a hello's body, or nothing."""
        return encode_hello(Hello(min(MAX_SIZE, round(self.size(now))), self.shards)) if self._settled else b""

    def answered(self, peer: PeerId, answer: bytes, now: float) -> None:
        """What a peer said to our QUESTION."""
        hello = decode_hello(answer)
        if hello is not None:
            self.told(peer, hello, now)
        else:
            self._ignorant.add(peer)

    def counted(self, now: float) -> float:
        """Our own estimate of the swarm's size, ourselves included, from the authors heard at home."""
        return 1.0 + self._home.count(now) / share_of(self._at)

    def size(self, now: float) -> float:
        """How many authors the swarm has, as far as we know; never less than 1."""
        if self._trusted(now):
            self._ours, self._searched = self.counted(now), 0
            # Who is left behind on shard 0 with a few hears only them, so a small count there says nothing against a large swarm.
            self._credible = (self._ours / TRUST, self._ours * TRUST if self._at else float(MAX_SIZE))
        believed = self._believed(now)
        if not believed:
            return self._ours or self.counted(now)
        size = float(median(hello.size for hello in believed))
        return size if self._at else max(size, self.counted(now))  # whoever is heard on shard 0 is there, whatever was said before it came

    def look(self, now: float, company: int = 0) -> Placement:
        """Where to be from now on. company: members of the swarm that we are connected to."""
        self._settle(now)
        if self._settled:
            self._decide(now)
        if now >= self._rove_at:
            self._rove_at = now + self._stay()
            self._rover = self._rng.random()
        for _ in range(8):
            if shard_at(self._rover, self.shards) != self._at:
                break
            self._rover = self._rng.random()
        if self._left is not None and now >= self._left[1]:
            self._left = None
        places = {self._at, shard_at(self._rover, self.shards)} | ({self._left[0]} if self._left else set())
        # Until it is settled it knows of shard 0 alone. With little company that cannot be wrong by much: then the swarm, or what we see of
        # it, is small.
        return Placement(self._at if self._settled or company < COMPANY else None, frozenset(places - {0}))

    def hello_due(self, now: float) -> bytes | None:
        """The body of a hello to publish on shard 0 now, or None. The gaps are exponential, so who came late says his part."""
        every = max(HELLO_LEAST, HELLO_EVERY * self.size(now))
        self._saved += max(0.0, now - self._looked) / every
        self._looked = now
        if self._saved < self._due or not self._trusted(now):
            return None  # who has counted too short would only repeat what he heard; his turn waits
        self._due, self._saved = self._rng.expovariate(1.0), 0.0
        return encode_hello(Hello(min(MAX_SIZE, round(self.counted(now))), self.shards))

    def _trusted(self, now: float) -> bool:
        """Whether what we count at home says something: for long enough, and not nobody at all, which may be the wrong place."""
        return self._settled and now - self._home.since >= COUNTED and self._home.count(now) > 0

    def _stay(self) -> float:
        return ROVE * self._rng.uniform(0.5, 1.5)

    def _believed(self, now: float) -> list[Hello]:
        """What was said lately, less what our own count contradicts."""
        while self._told and now - (first := next(iter(self._told.items())))[1][0] > WINDOW:  # they are in the order in which they came
            del self._told[first[0]]
        low, high = self._credible
        return [hello for _, hello in self._told.values() if low <= hello.size <= high]

    def _settle(self, now: float) -> None:
        """Whether we know enough of the swarm to publish. A newcomer to a large one that published on shard 0 would be heard by all."""
        if not self._settled:
            few = self._home.count(now) >= FEW or len(self._ignorant) >= FEW
            self._settled = bool(self._told) or few or now >= self._patience

    def _decide(self, now: float) -> None:
        """Change K where the size asks for it, or where all others have another."""
        if now - self._home.since >= COUNTED and self._home.count(now) == 0 and (self.shards > 1 or self._told):
            self._search(now)
            return
        size = self.size(now)
        if self._ours is None and not self._told:
            return
        wanted = self.shards
        if not self._fits(size, self.shards):
            wanted = shards_of(size, self._authors)
        others = self._others(now)
        if others is None or others == self.shards or not self._fits(size, others):
            self._differs = None
        elif self._differs is None:
            self._differs = now
        if self._differs is not None and others is not None and (now - self._differs >= FOLLOW or self._ours is None):
            wanted, self._differs = others, None
        if self._ours is not None:
            wanted = round(min(max(wanted, self.shards / STEP), self.shards * STEP)) if now - self._stepped >= PACE else self.shards
        if wanted != self.shards:
            self._move(wanted, now)

    def _search(self, now: float) -> None:
        """Nobody is at this home, so what we counted before says nothing any more. We take another home, where the others say that they
        are; and if nobody is there either, whoever said so were liars: ever larger shards hold the others somewhere on the way.
        """
        self._number, self._searched = self._rng.random(), self._searched + 1
        self._ours, self._credible = None, _ANYTHING
        size, others = self.size(now), self._others(now)
        shards = others if others is not None and self._fits(size, others) else shards_of(size, self._authors)
        if self._searched > 1 and self.shards >= 2 * STEP:
            shards = int(self.shards / STEP)
        else:
            self._searched = 1
        self._move(shards, now)

    def _fits(self, size: float, shards: int) -> bool:
        full = self._authors * (shards if shards > 1 else TOGETHER)
        return (shards == 1 or size >= SHRINK * full) and (size <= GROW * full or shards == MAX_SHARDS)

    def _others(self, now: float) -> int | None:
        """What most of the latest hellos say K is; None where no more than half agree."""
        votes = Counter(hello.shards for hello in self._believed(now))
        if not votes:
            return None
        shards, count = max(votes.items(), key=lambda vote: (vote[1], vote[0]))
        return shards if 2 * count > votes.total() else None

    def _move(self, shards: int, now: float) -> None:
        left, self._at = self._at, shard_at(self._number, shards)
        self.shards, self._stepped = shards, now
        if self._at != left:
            self._left = (left, now + BRIDGE) if left else None
            self._home = _Counting(now)
