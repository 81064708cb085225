"""The simulated network in virtual time: one event loop, links, gossip, questions and churn.

The loop is a heap of (time, sequence, node, event); nothing sleeps, and one seeded generator draws all random
numbers. GossipSub is not simulated: each node hears a frame after some hops, and receives as many bytes as an
earlier simulation of the whole protocol measured. A question to a peer that is not connected needs a dial. A
dial fails if no address is known, if the peer cannot be dialled or has left, or if its inbound places are
taken.
"""

import heapq
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.network.simulation.scenarios import Scenario
from p2p.blobs.blobs import MISSING
from p2p.envelope import check, parse
from p2p.identity import Identity
from p2p.peers.outbound import IDLE_S
from p2p.topic import Topic
from p2p.types import Envelope, PeerId, Reason
from swarmd.exchange.events import Answered, Ask
from swarmd.exchange.events import Event as ExchangeEvent

EPOCH = 1.7e9  # seconds since the epoch when the virtual time is 0
TOPIC = Topic("simulated", "0" * 16)
SWARM_ID = TOPIC.swarm_id
DIALLED = 10  # members that a node stays connected to (docs/p2p.md)
# Inbound connections left for nodes that fetch: members use about ten of 112 (`p2p.engines.libp2p.network`);
# a relay allows 16 (`p2p.engines.libp2p.circuits`).
PLACES, RELAYED_PLACES = 100, 16
DIAL_TRIPS = 2  # round trips of TCP and Noise before a question
DIAL_TIMEOUT_S = 5.0  # seconds until a dial to a peer that has left fails
FANOUT = 8.0  # nodes that one hop of gossip reaches

# COPIES is a factor on a frame's bytes; the rest are bytes received, IP headers included. An earlier
# simulation of the whole protocol measured them.
COPIES = 5.4  # copies of a frame that a node receives
AROUND = 257  # bytes of headers of a copy: GossipSub, yamux and Noise, IP and TCP
CONTROL = 1320  # control bytes for an offer: IHAVE, IWANT, GRAFT and PRUNE
AROUND_BLOB = 900  # bytes of headers of a fetched blob, its question included
QUESTION = 300  # a question to a node without the blob, and its answer
DIAL = 1500  # bytes of a new connection, for each of its ends


@dataclass
class Link:
    """A node's connection to the internet."""

    latency: float  # one-way seconds
    upload: float  # bytes a second
    host: str  # IPv4 address
    address: str  # the multiaddress in its offers; "" if nobody can dial the node
    places: int  # most inbound connections from nodes that fetch
    free_at: float = 0.0  # time at which the last answer in the upload queue is sent


class Visit(NamedTuple):
    """A connection that was dialled in order to ask questions."""

    ready: float  # time at which the connection can be used
    until: float  # time at which it ends unless it is used again


class Frame(NamedTuple):
    """A gossiped frame, and the envelope decoded from it."""

    raw: bytes
    envelope: Envelope


class Arrived(NamedTuple):
    """A frame arrives. via: the peer that forwarded it."""

    frame: Frame
    via: PeerId


class Asked(NamedTuple):
    """A question arrives."""

    asker: "Node"
    ask: Ask


class Join(NamedTuple):
    """The node starts."""


class LookAround(NamedTuple):
    """The node looks at which peers it is connected to."""


class NextRound(NamedTuple):
    """The trainer ends a round and begins the next one."""


class Generated(NamedTuple):
    """The trainer has generated this round's rollouts."""


class Act(NamedTuple):
    """A hostile node's turn."""


class Leaves(NamedTuple):
    """A node is killed."""

    node: "Node"


class Returns(NamedTuple):
    """A killed node is started again."""

    node: "Node"


Event = ExchangeEvent | Arrived | Asked | Join | LookAround | NextRound | Generated | Act | Leaves | Returns


