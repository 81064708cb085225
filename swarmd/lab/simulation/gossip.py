"""Connections and GossipSub 1.1 between simulated nodes, after py-libp2p 0.8.1 with the settings of `p2p/engines/libp2p/stack.py`.

Eager push to the mesh, IHAVE to others in the topic at each heartbeat, IWANT for what was missed, GRAFT and PRUNE between 4 and 12,
no flood-publish. Heartbeats at which nothing would happen are left out. Whom a node dials follows `p2p/peers/outbound.py`
(ten members of the swarm) and `p2p/peers/shard_peers.py` (four in each shard).
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from p2p.peers.outbound import DIALS as OUTBOUND_DIALS
from p2p.peers.outbound import GROUPS
from p2p.peers.shard_peers import DIALS, EXTRA, LOOK_FIRST, LOOK_LAST, NEIGHBOURS
from swarmd.lab.simulation.events import Events
from swarmd.lab.simulation.internet import Internet
from swarmd.lab.simulation.ledger import Ledger

DEGREE, DEGREE_LOW, DEGREE_HIGH = 6, 4, 12
LAZY = 6  # peers outside the mesh that hear of a message at a heartbeat
HEARTBEAT = 1.0  # seconds
WINDOW = 3  # heartbeats at which a message is spoken of

PACKET = 52  # bytes: IP and TCP headers
STREAM = 30  # yamux and Noise around one message
# GossipSub's overhead for a frame: from, seqno, topic, the library's signature, lengths.
ENVELOPING = 40 + 10 + 53 + 66 + 6
ID = 48  # of a message: from, seqno and their lengths
CONTROL = PACKET + STREAM + 57  # one IHAVE, IWANT, GRAFT or PRUNE of one topic, without ids
DIAL = 1500  # each side receives: TCP's and Noise's handshake, multistream, identify, GossipSub's subscriptions
REDIAL = 5.0  # seconds until who lost a connection that it made has another

Delivered = Callable[[int, "Message", int], bool]


@dataclass(slots=True, eq=False)
class Message:
    frame: bytes
    shard: int
    author: int
    kind: str  # of the ledger
    sent: float
    expected: int = 0  # members of the shard when it was sent, the author left out
    seen: set[int] = field(default_factory=set)

    @property
    def size(self) -> int:
        return len(self.frame) + ENVELOPING + STREAM + PACKET


class Gossip:
    """delivered(node, message, via): whether the message is to be passed on. Nodes are numbers; who is `up` takes part."""

    def __init__(self, events: Events, internet: Internet, ledger: Ledger, rng: random.Random, delivered: Delivered) -> None:
        self._events, self._internet, self._ledger, self._rng, self._delivered = events, internet, ledger, rng, delivered
        self.mesh: dict[int, dict[int, set[int]]] = {0: {}}  # shard -> member -> its mesh
        self.links: list[dict[int, str]] = []  # node -> connected node -> who made it: "out", "in", "shard"
        self._phase: list[float] = []
        self.inside: list[set[int]] = []  # node -> its shards
        self._repairs: dict[tuple[int, int], int] = {}  # (node, shard) -> the only repair that counts
        self._asked = 0
        self._spoken: dict[tuple[int, int], int] = {}  # (node, shard) -> the heartbeat of the last IHAVE
        self._up: list[int] = []
        self._place: dict[int, int] = {}  # node -> where it is in _up

    def add(self) -> None:
        self.links.append({})
        self.inside.append(set())
        self._phase.append(self._rng.random() * HEARTBEAT)

    @property
    def present(self) -> int:
        """How many nodes are up."""
        return len(self._up)

    def up(self, node: int) -> bool:
        return node in self._place

    # Members and connections.

    def start(self, node: int) -> None:
        self._place[node] = len(self._up)
        self._up.append(node)
        self.mesh[0][node] = set()
        self.inside[node].add(0)
        self._dial_out(node)

    def stop(self, node: int) -> None:
        """It is gone, without a word."""
        for shard in sorted(self.inside[node]):
            self.leave(node, shard)
        last = self._up.pop()
        place = self._place.pop(node)
        if last != node:
            self._up[place], self._place[last] = last, place
        links, self.links[node] = self.links[node], {}
        for other in links:
            if self.links[other].pop(node) == "out":
                self._events.after(REDIAL, self._dial_out, other)

    def join(self, node: int, shard: int) -> None:
        self.mesh.setdefault(shard, {})[node] = set()
        self.inside[node].add(shard)
        for other in self.links[node]:
            self._heard(other, "control", CONTROL)
        self._repair_soon(node, shard)

    def leave(self, node: int, shard: int) -> None:
        mesh = self.mesh[shard].pop(node)
        self._spoken.pop((node, shard), None)
        self.inside[node].discard(shard)
        for other in sorted(mesh):
            self.mesh[shard][other].discard(node)
            self._heard(other, "control", CONTROL)
            self._repair_soon(other, shard)
        if shard and not self.mesh[shard]:
            del self.mesh[shard]

    def connect(self, node: int, other: int, why: str = "out") -> float:
        """Seconds until they are connected; none where they are."""
        if other in self.links[node] or other == node:
            return 0.0
        self.links[node][other], self.links[other][node] = why, "in"
        self._heard(node, "connections", DIAL)
        self._heard(other, "connections", DIAL)
        return 6 * self._internet.way(node, other)  # three round trips: TCP, Noise, yamux with identify

    def disconnect(self, node: int, other: int) -> None:
        if self.links[node].pop(other, None) is not None:
            self.links[other].pop(node)
            for shard in sorted(self.inside[node] & self.inside[other]):
                members = self.mesh[shard]
                if other in members[node]:
                    members[node].discard(other)
                    members[other].discard(node)
                    self._repair_soon(node, shard)
                    self._repair_soon(other, shard)

    def tidy(self, node: int) -> None:
        """Hang up on those that were dialled for a shard that either has left."""
        for other in [other for other, why in self.links[node].items() if why == "shard"]:
            if not (self.inside[node] & self.inside[other]) - {0}:
                self.disconnect(node, other)

    def _dial_out(self, node: int) -> None:
        if not self.up(node):
            return
        links, slowest, begun = self.links[node], 0.0, 0
        made = sum(why == "out" for why in links.values())
        for _ in range(3 * GROUPS):
            if begun == OUTBOUND_DIALS or made + begun >= GROUPS or len(links) >= len(self._up) - 1:
                break
            other = self._up[int(self._rng.random() * len(self._up))]
            if other != node and other not in links:
                slowest = max(slowest, self.connect(node, other))
                begun += 1
        if begun:
            self._repair_soon(node, 0)
            self._events.after(slowest, self._dial_out, node)

    # Heartbeats.

    def _beat(self, node: int) -> float:
        """When this node's next heartbeat is."""
        now, phase = self._events.now, self._phase[node]
        return phase + HEARTBEAT * (int((now - phase) / HEARTBEAT) + 1)

    def _repair_soon(self, node: int, shard: int) -> None:
        self._repair_at(self._beat(node), node, shard, LOOK_FIRST)

    def _repair_at(self, when: float, node: int, shard: int, wait: float) -> None:
        self._asked += 1
        self._repairs[node, shard] = self._asked
        self._events.at(when, self._repair, node, shard, wait, self._asked)

    def _repair(self, node: int, shard: int, wait: float, asked: int) -> None:
        if self._repairs.get((node, shard)) != asked:
            return  # another was asked for since
        del self._repairs[node, shard]
        members = self.mesh.get(shard, {})
        mesh = members.get(node)
        if mesh is None:
            return
        if len(mesh) > DEGREE_HIGH:
            for other in self._rng.sample(sorted(mesh), len(mesh) - DEGREE):
                self._part(node, other, shard)
        if len(mesh) < DEGREE_LOW:
            there = [other for other in self.links[node] if other in members and other not in mesh]
            for other in self._rng.sample(there, min(len(there), DEGREE - len(mesh))):
                self._graft(node, other, shard)
        if len(mesh) < DEGREE_LOW:
            self._look(node, shard, members, wait)

    def _look(self, node: int, shard: int, members: dict[int, set[int]], wait: float) -> None:
        """Too few neighbours: dial some that the DHT knows to be here, and look again later."""
        made = sum(why == "shard" for why in self.links[node].values())
        strangers = [other for other in members if other != node and other not in self.links[node]] if shard else []
        here = len(members) - 1 - len(strangers) if shard else NEIGHBOURS
        count = min(NEIGHBOURS - here, 2 * EXTRA - made, DIALS, len(strangers))
        for other in self._rng.sample(strangers, max(0, count)):
            # A DHT lookup takes a few round trips and about six answers of a kilobyte.
            self._heard(node, "connections", 6 * 1000 / max(1, count))
            self._events.after(4 * self._internet.way(node, other) + 0.3, self._reach, node, other, shard)
        self._repair_at(self._events.now + wait, node, shard, min(2 * wait, LOOK_LAST))

    def _reach(self, node: int, other: int, shard: int) -> None:
        members = self.mesh.get(shard, {})
        if node in members and other in members:
            self._events.after(self.connect(node, other, "shard"), self._repair_soon, node, shard)

    def _graft(self, node: int, other: int, shard: int) -> None:
        members = self.mesh[shard]
        self._heard(other, "control", CONTROL)
        members[node].add(other)
        members[other].add(node)
        if len(members[other]) > DEGREE_HIGH:
            self._repair_soon(other, shard)  # py-libp2p takes everybody in, and prunes at its heartbeat

    def _part(self, node: int, other: int, shard: int) -> None:
        self._heard(other, "control", CONTROL)
        self.mesh[shard][node].discard(other)
        self.mesh[shard][other].discard(node)
        self._repair_soon(other, shard)

    # Messages.

    def publish(self, message: Message) -> None:
        """In a shard that the author is in."""
        node = message.author
        members = self.mesh[message.shard]
        message.expected = len(members) - (node in members)
        message.seen.add(node)
        self._push(node, message, members.get(node, ()), -1)
        self._speak_of(node, message)

    def _push(self, node: int, message: Message, to: Iterable[int], but: int) -> None:
        size, now = message.size, self._events.now
        author, arrival, at = message.author, self._internet.arrival, self._events.at
        for other in sorted(to):
            if other != but and other != author:
                when = arrival(node, other, size, now)
                if when is not None:
                    at(when, self._arrive, other, node, message, size)

    def _arrive(self, node: int, via: int, message: Message, size: int) -> None:
        members = self.mesh.get(message.shard)
        if members is None or node not in members:
            return
        ledger = self._ledger
        ledger.bytes[message.kind][node] += size
        ledger.work["messages"][node] += 1
        ledger.copies += 1
        if node in message.seen:
            return
        message.seen.add(node)
        ledger.firsts += 1
        if self._delivered(node, message, via):
            self._push(node, message, members[node], via)
            self._speak_of(node, message)

    def _speak_of(self, node: int, message: Message) -> None:
        members = self.mesh[message.shard]
        mesh = members.get(node, ())
        if len(self.links[node]) > len(mesh):
            self._events.at(self._beat(node), self._tell, node, message)

    def _tell(self, node: int, message: Message) -> None:
        """IHAVE, at this heartbeat; what it costs at the following ones of the window is counted now."""
        members = self.mesh.get(message.shard, {})
        mesh = members.get(node)
        if mesh is None:
            return
        beat = round((self._events.now - self._phase[node]) / HEARTBEAT)
        beats = min(WINDOW, beat - self._spoken.get((node, message.shard), -WINDOW))  # the others have an IHAVE already that names one more
        self._spoken[node, message.shard] = beat
        lazy = [other for other in self.links[node] if other in members and other not in mesh]
        for other in self._rng.sample(lazy, min(LAZY, len(lazy))):
            self._heard(other, "control", beats * CONTROL + WINDOW * ID, beats)
            if other not in message.seen:
                self._events.after(self._internet.way(node, other), self._want, other, node, message)

    def _want(self, node: int, holder: int, message: Message) -> None:
        if node in message.seen or not self.up(holder):
            return
        self._heard(holder, "control", CONTROL + ID)
        when = self._internet.arrival(holder, node, message.size, self._events.now + self._internet.way(node, holder))
        if when is not None:
            self._events.at(when, self._arrive, node, holder, message, message.size)

    def _heard(self, node: int, kind: str, size: float, messages: int = 1) -> None:
        self._ledger.bytes[kind][node] += size
        self._ledger.work["messages"][node] += messages
