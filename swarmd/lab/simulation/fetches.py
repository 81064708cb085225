"""Simulated fetching of blobs: asks the providers of `p2p.blobs.providers`, with the hedging and time limits of `p2p.blobs.fetch`.

Whoever is asked and not connected is dialled first, and the connection is kept for a while (`p2p.peers.shard_peers.RequestConnections`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from p2p.blobs.fetch import HEDGE, answer, question
from p2p.peers.shard_peers import IDLE
from p2p.types import PeerId
from swarmd.exchange.offers import Offered
from swarmd.lab.simulation.events import Events
from swarmd.lab.simulation.gossip import PACKET, STREAM, Gossip
from swarmd.lab.simulation.internet import Internet
from swarmd.lab.simulation.ledger import Ledger
from swarmd.lab.simulation.node import SimulatedNode

OPENING = 2 * (PACKET + STREAM) + 60  # bytes each side receives until a stream has its protocol
SEGMENT = 1400  # bytes of a packet
UNREACHED = 5.0  # seconds after which a dial of somebody who is gone has failed

Done = Callable[["Fetch", bool], None]


@dataclass(slots=True, eq=False)
class Fetch:
    node: SimulatedNode
    item: Offered
    since: float
    life: int
    holders: Sequence[int] = ()
    asked: int = 0  # holders
    refused: int = 0
    settled: bool = False


class Fetches:
    """nodes: by number. numbers: of a peer id. done: called once for each fetch, with whether the blob is here."""

    def __init__(
        self,
        events: Events,
        internet: Internet,
        ledger: Ledger,
        gossip: Gossip,
        nodes: Sequence[SimulatedNode],
        numbers: Mapping[PeerId, int],
        done: Done,
    ) -> None:
        self._events, self._internet, self._ledger, self._gossip = events, internet, ledger, gossip
        self._nodes, self._numbers, self._done = nodes, numbers, done

    def begin(self, node: SimulatedNode, item: Offered, author: int, via: int) -> Fetch:
        fetch = Fetch(node, item, self._events.now, node.life)
        connected = (self._nodes[other].name for other in self._gossip.links[node.number])
        likely = node.providers.likely([self._nodes[author].name, self._nodes[via].name], connected, lambda _: True)
        fetch.holders = [self._numbers[name] for name in likely]
        self._next(fetch)
        return fetch

    def cancel(self, fetch: Fetch) -> None:
        if not fetch.settled:
            fetch.settled = True
            self._done(fetch, False)

    def _next(self, fetch: Fetch) -> None:
        """Ask the next holder, and the one after it where this one lets us wait."""
        if fetch.settled or fetch.life != fetch.node.life or fetch.asked == len(fetch.holders):
            return
        holder = fetch.holders[fetch.asked]
        fetch.asked += 1
        self._events.after(HEDGE, self._hedge, fetch, fetch.asked)
        now, node = self._events.now, fetch.node.number
        if not self._gossip.up(holder):
            self._events.after(UNREACHED, self._refused, fetch)
            return
        wait = self._gossip.connect(node, holder, "visit")
        if self._gossip.links[node].get(holder) == "visit":
            fetch.node.visits[holder] = now
        size = len(question([fetch.item.id])) + OPENING
        when = self._internet.streamed(node, holder, size, now + wait) + 2 * self._internet.way(node, holder)  # multistream's way, too
        self._events.at(when, self._asked, fetch, holder, size)

    def _hedge(self, fetch: Fetch, asked: int) -> None:
        if fetch.asked == asked:
            self._next(fetch)

    def _asked(self, fetch: Fetch, holder: int, size: int) -> None:
        self._count(holder, size)
        if fetch.life != fetch.node.life:
            return
        if not self._gossip.up(holder):
            self._events.after(UNREACHED, self._refused, fetch)
            return
        has = fetch.item.id in self._nodes[holder].held
        reply = len(answer([bytes(fetch.item.size) if has else None])) + OPENING
        reply += PACKET * (reply // SEGMENT)
        when = self._internet.streamed(holder, fetch.node.number, reply, self._events.now)
        self._events.at(when, self._answered, fetch, reply, has)

    def _answered(self, fetch: Fetch, size: int, has: bool) -> None:
        if fetch.life != fetch.node.life:
            return
        self._count(fetch.node.number, size)  # a second answer, after a hedge, costs as well
        if has and not fetch.settled:
            fetch.settled = True
            self._done(fetch, True)
        elif not has:
            self._refused(fetch)

    def _refused(self, fetch: Fetch) -> None:
        fetch.refused += 1
        if fetch.settled or fetch.life != fetch.node.life:
            return
        if fetch.refused == len(fetch.holders):
            fetch.settled = True
            self._done(fetch, False)
        elif fetch.refused == fetch.asked:
            self._next(fetch)

    def _count(self, node: int, size: int) -> None:
        self._ledger.bytes["fetches"][node] += size
        self._ledger.work["messages"][node] += 1

    def tidy(self, node: SimulatedNode) -> None:
        """Hang up on those that were not asked for a while."""
        old = self._events.now - IDLE
        for other in [other for other, since in node.visits.items() if since < old]:
            del node.visits[other]
            if self._gossip.links[node.number].get(other) == "visit":
                self._gossip.disconnect(node.number, other)
