"""A swarm on one topic in virtual time: each node's offers, fetches and received bytes.

Each node has the daemon's own `Outgoing` and `Pacing`; frames are signed and offers encoded by the real code.
GossipSub is not simulated: all nodes hear an offer DELAY seconds later, at the bytes that an earlier
simulation of GossipSub measured (docs/p2p.md). In a swarm of more than OWN_EARS nodes all share one `Heard`,
since all hear the same offers.
"""

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from p2p.envelope import seal
from p2p.identity import Identity
from p2p.peers.outbound import IDLE_S
from p2p.types import PeerId
from swarmd.exchange import offers
from swarmd.exchange.pacing import LONG_S, Heard, Outgoing, Pacing

STEP = 0.25  # seconds of virtual time
DELAY = 0.5  # seconds until all nodes have heard an offer and may have fetched its rollouts
OWN_EARS = 300
MAX_AGE = 2  # `round.max_age`, as it comes
LOCAL_ROLLOUTS = 4  # of a round, all with an advantage
WANTED = 4  # J
CONNECTED = 20  # members that a node is connected to
# Inbound connections that are left for nodes that fetch (`p2p.engines.libp2p.network`: 112 in all)
PLACES = 100
STRANGERS = 12  # recently heard authors that are dialled for a blob
TRIES = 12  # rollouts that a node chooses for one place of a round, one after the other

# Bytes received, IP headers included, as measured by an earlier simulation of the whole protocol
# (docs/p2p.md).
COPIES = 5.4  # of a frame
AROUND = 257  # of a copy: GossipSub, yamux and Noise, IP and TCP
CONTROL = 1320  # of an offer: IHAVE, IWANT, GRAFT and PRUNE
FETCH = 2500  # a rollout of 4 KiB, compressed, with the question and the overhead of both
ADDRESS = 40  # of an author behind a relay, which most are
QUESTION = 300  # to a node without the blob, or its answer
DIAL = 1500  # of a connection made, on either side


class Item(NamedTuple):
    """A rollout on offer."""

    id: bytes
    author: int
    heard_at: float


@dataclass(slots=True, eq=False)
class Node:
    number: int
    name: PeerId
    outgoing: Outgoing
    pacing: Pacing
    heard: Heard
    seconds: float  # of a round
    round_ends: float
    since: deque[float]  # when its last rounds began
    rounds: int = 0
    took: set[bytes] = field(default_factory=set)
    # Who made a connection to it to fetch, and until when it stays
    callers: dict[int, float] = field(default_factory=dict)


@dataclass
class Tally:
    """Figures counted from some moment on."""

    offers: int = 0
    rounds: int = 0
    full: int = 0  # with all J
    bytes: Counter[str] = field(default_factory=Counter)  # received by all nodes together, by purpose
    served: Counter[int] = field(default_factory=Counter)  # rollouts, by node
    refused: int = 0  # fetches that found no place at the author