@dataclass
class Tally:
    """Figures of the honest nodes, counted from some moment on."""

    offers: int = 0
    rounds: int = 0
    full: int = 0  # rounds that received all J external rollouts
    places: int = 0  # external rollouts received, at most J a round
    waits: list[float] = field(default_factory=list)  # seconds until a round had all J; its length if never
    questions: int = 0
    delivered: int = 0
    hostile: int = 0  # delivered rollouts by hostile authors
    bytes: Counter[str] = field(default_factory=Counter)  # received by all nodes, by purpose
    dials: int = 0
    refused: int = 0  # dials rejected because the peer's inbound places were taken
    blamed: Counter[str] = field(default_factory=Counter)  # reports of hostile peers, by reason
    unserved: int = 0  # reports of honest peers that did not serve
    wrong: int = 0  # reports of honest peers for another peer's fault


class Node:
    """A node of the network. Each kind of node implements `take`."""

    def __init__(self, network: "Network", identity: Identity, link: Link) -> None:
        self.network, self.identity, self.link = network, identity, link
        self.id = identity.peer_id
        self.here = True
        self.connected: dict[PeerId, Node] = {}
        self.visits: dict[PeerId, Visit] = {}  # connections from nodes that dialled it to fetch
        self.open: dict[int, Ask] = {}  # its own open questions
        self._looks = False  # whether a `LookAround` is scheduled

    def take(self, event: Event) -> None:
        """Handle an event whose time has come."""
        raise NotImplementedError

    def look_around(self) -> None:
        """Schedule a look at the connected peers in a second, since they changed."""
        if not self._looks:
            self._looks = True
            self.network.at(self.network.now + 1.0, self, LookAround())

    def looked(self) -> None:
        self._looks = False


