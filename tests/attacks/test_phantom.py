"""The phantom crowd: one peer with hundreds of free keys wants the swarm cut into so many shards that nobody hears anybody.

The fast test plays fifteen minutes in virtual time: real members, real signed frames, the memory engine. `python -m benchmarks.attack
phantom` plays it against real `swarmd join` processes, over libp2p or hivemind.
"""

import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import pytest

from p2p.engines.memory import MemorySwarm
from p2p.envelope import seal
from p2p.member import Member
from p2p.shards.sharding import LOOK_EVERY
from p2p.shards.shards import Shards
from p2p.types import Handlers, PeerId, PeerRequest, Verdict
from swarmd.lab.demo.processes import LocalNode, end, local_swarm
from swarmd.testing import TOPIC, Clock, identity, memory_member, wait_until
from tests.attacks.crowding import KIND, RATE, lie, phantoms
from tests.attacks.harness import ENGINES, Attack, show

OFFER = "offer"
SPEAKS = 60.0  # seconds between two offers of one honest node
MINUTES = 15.0
START = 600.0  # seconds a real swarm has to come up


class World:
    """Honest members and the one who plays the crowd, connected to each other."""

    def __init__(self, honest: int, keys: int) -> None:
        self.clock, self.swarm, self.numbers = Clock(), MemorySwarm(), itertools.count(1)
        self.members = [self._member(n) for n in range(honest)]
        self.by_name = {m.identity.peer_id: m for m in self.members}
        self.him = PeerId("")
        self.crowd = itertools.cycle(phantoms(keys))

    def _member(self, n: int) -> Member:
        shards = Shards(random.Random(n), self.clock())
        return memory_member(self.swarm, n, self.clock, sequence=itertools.count(), shards=shards, kinds=(OFFER,))

    def begin(self) -> None:
        """He comes."""
        self.him = identity(10**6).peer_id
        self.swarm.join(self.him, Handlers(lambda *_: Verdict.IGNORE, lie))

    def live(self, seconds: float, rate: float = 0.0) -> float:
        """What part of the honest offers the other honest members heard. rate: frames a second of the crowd."""
        heard = published = 0
        due = 0.0
        for step in range(int(seconds / LOOK_EVERY)):
            self.clock.now += LOOK_EVERY
            due += rate * LOOK_EVERY
            while due >= 1:
                due -= 1
                self.swarm.inject(seal(next(self.crowd), TOPIC.swarm_id, next(self.numbers), self.clock(), KIND, b""), self.him)
            for m in self.members:
                self._look(m)
            for n, m in enumerate(self.members):
                if (step + n) % int(SPEAKS / LOOK_EVERY) == 0:
                    m.publish(OFFER, random.Random(step).randbytes(8))
                    published += len(self.members) - 1
            heard += sum(envelope.kind == OFFER for m in self.members for envelope in m.received())
        return heard / published

    def _look(self, m: Member) -> None:
        """As `Sharding.run`: look, then ask."""
        shards = m.sharding._shards
        assert shards is not None
        m.sharding.look()
        for peer in shards.whom(self.clock()):
            other = self.by_name.get(peer)
            question = PeerRequest.SWARM_SIZE.message()
            answer = other.answer(m.identity.peer_id, question) if other is not None else lie(peer, question)
            shards.answered(peer, answer, self.clock())


@pytest.mark.parametrize(("honest", "keys", "age"), [(2, 300, 0.0), (2, 3000, 240.0), (10, 300, 0.0)])
def test_a_crowd_of_phantoms_silences_nobody(honest: int, keys: int, age: float) -> None:
    world = World(honest, keys)
    if age:
        assert world.live(age) == 1.0
    world.begin()
    assert world.live(60 * MINUTES, RATE / honest) >= 0.9
    assert {m.sharding.shards for m in world.members} == {1}


# Against real nodes.


def external(nodes: Sequence[LocalNode], since: float) -> list[float]:
    """Rollouts of others a round, of each node, in the rounds that ended after `since` (seconds since the epoch)."""
    found = []
    for node in nodes:
        lines = [line["external"] for line in node.lines() if line["time"] > since]
        if not lines:
            raise SystemExit(f"{node.name} finished no round; see {node.log}")
        found.append(fmean(lines))
    return found


def play(folder: Path, honest: int, keys: int, minutes: float, age: float, pace: float, engine: str) -> list[float]:
    """One swarm of real nodes, with the crowd where keys is not 0: what each node trained on of others', in each round."""
    options = ["--model", "tiny", "--pace", str(pace)]
    with local_swarm(folder, honest, options, {"SWARMD_SWARM_ENGINE": engine}) as nodes:
        for node in nodes:
            node.start()
        _until(lambda: all(node.status() for node in nodes), nodes)
        if age:
            _until(lambda: all(node.lines() for node in nodes), nodes)
            time.sleep(60 * age)
        crowd = None
        try:
            if keys:
                crowd = _crowd(nodes, keys, folder)
            else:
                _until(lambda: all(node.lines() for node in nodes), nodes)
            since = time.time()
            if crowd is not None and not age:
                _until(lambda: all(node.lines() for node in nodes), nodes)
                since = time.time()
            time.sleep(60 * minutes)
            found = external(nodes, since)
            late = external(nodes, since + 30 * minutes)
            for when, each in (("all the while", found), ("in the second half", late)):
                show(f"phantom, {keys} keys, {when}, external rollouts a round", {f"node {n}": one for n, one in enumerate(each)})
        finally:
            if crowd is not None:
                end(crowd)
    return found


def _crowd(nodes: Sequence[LocalNode], keys: int, folder: Path) -> "subprocess.Popen[bytes]":
    status = nodes[0].status()
    assert status is not None
    command = [sys.executable, "-m", "tests.attacks.crowding", "--folder", str(folder), "--keys", str(keys)]
    command += ["--swarm", status["swarm"]["name"], "--digest", status["swarm"]["digest"]]
    for node in nodes:
        listen = node.command[list(node.command).index("--listen") + 1]
        command += ["--bootstrap", f"{listen}/p2p/{node.peer_id}"]
    with (folder / "crowd").open("wb") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)


def _until(done: Callable[[], bool], nodes: Sequence[LocalNode]) -> None:
    def looked() -> bool:
        for node in nodes:
            node.check()
        return done()

    wait_until(looked, START)


def attack(
    folder: Path, engine: str = "libp2p", honest: int = 2, keys: int = 300, minutes: float = MINUTES, age: float = 0.0, pace: float = 1.0,
    apart: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Real nodes, with the crowd and beside them without: side by side the load is the same."""
    with ThreadPoolExecutor(1 if apart else 2) as both:
        clean, crowded = both.map(lambda many: play(folder / str(many), honest, many, minutes, age, pace, engine), (0, keys))
    return {"clean": fmean(clean), "crowded": fmean(crowded), "least": min(crowded), "lost": max(0.0, 1 - fmean(crowded) / fmean(clean))}


ATTACK = Attack(
    attack,
    {"lost": 0.1},
    choices={"engine": ENGINES},
    about={
        "honest": "nodes", "minutes": "with the crowd, and beside it without", "age": "minutes that the nodes have trained when it comes",
        "pace": "seconds that a round takes at least", "apart": "one swarm after the other, where the machine cannot bear both",
    },
)  # fmt: skip
