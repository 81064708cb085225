"""Connections into our shards, and connections made for one question. Pure; `now` and `rng` are arguments.

`p2p.peers.outbound` selects peers of the whole swarm. In a large swarm few of those are in our shards. So members of our shards are
searched in the DHT and dialled in addition, until we leave the shard.
"""

import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from p2p.types import PeerId

NEIGHBOURS = 4  # connected members of a shard to have, where there are so many
EXTRA = 6  # connections made for one shard at most
DIALS = 3  # at once
TOLD = 64  # peers that are remembered to be in a shard
UNMET = 10.0  # seconds in which a dialled peer has to show that it is in the shard
AGAIN = 60.0  # seconds between two dials of one peer
LOOK_FIRST, LOOK_LAST = 2.0, 120.0  # seconds between two DHT searches for a shard that lacks members; doubling
SETTLED = 20.0  # seconds in a shard after which we announce ourselves there: a short stay leaves no record
ANNOUNCE_EVERY = 1800.0  # seconds
IDLE = 60.0  # seconds without a question after which a connection made to ask is ended
VISITS = 32  # connections made to ask somebody, at most


@dataclass(slots=True)
class _Made:
    shard: int
    since: float


@dataclass(slots=True)
class _Search:
    look: float  # when to search again
    announce: float  # when to announce ourselves
    wait: float = LOOK_FIRST


class ShardPeers:
    def __init__(self) -> None:
        self._searches: dict[int, _Search] = {}
        self._told: dict[int, dict[PeerId, float]] = {}  # shard -> peer -> when it may be dialled
        self._made: dict[PeerId, _Made] = {}  # connections made for a shard
        self._dialling: dict[PeerId, int] = {}

    def __contains__(self, peer: PeerId) -> bool:
        """Whether we are connected to it for a shard, or dial it for one."""
        return peer in self._made or peer in self._dialling

    def add(self, shard: int, peers: Iterable[PeerId]) -> None:
        """These peers may be in the shard. The newest are remembered."""
        known = self._told.setdefault(shard, {})
        for peer in peers:
            known[peer] = known.pop(peer, 0.0)
        while len(known) > TOLD:
            del known[next(iter(known))]

    def searches_due(self, inside: Mapping[int, Collection[PeerId]], now: float) -> list[tuple[int, bool, bool]]:
        """The DHT requests that are due: (shard, whether to search its members, whether to announce ourselves)."""
        self._searches = {shard: self._searches.get(shard) or _Search(now, now + SETTLED) for shard in inside}
        found = []
        for shard, search in self._searches.items():
            look = len(inside[shard]) < NEIGHBOURS and search.look <= now
            announce = search.announce <= now
            if look:
                search.look, search.wait = now + search.wait, min(2 * search.wait, LOOK_LAST)
            if announce:
                search.announce = now + ANNOUNCE_EVERY
            if look or announce:
                found.append((shard, look, announce))
        return found

    def choose(
        self, inside: Mapping[int, Collection[PeerId]], connected: Collection[PeerId], now: float, rng: random.Random
    ) -> list[PeerId]:
        """The peers to dial now; each is being dialled until `reached` or `missed`. inside: the connected peers of each of our shards."""
        chosen: list[PeerId] = []
        for shard, there in inside.items():
            coming = sum(other == shard for other in self._dialling.values())
            made = sum(link.shard == shard for link in self._made.values())
            count = min(NEIGHBOURS - len(there) - coming, EXTRA - made - coming, DIALS - len(self._dialling))
            known = self._told.get(shard, {})
            due = [peer for peer, after in known.items() if after <= now and peer not in connected and peer not in self._dialling]
            for peer in rng.sample(due, max(0, min(count, len(due)))):
                known[peer] = now + AGAIN
                self._dialling[peer] = shard
                chosen.append(peer)
        return chosen

    def reached(self, peer: PeerId, now: float) -> None:
        shard = self._dialling.pop(peer, None)
        if shard is not None:
            self._made[peer] = _Made(shard, now)

    def missed(self, peer: PeerId) -> None:
        self._dialling.pop(peer, None)

    def prune(self, inside: Mapping[int, Collection[PeerId]], connected: Collection[PeerId], now: float) -> list[PeerId]:
        """Note which peers are in which shard. Returns those to hang up on: dialled for a shard that we left, or that they are not in."""
        for shard in [shard for shard in self._told if shard not in inside]:
            del self._told[shard]
        for peer in [peer for peer in self._made if peer not in connected]:
            del self._made[peer]
        over: list[PeerId] = []
        for peer, link in self._made.items():
            present = [shard for shard, there in inside.items() if peer in there]
            if present:
                link.shard = link.shard if link.shard in present else present[0]
            elif link.shard not in inside or now - link.since > UNMET:
                self._told.get(link.shard, {}).pop(peer, None)
                over.append(peer)
        return over


class RequestConnections:
    """Connections made for a question, and when they were used last."""

    def __init__(self) -> None:
        self._used: dict[PeerId, float] = {}

    def begin(self, peer: PeerId, now: float) -> None:
        """We dialled it for a question."""
        self._used[peer] = now

    def used(self, peer: PeerId, now: float) -> None:
        if peer in self._used:
            self._used[peer] = now

    def prune(self, connected: Collection[PeerId], now: float) -> list[PeerId]:
        """Those to hang up on: idle, or more than we keep."""
        self._used = {peer: at for peer, at in sorted(self._used.items(), key=lambda item: item[1]) if peer in connected}
        idle = [peer for n, (peer, at) in enumerate(self._used.items()) if now - at > IDLE or n < len(self._used) - VISITS]
        for peer in idle:
            del self._used[peer]
        return idle