class Network:
    """All nodes of one swarm, and the event loop. The same scenario and seed give the same run."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.seed = scenario, seed
        self.rng = random.Random(seed)
        self.now, self.tally = 0.0, Tally()
        self.nodes: dict[PeerId, Node] = {}
        self.hostile: set[PeerId] = set()
        self.sent: list[float] = []  # when each offer was sent
        self.silenced = False  # whether frames reach only the shared ears
        self.ears: Node | None = None  # hears frames for all nodes if hearing is shared
        self._dialable: list[Node] = []
        self._heap: list[tuple[float, int, Node, Event]] = []
        self._sequence = itertools.count()
        self._hops = max(1.0, math.log(scenario.nodes, FANOUT))

    def at(self, time: float, node: Node, event: Event) -> None:
        """Schedule an event."""
        heapq.heappush(self._heap, (time, next(self._sequence), node, event))

    def play(self, seconds: float) -> None:
        """Play this many seconds. Events for nodes that have left are dropped."""
        until = self.now + seconds
        while self._heap and self._heap[0][0] <= until:
            self.now, _, node, event = heapq.heappop(self._heap)
            if node.here:
                node.take(event)
        self.now = until

    def link(self, number: int) -> Link:
        """Draw a node's link."""
        scenario, rng = self.scenario, self.rng
        host = f"11.{number % 200}.{number // 200 % 256}.{1 + number // 51_200}"
        address, places = f"/ip4/{host}/tcp/4001", PLACES
        if rng.random() < scenario.nat:
            relay = f"/ip4/11.250.0.1/tcp/4001/p2p/{Identity(bytes(32)).peer_id}/p2p-circuit"
            address, places = (relay if rng.random() < scenario.relayed else ""), RELAYED_PLACES
        return Link(
            scenario.latency * rng.lognormvariate(0.0, 0.5),
            scenario.upload * rng.lognormvariate(0.0, 0.5),
            host,
            address,
            places,
        )

    # Connections.

    def join(self, node: Node) -> None:
        """Add a node, and connect it to members that can be dialled."""
        self.nodes[node.id] = node
        for other in self.rng.sample(self._dialable, min(DIALLED, len(self._dialable))):
            self._connect(node, other)
        if node.link.places == PLACES:
            self._dialable.append(node)

    def leave(self, node: Node) -> None:
        """End a node and its connections. Members with too few connections dial another one."""
        node.here = False
        del self.nodes[node.id]
        if node in self._dialable:
            self._dialable.remove(node)
        for other in node.connected.values():
            del other.connected[node.id]
            other.look_around()
            if len(other.connected) < DIALLED and self._dialable:
                self._connect(other, self.rng.choice(self._dialable))

    def _connect(self, a: Node, b: Node) -> None:
        if a is not b:
            a.connected[b.id], b.connected[a.id] = b, a
            a.look_around()
            b.look_around()

    # Gossip.

    def gossip(self, author: Node, raw: bytes, *, honest: bool) -> None:
        """Send a frame to all other nodes."""
        parsed = parse(raw, SWARM_ID)
        assert not isinstance(parsed, Reason)
        envelope = check(parsed, raw)
        assert isinstance(envelope, Envelope)
        frame, count = Frame(raw, envelope), len(self.nodes) - 1
        self.tally.bytes["offers"] += round(COPIES * (len(raw) + AROUND)) * count
        self.tally.bytes["control"] += CONTROL * count
        if honest:
            self.sent.append(self.now)
            self.tally.offers += 1
        if self.ears is not None:
            self.at(self.now + self._delay(), self.ears, Arrived(frame, author.id))
        if self.silenced:
            return
        for node in self.nodes.values():
            if node is author or self._lost():
                continue
            direct = author.id in node.connected or not node.connected
            via = author.id if direct else self.rng.choice(list(node.connected))
            self.at(self.now + self._delay(), node, Arrived(frame, via))

    def _delay(self) -> float:
        return self._hops * 2 * self.scenario.latency * self.rng.uniform(0.5, 1.5)

    def _lost(self) -> bool:
        return self.scenario.loss > 0 and self.rng.random() < self.scenario.loss

    # Questions.

    def ask(self, asker: Node, ask: Ask) -> None:
        """Deliver a question to its peer, and dial the peer if it is not connected."""
        holder, ready = self.nodes.get(ask.peer), self.now
        if holder is None or ask.peer not in asker.connected:
            visit = None if holder is None else holder.visits.get(asker.id)
            if visit is None or visit.until <= self.now:
                visit = self._dial(asker, holder, ask)
            if visit is None:
                return
            ready = max(ready, visit.ready)
        assert holder is not None
        if not self._lost():
            self.at(ready + _trip(asker, holder), holder, Asked(asker, ask))

    def _dial(self, asker: Node, holder: Node | None, ask: Ask) -> Visit | None:
        """Connect to a peer. If that fails, answer the question with None."""
        fails = Answered(ask.number, None)
        if holder is None or not ask.at:
            self.at(self.now + (DIAL_TIMEOUT_S if ask.at else 0.0), asker, fails)
            return None
        round_trip = 2 * _trip(asker, holder)
        self.tally.dials += 1
        self.tally.bytes["connections"] += 2 * DIAL
        if len(holder.visits) >= holder.link.places:
            holder.visits = {peer: visit for peer, visit in holder.visits.items() if visit.until > self.now}
        if len(holder.visits) >= holder.link.places:
            self.tally.refused += 1
            self.at(self.now + round_trip, asker, fails)
            return None
        ready = self.now + DIAL_TRIPS * round_trip
        visit = holder.visits[asker.id] = Visit(ready, ready + IDLE_S)
        return visit

    def reply(self, holder: Node, asked: Asked, reply: bytes | None) -> None:
        """Send an answer through the holder's upload queue. reply: None if the holder hangs up."""
        asker, ask = asked
        if reply is not None and len(reply) > ask.limit:
            reply = None
        blob = reply is not None and len(reply) > len(MISSING)
        size = (AROUND_BLOB + len(reply or b"")) if blob else QUESTION
        link = holder.link
        link.free_at = max(link.free_at, self.now) + size / link.upload
        arrives = link.free_at + _trip(holder, asker)
        if (visit := holder.visits.get(asker.id)) is not None:
            holder.visits[asker.id] = Visit(visit.ready, arrives + IDLE_S)
        self.tally.bytes["fetches"] += size
        self.at(arrives, asker, Answered(ask.number, reply))


def _trip(a: Node, b: Node) -> float:
    """Return the one-way seconds between two nodes."""
    return a.link.latency + b.link.latency