class Swarm:
    """The simulated swarm. The same seed gives the same run.

    nodes: number of nodes at the start. seconds: shortest and longest round. known: the share of authors
    whose address a node has. address: bytes of the author's address in each offer.
    """

    def __init__(
        self,
        nodes: int,
        seconds: tuple[float, float],
        seed: int = 0,
        max_age: int = MAX_AGE,
        within: float = 60.0,
        known: float = 1.0,
        address: int = ADDRESS,
    ) -> None:
        self._known, self._address = known, address
        self._rng, self._max_age = random.Random(seed), max_age
        self._seconds, self._shared = seconds, Heard() if nodes > OWN_EARS else None
        # Seconds between two checks of a node whether it may send
        self._look = 1.0 if nodes <= OWN_EARS else 5.0
        self._identity = Identity(bytes(32))
        self._empty = len(seal(self._identity, bytes(16), 2**40, 1.7e9, offers.KIND, b""))
        self.now, self._step = 0.0, 0
        self.nodes: list[Node] = []
        self._turns: list[list[Node]] = [[] for _ in range(int(self._look / STEP))]
        self._flying: deque[tuple[float, int, bytes]] = deque()
        self._board: deque[Item] = deque()  # rollouts that may still be fetched, the oldest first
        self._holders: Counter[bytes] = Counter()
        self.sent: list[float] = []  # when each offer was sent
        self.tally = Tally()
        self.join(nodes, within)

    def join(self, count: int, within: float = 60.0) -> None:
        """Add nodes, spread over so many seconds."""
        low, high = self._seconds
        for number in range(len(self.nodes), len(self.nodes) + count):
            rng = random.Random(f"{number} {self._rng.random()}")
            heard = self._shared or Heard()
            pacing = Pacing(heard, rng)
            seconds = low * (high / low) ** rng.random()
            ends = self.now + rng.uniform(0, within) + seconds * rng.uniform(0.9, 1.1)
            node = Node(
                number,
                PeerId(str(number)),
                Outgoing(pacing, self._max_age),
                pacing,
                heard,
                seconds,
                ends,
                deque([self.now], maxlen=self._max_age),
            )
            self.nodes.append(node)
            self._turns[rng.randrange(len(self._turns))].append(node)

    def leave(self, count: int) -> None:
        """Remove the first so many nodes."""
        gone = set(self.nodes[:count])
        self.nodes = [node for node in self.nodes if node not in gone]
        self._turns = [[node for node in turn if node not in gone] for turn in self._turns]

    def play(self, seconds: float, *, fetch: bool = False) -> Tally:
        """Advance the simulation; return the figures of these seconds.

        fetch: whether rollouts are fetched, too.
        """
        self.tally = tally = Tally()
        ends = self.now + seconds
        while self.now < ends:
            self._step += 1
            self.now = self._step * STEP
            while self._flying and self._flying[0][0] <= self.now:
                self._arrive(*self._flying.popleft()[1:])
            for node in self._turns[self._step % len(self._turns)]:
                while node.round_ends <= self.now:
                    self._end_round(node, fetch)
                while (message := node.outgoing.pop(self.now)) is not None:
                    self._send(node, message[1])
        return tally

    def _end_round(self, node: Node, fetch: bool) -> None:
        node.rounds += 1
        ids = [
            node.number.to_bytes(4) + node.rounds.to_bytes(4) + bytes([n]) * 4 for n in range(LOCAL_ROLLOUTS)
        ]
        node.outgoing.put(offers.KIND, _offer(node.rounds, ids))
        node.outgoing.next_round()
        if fetch:
            self._gather(node)
        node.since.append(node.round_ends)
        node.round_ends += node.seconds * self._rng.uniform(0.9, 1.1)

    def _send(self, node: Node, body: bytes) -> None:
        self.sent.append(self.now)
        self.tally.offers += 1
        size = self._empty + len(body) + self._address
        self.tally.bytes["offers"] += round(COPIES * (size + AROUND)) * len(self.nodes)
        self.tally.bytes["control"] += CONTROL * len(self.nodes)
        self._flying.append((self.now + DELAY, node.number, body))

    def _arrive(self, author: int, body: bytes) -> None:
        name = PeerId(str(author))
        if self._shared is not None:
            self._shared.offer(name, "", self.now)
        else:
            for node in self.nodes:
                if node.number != author:
                    node.heard.offer(name, "", self.now)
        ids = msgspec.msgpack.decode(body)[5]
        self._board.extend(Item(ids[at : at + 12], author, self.now) for at in range(0, len(ids), 12))
        while self._board and self._board[0].heard_at < self.now - LONG_S:
            self._holders.pop(self._board.popleft().id, None)

    # Fetching.

    def _gather(self, node: Node) -> None:
        """Simulate the node's fetches of the finished round, from the offers of its last rounds."""
        board, held = self._board, 0
        first = _first_since(board, node.since[0])
        for _ in range(WANTED):
            for _ in range(TRIES):
                if first == len(board):
                    break
                item = board[self._rng.randrange(first, len(board))]
                if item.author != node.number and item.id not in node.took and self._fetch(node, item):
                    held += 1
                    break
        if node.rounds % 8 == 0:
            node.took.clear()
        self.tally.rounds += 1
        self.tally.full += held == WANTED

    def _fetch(self, node: Node, item: Item) -> bool:
        """Ask the author, then connected members, then strangers."""
        node.took.add(item.id)
        count, there = self.tally.bytes, len(self.nodes)
        author = (
            self.nodes[item.author]
            if item.author < there and self.nodes[item.author].number == item.author
            else None
        )
        holding = self._holders[item.id] / there
        chances = [
            *[(QUESTION, holding)] * (CONNECTED - 1),
            *[(QUESTION + 2 * DIAL, holding)] * min(STRANGERS, there - CONNECTED),
        ]
        if author is not None and self._knows(node, author) and self._reach(node, author):
            self.tally.served[item.author] += 1
            self._tried(node, item, served=True)
        else:
            self.tally.refused += 1
            for cost, chance in chances:
                count["fetches"] += cost
                if self._rng.random() < chance:
                    break
            else:
                self._tried(node, item, served=False)
                return False
        count["fetches"] += FETCH
        self._holders[item.id] += 1
        return True

    def _tried(self, node: Node, item: Item, *, served: bool) -> None:
        """Note a fetch, as the gatherer does; ears that all share have one node's fetches."""
        if self._shared is None or node is self.nodes[0]:
            node.heard.tried(PeerId(str(item.author)), served=served)

    def _knows(self, node: Node, author: Node) -> bool:
        """Return whether the node has the author's address, the same for the pair each time."""
        return random.Random(node.number << 32 | author.number).random() < self._known

    def _reach(self, node: Node, author: Node) -> bool:
        """Return whether the author has a place for a connection; most often a new one."""
        callers = author.callers
        if node.number not in callers:
            if self._rng.random() >= CONNECTED / len(self.nodes):
                if len(callers) >= PLACES:
                    for number in [number for number, until in callers.items() if until <= self.now]:
                        del callers[number]
                    if len(callers) >= PLACES:
                        return False
                self.tally.bytes["connections"] += 2 * DIAL
                callers[node.number] = self.now + IDLE_S
        else:
            callers[node.number] = self.now + IDLE_S
        return True


def _offer(number: int, ids: Sequence[bytes]) -> bytes:
    """Return the body of an offer, as `offers.encode` makes it."""
    return msgspec.msgpack.encode(
        [1, number, [3] * len(ids), [2**29] * len(ids), [1600] * len(ids), b"".join(ids)]
    )


def _first_since(board: deque[Item], since: float) -> int:
    """Return the index of the first item that was heard then or later."""
    low, high = 0, len(board)
    while low < high:
        middle = (low + high) // 2
        if board[middle].heard_at < since:
            low = middle + 1
        else:
            high = middle
    return low
