"""Chooses the shards that a node listens and publishes in, so that its traffic does not grow with the swarm. Pure.

**Shards.** Each node draws a number in [0, 1) once. The swarm is cut into K shards by its size. A node's home is the shard that its number
falls into; it publishes there. It also listens in a second shard, its rover, which changes every few minutes, so that experience crosses
the whole swarm. A swarm that fits into little more than two shards has one, 0, where every node always is.

**Numbering.** Shards are the leaves of a binary tree, numbered as a heap: level L has 2^L to 2^(L+1) − 1. K grows by linear hashing
(Litwin, 1980): K = 2^L + p shards are the leaves of level L, of which the first p are cut in two. So one more shard moves the members of
one, who know each other already, and nodes that differ a little about K differ about few shards. K is taken from a ladder of small steps.

**Size.** A node's own estimate is the number of authors at home (`p2p.shards.headcount`) over the home's share of all numbers. Authors
count that were connected to it or useful; one heard in two shards at a time counts in none. Every ASK_EVERY seconds the node asks one
connected member for its estimate, and one author heard at home that it never met, which is thereby connected. The size is the lower median
of all estimates:

- only connected members vote, and a network group has one vote;
- members that were never useful have fewer votes than the useful ones and the node itself, so they cannot choose the median. While no
  useful member is connected, all vote. The same holds for the K that most say, and for the home to try when nobody is at ours;
- estimates beyond TRUST times the node's own, or below 1 / TRUST of it, do not count;
- K moves once in PACE seconds, by a factor of STEP at most, and only as far as 1 / SURE to SURE times the node's own count asks for;
- the node's own count is used from COUNTED seconds at one home on. While all authors heard on shard 0 are connected to it, it stays there.

**Finding the others.** A newcomer, or a node that was left behind, has no useful count of its own. Where most connected members say another
K, it listens at the home that it would have there, and moves when it hears enough counting authors there. To fewer shards only useful
members lead, where one is connected, and then as many must be heard there as at home. So votes decide where a node listens, and only what
it hears moves it.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from p2p.netgroup import LOCAL
from p2p.shards.estimate import MAX_SHARDS, MAX_SIZE, Estimate, decode_estimate, encode_estimate
from p2p.shards.headcount import Headcount, Met
from p2p.types import PeerId

ASK_EVERY = 10.0  # seconds between two questions of one node
WINDOW = 120.0  # seconds for which an answer counts
KEPT_ANSWERS = 512  # peers
KEPT_STRANGERS = 256  # authors that we heard where we have or seek our home, and never met

BUDGET = 56 * 1024  # bytes of offers heard in a round: 3.5 times what a round trains on (J = 4 rollouts of 4 KiB)
OFFER_BYTES = 600  # one copy of an offer of 8 rollouts, GossipSub's and the transport's own bytes included
COPIES = 5  # of each offer that reach a node in a mesh of 6 to 12 …
GOSSIP_BYTES = 1000  # … and what those outside the mesh say of it

TOGETHER = 2.5  # of what a shard should have: so many stay in one, for of two shards everybody would be in both
LADDER = 1.1  # ratio of two neighbouring numbers of shards
GROW, SHRINK = 1.15, 0.8  # of what a shard should have: beyond, K changes
ROVE = 240.0  # seconds at one place, from half of it to one and a half
BRIDGE = 60.0  # seconds for which a node goes on listening at the home that it left
ONE_HOME = 150.0  # seconds for which an author that publishes in two shards at a time does not count
COUNTED = 150.0  # seconds at one home after which the count there is trusted
TRUST = 3.0
SURE = 1.5  # times our own count, beyond which the others' word does not move K
PULL = 0.2  # of its own count that a node puts to the others' estimates, every ASK_EVERY seconds
STEP = 2.0  # by which K changes at once, at most …
PACE = 60.0  # … and seconds until it may again
FOLLOW = 120.0  # seconds after which a node that differs from the others' K takes theirs, where it fits the size too
COMPANY = 8  # members connected, from which on the swarm may be a large one
PATIENCE = (60.0, 120.0)  # seconds after which a newcomer that has found no home publishes on shard 0
LISTENED = 30.0  # seconds to listen elsewhere before a home where somebody is heard is left; with little company COUNTED
AIM = 120.0  # seconds for which a node that looks for its home listens at one place
KNOWING = 0.25  # of those who were asked, who make it worth while to go by what they say
FEW = 3  # peers who, when asked, do not know either; or authors heard at one place who are enough to move there
ASK = 3  # peers that a newcomer asks at a time
_ANYTHING = (0.0, float(MAX_SIZE))


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


def middle_of(votes: Sequence["Estimate | None"], count: int) -> list["Estimate | None"]:
    """So many of the votes, the largest and the smallest sizes left out; all where they are fewer. Who does not know counts as 0."""
    count = max(0, min(count, len(votes)))
    start = (len(votes) - count) // 2
    return sorted(votes, key=lambda vote: vote.size if vote is not None else 0)[start : start + count]


def share_of(shard: int) -> float:
    """The part of all numbers that fall into this shard."""
    return 1.0 if shard < 2 else 0.5 ** (shard.bit_length() - 1)


@dataclass(frozen=True, slots=True)
class Placement:
    home: int | None  # where to publish; None: not known yet, keep the newest until it is
    listening: frozenset[int]  # besides shard 0, as `P2pEngine.subscribe` takes it


class Shards:
    """The shards of one node, and what it knows of the swarm's size.

    Call `look` every few seconds, then ask `whom` it names; `heard` for each set of rollouts or offer admitted.
    """

    def __init__(self, rng: random.Random, now: float, *, authors: float | None = None, shards: int = 1) -> None:
        """authors: that a shard should have; by default what the budget allows. shards: how many there are, where that is known."""
        self._rng = rng
        self._authors = authors or authors_of()
        self._number, self._rover = rng.random(), rng.random()
        self._settled = shards > 1
        self.shards = shards
        self._at = shard_at(self._number, shards)  # the home
        self._counts = {place: Headcount(now) for place in (0, self._at)}  # of each shard that we are in
        self.met = Met()
        self._useful: Collection[PeerId] = ()  # of those connected, who were useful to us
        self._strangers: dict[PeerId, None] = {}  # neither met nor asked; newest last
        self._everywhere: dict[PeerId, float] = {}  # heard in two shards at a time, and until when that is remembered
        self._ours: float | None = None  # the swarm's size by our own count, when we last had counted for long enough
        self._agreed: float | None = None  # … and drawn to what the others say
        self._agreed_at = now
        self._left: tuple[int, float] | None = None  # the home that we left, and until when we listen there
        self._rove_at = now + self._stay()
        self._told: dict[PeerId, tuple[float, Estimate | None]] = {}  # the latest said last; None: who was asked and does not know
        self._searched = False  # whether nobody was at the home before this one
        self._differs: float | None = None  # since when the others' K is another
        self._stepped = now
        self._ask_at = now
        self._patience = now + rng.uniform(*PATIENCE)
        self._waited = False
        self._aimed: tuple[int, float] | None = None  # the K whose home we listen at, and until when

    def heard(self, author: PeerId, shard: int, now: float, *, proven: bool) -> bool:
        """Something was admitted in this shard. Whether its author counts: we met it, or it proved useful."""
        met = self.met.group(author) is not None
        sought = shard_at(self._number, self._aimed[0]) if self._aimed is not None else self._at
        if not met and shard == sought:
            self._strangers.pop(author, None)
            self._strangers[author] = None
            if len(self._strangers) > KEPT_STRANGERS:
                del self._strangers[next(iter(self._strangers))]
        if (met or proven) and shard in self._counts:
            self._counts[shard].heard(author, now, proven=proven)
            elsewhere = self._counts.keys() - {0, shard, self._left[0] if self._left else 0}
            if shard and any(self._counts[place].has(author, now) for place in elsewhere):
                self._everywhere.pop(author, None)
                self._everywhere[author] = now + ONE_HOME
        return met or proven

    def whom(self, now: float) -> Sequence[PeerId]:
        """The peers to send SWARM_SIZE to now: connected ones, longest unasked first, and an author that we never met.

        A newcomer asks several at once. Half of the time useful members come first: without their votes the others' do not count.
        """
        if self._settled and now < self._ask_at:
            return ()
        self._ask_at = now + ASK_EVERY * self._rng.uniform(0.5, 1.5)
        peers = self._rng.sample(sorted(self.met.connected), len(self.met.connected))
        peers.sort(key=lambda peer: self._told[peer][0] if peer in self._told else 0.0)
        if self._useful and self._rng.random() < 0.5:
            lately = {peer for peer, (at, _) in self._told.items() if now - at < WINDOW / 2}
            peers.sort(key=lambda peer: peer not in self._useful or peer in lately)
        strangers = [author for author in self._strangers if self.met.group(author) is None]
        chosen = self._rng.sample(strangers, min(1, len(strangers)))
        for author in chosen:
            del self._strangers[author]
        return [*peers[: 1 if self._settled else ASK], *chosen]

    def answer(self, now: float) -> bytes:
        """The answer to SWARM_SIZE: an estimate, or nothing while we have not counted ourselves or useful members say another K."""
        size = min(MAX_SIZE, round(self.size(now)))
        lost = self._aimed is not None and self._goal(self._weighed(now)) is not None
        return encode_estimate(Estimate(size, self.shards)) if self._ours is not None and not lost else b""

    def answered(self, peer: PeerId, answer: bytes, now: float) -> None:
        """Take in a peer's answer to SWARM_SIZE; it replaces the peer's earlier one."""
        self._told.pop(peer, None)
        self._told[peer] = (now, decode_estimate(answer))
        if len(self._told) > KEPT_ANSWERS:
            del self._told[next(iter(self._told))]

    def counted(self, now: float) -> float:
        """Our own estimate of the swarm's size, ourselves included, from the authors at home."""
        while self._everywhere and next(iter(self._everywhere.values())) <= now:
            del self._everywhere[next(iter(self._everywhere))]
        return 1.0 + self._home.count(now, self.met, self._everywhere) / share_of(self._at)

    def size(self, now: float) -> float:
        """How many authors the swarm has, as far as we know; never less than 1."""
        self._count(now)
        believed = [float(estimate.size) for estimate in self._believed(now)]
        if self._ours is None:
            return median_low(believed) if believed else 1.0
        if self._agreed is None:
            self._agreed, self._agreed_at = self._ours, now - ASK_EVERY
        if now - self._agreed_at >= ASK_EVERY:
            low, high = self._ours / TRUST, self._ours * TRUST
            middle = median_low([*believed, min(high, max(low, self._agreed))])
            self._agreed, self._agreed_at = middle + PULL * (self._ours - middle), now
        return self._agreed

    def look(self, now: float, connected: Mapping[PeerId, str], useful: Collection[PeerId] = ()) -> Placement:
        """The shards to be in from now on. connected: connected members and their network groups. useful: those useful to us so far."""
        self.met.look(connected, now)
        self._useful = useful
        goal = self._aim(now)
        self._settle(now, goal)
        self._decide(now, goal)
        if now >= self._rove_at:
            self._rove_at = now + self._stay()
            self._rover = self._rng.random()
        for _ in range(8):
            if shard_at(self._rover, self.shards) != self._at:
                break
            self._rover = self._rng.random()
        if self._left is not None and now >= self._left[1]:
            self._left = None
        goal = self._aim(now)
        rover = shard_at(self._rover, self.shards) if not goal else shard_at(self._number, goal)
        places = {0, self._at, rover} | ({self._left[0]} if self._left else set())
        self._counts = {place: self._counts.get(place) or Headcount(now) for place in places}
        # Until it is settled it knows of shard 0 alone. With little company that cannot be wrong by much: then the swarm, or what we see of
        # it, is small.
        return Placement(self._at if self._settled or len(connected) < COMPANY else None, frozenset(places - {0}))

    @property
    def _home(self) -> Headcount:
        return self._counts[self._at]

    def _stay(self) -> float:
        return ROVE * self._rng.uniform(0.5, 1.5)

    def _count(self, now: float) -> None:
        """Trust our own count where it says something: for long enough, and not nobody at all, which may be the wrong place."""
        if self._settled and now - self._home.since >= COUNTED and self._home.count(now, self.met) > 0:
            self._ours, self._searched = self.counted(now), False

    def _votes(self, now: float) -> tuple[list[Estimate | None], list[Estimate | None]]:
        """Recent answers of connected members, those of useful members and those of the others.

        A network group has one vote, its middle one; in a group with useful members only they vote. On the local network each member votes.
        """
        while self._told and now - (first := next(iter(self._told.items())))[1][0] > WINDOW:  # they are in the order in which they came
            del self._told[first[0]]
        said: defaultdict[tuple[str, bool], list[Estimate | None]] = defaultdict(list)
        for peer, (_, estimate) in self._told.items():
            if peer in self.met.connected:
                said[self.met.connected[peer], peer in self._useful].append(estimate)
        votes: tuple[list[Estimate | None], list[Estimate | None]] = ([], [])
        for (group, useful), those in said.items():
            if group == LOCAL:
                votes[not useful].extend(those)
            elif useful or (group, True) not in said:
                votes[not useful].extend(middle_of(those, 1))
        return votes

    def _weighed(self, now: float, low: float = 0.0, high: float = MAX_SIZE) -> list[Estimate | None]:
        """The votes for sizes from `low` to `high`. Where useful members are connected, the others have fewer votes than they and our own
        count: the median then lies between the sizes that useful members say, whatever the others say.
        """
        useful, others = ([vote for vote in votes if vote is None or low <= vote.size <= high] for votes in self._votes(now))
        if self._useful:
            others = middle_of(others, sum(vote is not None for vote in useful) - (self._ours is None))
        return [*useful, *others]

    def _believed(self, now: float) -> list[Estimate]:
        """The weighed votes of those who know, less what our own count contradicts."""
        low, high = (self._ours / TRUST, self._ours * TRUST) if self._ours is not None else _ANYTHING
        return [vote for vote in self._weighed(now, low, high) if vote is not None]

    def _aim(self, now: float) -> int | None:
        """The goal: where to listen. Kept for a while, as a node that keeps changing places hears nobody."""
        useful, others = self._votes(now)
        goal = self._goal([*useful, *others])
        if self._useful and (self.shards == 1 if goal is None else goal < self.shards):  # others lead to more alone
            goal = self._goal(useful)
        if goal is None or self._aimed is None or self._aimed[0] == self.shards or now >= self._aimed[1]:
            self._aimed = (goal, now + AIM) if goal is not None else None
        return self._aimed[0] if self._aimed is not None else None

    def _goal(self, votes: Sequence[Estimate | None]) -> int | None:
        """The K of most of these votes and our own, where it is not ours and they say another size than our own count; else None."""
        known = [estimate for estimate in votes if estimate is not None]
        if len(known) < max(1, min(2, len(self.met.connected))) or KNOWING * len(votes) > len(known):
            return None  # where hardly anybody knows, all have just come
        if self._ours is not None:
            known.append(Estimate(max(1, round(self._ours)), self.shards))
        size = median_low(estimate.size for estimate in known)
        if self._ours is not None and self._ours / TRUST <= size <= self._ours * TRUST:
            return None
        shards, count = max(Counter(estimate.shards for estimate in known).items(), key=lambda vote: (vote[1], -vote[0]))
        if 2 * count <= len(known):
            shards = shards_of(median_low(estimate.size for estimate in known), self._authors)
        return None if shards == self.shards else shards

    def _settle(self, now: float, goal: int | None) -> None:
        """Whether we know enough of the swarm to publish. A newcomer to a large one that published on shard 0 would be heard by all."""
        if self._settled:
            return
        if goal is not None and not self._waited:  # now it knows where to listen, and has to find somebody there
            self._waited, self._patience = True, now + self._rng.uniform(*PATIENCE)
        useful, others = self._votes(now)
        votes = [*useful, *others]
        one = all(estimate is None or estimate.shards == 1 for estimate in votes)  # nobody knows of more
        enough = len(votes) >= min(FEW, len(self.met.connected)) > 0
        self._settled = now >= self._patience or (goal is None and one and enough)

    def _decide(self, now: float, goal: int | None) -> None:
        """Change K where the size asks for it, or where all others have another."""
        if goal is not None and self._better(goal, now):
            self._settled, self._ours, self._agreed = True, None, None
            self._move(goal, now)
            return
        if not self._settled:
            return
        if self._at and now - self._home.since >= COUNTED and self._home.count(now, self.met) == 0:
            self._search(now)
            return
        size = self.size(now)
        if self._ours is None or (self._at == 0 and self._home.apart(now, self.met.connected) == 0):
            return  # newcomers go where they hear somebody; who is connected to all needs no shards
        size = min(self._ours * SURE, max(self._ours / SURE, size))
        wanted = self.shards
        if not self._fits(size, self.shards):
            wanted = shards_of(size, self._authors)
        others = self._others(now)
        if others is None or others == self.shards or not self._fits(size, others):
            self._differs = None
        elif self._differs is None:
            self._differs = now
        if self._differs is not None and others is not None and now - self._differs >= FOLLOW:
            wanted, self._differs = others, None
        wanted = round(min(max(wanted, self.shards / STEP), self.shards * STEP)) if now - self._stepped >= PACE else self.shards
        if wanted != self.shards:
            self._move(wanted, now)

    def _better(self, goal: int, now: float) -> bool:
        """Whether to leave our home for that among `goal` shards: enough of those who count are heard there."""
        there = shard_at(self._number, goal)
        if there == self._at:
            return True
        place = self._counts.get(there)
        if place is None:
            return False
        here, proven, heard = self._home.count(now, self.met), self._home.proven(now), place.count(now, self.met)
        wait = 0.0 if not here else COUNTED if len(self.met.connected) < COMPANY else LISTENED
        if now - place.since < wait or (goal < self.shards and heard < here):  # a shard of fewer is a larger one
            return False
        if proven and (self.shards > 1 or goal != self._goal(self._votes(now)[0])):  # useful members do not say so
            return place.proven(now) >= min(FEW, proven / TRUST)
        return heard >= max(1, min(FEW, here / TRUST))

    def _search(self, now: float) -> None:
        """Nobody is at this home, so what we counted before says nothing any more. We take another, and if nobody is there either, or we
        are connected to few, we publish where everybody is.
        """
        self._number, self._ours, self._agreed = self._rng.random(), None, None
        goal = self._goal(self._weighed(now))
        alone = self._searched or len(self.met.connected) < COMPANY
        self._searched = not alone
        self._move(1 if alone else goal or self.shards, now)

    def _fits(self, size: float, shards: int) -> bool:
        full = self._authors * (shards if shards > 1 else TOGETHER)
        return (shards == 1 or size >= SHRINK * full) and (size <= GROW * full or shards == MAX_SHARDS)

    def _others(self, now: float) -> int | None:
        """The K that more than half of the others say; None where there is none."""
        votes = Counter(estimate.shards for estimate in self._believed(now))
        if not votes:
            return None
        shards, count = max(votes.items(), key=lambda vote: (vote[1], vote[0]))
        return shards if 2 * count > votes.total() else None

    def _move(self, shards: int, now: float) -> None:
        left, self._at = self._at, shard_at(self._number, shards)
        self.shards, self._stepped = shards, now
        if self._at != left:
            self._left = (left, now + BRIDGE) if left else None
            self._strangers.clear()
            self._counts.setdefault(self._at, Headcount(now))
