"""Copier: a thief copies each offer that it hears under other keys, so that nobody fetches from the author.

`pytest -s` prints the figures.

The thief is connected to all honest nodes, which share and gather as the daemon does
(`tests.attacks.gathering_node`). Over the memory engine, a mock clock gives the time, a frame takes HOP from
node to node, and a question takes LATENCY. Over libp2p, the nodes are processes that hear each other's offers
LATE later than the thief's, as if they were far away and the thief near.
"""

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import trio
import trio.testing

from p2p.blobs.blobs import BlobStore
from p2p.engines.memory import MemoryEngine, MemorySwarm
from p2p.envelope import Frame, parse
from p2p.identity import Identity
from p2p.types import Handlers, Peer, PeerId, Verdict
from testbed.probe_process import ProbeProcess
from tests.attacks.copying import HOW, Thief
from tests.attacks.gathering_node import WANTED, Node
from tests.attacks.harness import Attack, show
from tests.attacks.nodes import key_of
from tests.attacks.test_unserved import LATENCY, ROUND, SETTLE, START, TOPIC
from tests.doubles import TIMEOUT_S

SEED = 2
HOP = 0.05  # seconds
LATE = 0.15  # seconds
THIEF = key_of(SEED, 0).peer_id


@dataclass
class Network:
    """Honest nodes with `degree` neighbours each. If it is 0, the thief's frames arrive first everywhere."""

    degree: int
    rng: random.Random
    swarm: MemorySwarm = field(default_factory=MemorySwarm)
    engines: dict[PeerId, "Far"] = field(default_factory=dict)
    neighbours: dict[PeerId, set[PeerId]] = field(default_factory=dict)
    thief: Thief | None = None
    stolen: BlobStore = field(default_factory=BlobStore)
    nursery: trio.Nursery | None = None

    def connect(self) -> None:
        """Make each node a neighbour of the previous node and of random other nodes."""
        names = list(self.engines)
        self.neighbours = {name: set() for name in names}
        for n, name in enumerate(names):
            others = self.rng.sample(names, min(len(names), max(0, self.degree // 2)))
            for other in {names[n - 1], *others} - {name}:
                self.neighbours[name].add(other)
                self.neighbours[other].add(name)

    def publish(self, author: PeerId, frame: bytes) -> None:
        parsed = parse(frame, TOPIC.swarm_id)
        assert self.nursery is not None and isinstance(parsed, Frame)
        for receiver, hops, via in self._paths(author):
            self.nursery.start_soon(self._arrive, receiver, HOP * hops, frame, via)
        if self.thief is not None:
            for copy in self.thief.copies(parsed.body, START + trio.current_time()):
                for receiver in self.engines:
                    self.nursery.start_soon(self._arrive, receiver, 2 * HOP, copy, THIEF)

    def _paths(self, author: PeerId) -> Iterator[tuple[PeerId, int, PeerId]]:
        """Yield each other node, its hops from the author, and the node that forwards frames to it."""
        seen, waiting = {author}, deque([(author, 0)])
        while waiting:
            name, hops = waiting.popleft()
            for other in sorted(self.neighbours[name] - seen):
                seen.add(other)
                waiting.append((other, hops + 1))
                yield other, hops + 1 if self.degree else 3, name

    async def _arrive(self, receiver: PeerId, after: float, frame: bytes, via: PeerId) -> None:
        await trio.sleep(after)
        self.engines[receiver].hear(frame, via)


class Far(MemoryEngine):
    """A node that is connected to its neighbours and the thief, and can request from every node."""

    def __init__(self, network: Network, me: PeerId, handlers: Handlers) -> None:
        super().__init__(network.swarm, me, handlers)
        self._network = network
        network.engines[me] = self

    def publish(self, frame: bytes) -> None:
        self._network.publish(self.me, frame)

    def peers(self) -> Sequence[Peer]:
        near = self._network.neighbours[self.me] | ({THIEF} if self._network.thief else set())
        return [peer for peer in super().peers() if peer.id in near]

    async def request(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        await trio.sleep(LATENCY)
        return await super().request(peer, question, limit)


def in_memory(
    nodes: int, degree: int, how: str, keys: int, serves: bool, seconds: float, seed: int = 1
) -> dict[str, float]:
    """Play over the memory engine; return the external rollouts before and during the attack."""
    rng = random.Random(seed)
    network = Network(degree, rng)
    got: list[tuple[float, int]] = []
    honest: list[Node] = []
    wasted: list[int] = []
    blamed: list[float] = []  # negative scores that honest nodes gave each other

    def clock() -> float:
        return START + trio.current_time()

    def ended(node: Node) -> None:
        got.append((trio.current_time(), node.got))

    async def play() -> None:
        for _ in range(nodes):
            who = Identity(rng.randbytes(32))
            honest.append(
                Node(who, TOPIC, partial(Far, network, who.peer_id), clock, random.Random(rng.random()))
            )
        network.connect()
        async with trio.open_nursery() as nursery:
            network.nursery = nursery
            for node in honest:
                nursery.start_soon(node.run, ROUND, ended)
            await trio.sleep(SETTLE)
            network.swarm.join(THIEF, Handlers(lambda *_: Verdict.IGNORE, network.stolen.answer))
            network.thief = Thief(keys, how, TOPIC.swarm_id, SEED)
            before = [node.market.missed for node in honest]
            for _ in range(int(seconds)):
                await trio.sleep(1)
                for node in honest if serves else ():
                    for blob in node.member.blobs.held.values():
                        network.stolen.put(blob)
            wasted.extend(n.market.missed - was for n, was in zip(honest, before, strict=True))
            blamed.extend(-node.member.score(other.id) for node in honest for other in honest)
            nursery.cancel_scope.cancel()

    trio.run(play, clock=trio.testing.MockClock(autojump_threshold=0))
    found = _result(got, SETTLE, SETTLE) | {
        "wasted": sum(wasted) / sum(at > SETTLE for at, _ in got),
        "blamed": max(blamed),
    }
    show(f"copier, memory, {nodes} nodes, degree {degree}, {_kind(how, keys, serves)}", found)
    return found


def _kind(how: str, keys: int, serves: bool) -> str:
    return f"{how}, {keys or 'new'} keys{', serves' if serves else ''}"


def _result(got: Sequence[tuple[float, int]], begun: float, since: float) -> dict[str, float]:
    # Rollouts beyond the places of a round do not count.
    before = fmean(min(count, WANTED) for at, count in got if begun - 2 * ROUND < at <= begun)
    under = fmean(min(count, WANTED) for at, count in got if at > since + ROUND)
    return {"before": before, "under": under, "lost": max(0.0, 1 - under / before)}


def in_processes(
    folder: Path, nodes: int, how: str, keys: int, serves: bool, seconds: float
) -> dict[str, float]:
    """Play the same attack with real nodes on loopback."""
    with ExitStack() as stack:
        more = ["--every", str(ROUND), "--near", THIEF, "--late", str(LATE)]
        start = partial(ProbeProcess, module="tests.attacks.gathering_node", more=more)
        honest = [stack.enter_context(start(folder / "0"))]
        first = honest[0].addresses[:1]
        honest += [stack.enter_context(start(folder / str(n), bootstrap=first)) for n in range(1, nodes)]
        for node in honest:
            node.wait_for_peers(nodes - 1, TIMEOUT_S)
        options = ["--how", how, "--keys", str(keys), *(["--serves"] if serves else [])]
        addresses = [node.addresses[0] for node in honest]
        thief = ProbeProcess(
            folder / "thief", module="tests.attacks.copying", bootstrap=addresses, more=options
        )
        stack.enter_context(thief)
        for node in honest:
            node.wait(lambda node=node: THIEF in node.peers(), TIMEOUT_S)  # type: ignore[misc]
        time.sleep(SETTLE)
        thief.order(begin=True)
        begun = time.time()
        time.sleep(seconds)
    said = [line for node in honest for line in node.said("round")]
    found = _result([(line["at"], line["got"]) for line in said], begun, begun)
    under = [[line["missed"] for line in node.said("round") if line["at"] > begun] for node in honest]
    found["wasted"] = fmean((missed[-1] - missed[0]) / (len(missed) - 1) for missed in under)
    found["copied"] = (thief.last("copied") or {"copied": 0})["copied"]
    show(f"copier, libp2p, {nodes} nodes, {_kind(how, keys, serves)}", found)
    return found


CASES = [
    (0, "all", 0, False),
    (4, "all", 0, False),
    (8, "all", 0, False),
    (0, "all", 1, False),
    (0, "all", 10, False),
    (0, "all", 0, True),
    (0, "some", 0, False),
    (0, "mixed", 0, False),
    (0, "mixed", 0, True),
    (0, "changed", 0, True),
]


@pytest.mark.parametrize("degree, how, keys, serves", CASES)
def test_nodes_get_the_authors_blobs_although_a_thief_copies_offers(
    degree: int, how: str, keys: int, serves: bool
) -> None:
    found = in_memory(8, degree, how, keys, serves, seconds=30.0)
    assert found["before"] == WANTED and found["lost"] <= 0.05
    assert found["blamed"] == 0


def attack(
    folder: Path,
    engine: str = "memory",
    nodes: int = 8,
    degree: int = 0,
    how: str = "all",
    keys: int = 0,
    serves: bool = False,
    seconds: float = 60.0,
    seed: int = 1,
) -> dict[str, float]:
    if engine == "memory":
        return in_memory(nodes, degree, how, keys, serves, seconds, seed)
    return in_processes(folder, nodes, how, keys, serves, seconds)


ATTACK = Attack(
    attack,
    {"lost": 0.05},
    choices={"engine": ["memory", "libp2p"], "how": HOW},
    about={
        "degree": "neighbours of a node, over the memory engine; 0: the thief's frames arrive first",
        "how": "copy all ids; half of them; half, the others invented; all, with another number and size",
        "keys": "number of keys that copy each offer; 0: one new key for each offer",
        "serves": "the thief serves the blobs whose offers it copies",
        "seed": "seed of a run over the memory engine",
    },
)
