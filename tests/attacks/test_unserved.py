"""Unserved offers: ten keys offer 44 rollouts each, again and again, and hold none of them.

`pytest -s` prints the figures.

Honest nodes (`tests.attacks.gathering_node`) share and gather as the daemon does; a rollout that is fetched
counts as useful. Over the memory engine, a mock clock gives the time, and a question takes LATENCY. Over
libp2p and hivemind, nodes and attacker are processes.
"""

import itertools
import math
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import trio
import trio.testing

from p2p.engines.memory import MemoryEngine, MemorySwarm
from p2p.envelope import seal
from p2p.identity import Identity
from p2p.topic import Topic
from p2p.types import Handlers, PeerId, Verdict
from swarmd.exchange import offers
from testbed.probe_process import ProbeProcess
from tests.attacks.gathering_node import WANTED, Node
from tests.attacks.harness import Attack, show
from tests.attacks.nodes import key_of
from tests.attacks.offering import KEYS, RATE, body, keys
from tests.doubles import TIMEOUT_S

TOPIC = Topic("probe", "0")
START = 1_700_000_000.0  # seconds since the epoch
ROUND = 5.0  # seconds
LATENCY = 0.05  # seconds
SETTLE = 4 * ROUND  # seconds before the attack
SEED = 2


class Line(MemoryEngine):
    """An engine on which a question takes LATENCY, and silent peers never answer."""

    def __init__(self, swarm: MemorySwarm, silent: set[PeerId], me: PeerId, handlers: Handlers) -> None:
        super().__init__(swarm, me, handlers)
        self._silent = silent

    async def request(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        await trio.sleep(LATENCY)
        if peer in self._silent:
            await trio.sleep_forever()
        return await super().request(peer, question, limit)


def in_memory(how: str, honest: int, seconds: float, seed: int = 1) -> dict[str, float]:
    """Play over the memory engine; return the external rollouts before and during the attack."""
    swarm, rng, silent = MemorySwarm(), random.Random(seed), set[PeerId]()
    suspects = [key_of(SEED, n).peer_id for n in range(1, KEYS + 1)]
    got: list[tuple[float, int]] = []
    nodes: list[Node] = []
    missed: list[int] = []

    def clock() -> float:
        return START + trio.current_time()

    def ended(node: Node) -> None:
        got.append((trio.current_time(), node.got))

    async def play() -> None:
        for _ in range(honest):
            who = Identity(rng.randbytes(32))
            nodes.append(
                Node(
                    who, TOPIC, partial(Line, swarm, silent, who.peer_id), clock, random.Random(rng.random())
                )
            )
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(node.run, ROUND, ended)
            await trio.sleep(SETTLE)
            if how in ("deny", "silent"):
                for peer in suspects:
                    swarm.join(
                        peer,
                        Handlers(
                            lambda *_: Verdict.IGNORE, lambda _, question: bytes(4 * (len(question) // 12))
                        ),
                    )
            if how == "silent":
                silent.update(suspects)
            number = itertools.count(1)
            for who in keys(how, SEED):
                swarm.inject(
                    seal(who, TOPIC.swarm_id, next(number), clock(), offers.KIND, body(rng)), who.peer_id
                )
                await trio.sleep(1 / RATE)
                if trio.current_time() > SETTLE + seconds:
                    break
            nursery.cancel_scope.cancel()
        missed.extend(node.market.missed for node in nodes)

    trio.run(play, clock=trio.testing.MockClock(autojump_threshold=0))
    return result("memory", how, honest, _mean(got, 0, SETTLE), _mean(got, SETTLE, math.inf), fmean(missed))


def _mean(got: Sequence[tuple[float, int]], since: float, until: float) -> float:
    # Rollouts beyond the places of a round do not count.
    return fmean(min(count, WANTED) for at, count in got if since < at <= until)


def result(
    engine: str, how: str, honest: int, before: float, under: float, missed: float
) -> dict[str, float]:
    found = {"before": before, "under": under, "lost": max(0.0, 1 - under / before)}
    show(f"unserved, {engine}, {how}, {honest} honest", {**found, "missed": missed})
    return found


def in_processes(folder: Path, engine: str, how: str, honest: int, seconds: float) -> dict[str, float]:
    """Play the same attack with real nodes on loopback."""
    suspects = [key_of(SEED, n).peer_id for n in range(1, KEYS + 1)]
    for n in range(honest):
        (folder / str(n)).mkdir(parents=True)
    with ExitStack() as stack:
        more = ["--every", str(ROUND)]
        start = partial(ProbeProcess, engine=engine, module="tests.attacks.gathering_node", more=more)
        nodes = [stack.enter_context(start(folder / "0"))]
        nodes += [
            stack.enter_context(start(folder / str(n), bootstrap=nodes[0].addresses[:1]))
            for n in range(1, honest)
        ]
        for node in nodes:
            node.wait_for_peers(min(honest - 1, 4), 180)
        bad = ProbeProcess(
            folder / "bad",
            module="tests.attacks.offering",
            bootstrap=[node.addresses[0] for node in nodes],
            more=["--how", how],
        )
        stack.enter_context(bad)
        bad.wait(lambda: bad.last("up"), 180)
        if how == "deny":
            for node in nodes:
                node.wait(lambda node=node: set(suspects) & set(node.peers()), TIMEOUT_S)  # type: ignore[misc]
        time.sleep(SETTLE)
        bad.order(begin=True)
        begun = time.time()
        time.sleep(seconds)
        over = time.time()
    said = [(node, line) for node in nodes for line in node.said("round")]
    got = [(line["at"], line["got"]) for _, line in said]
    before, under = _mean(got, begun - SETTLE + ROUND, begun), _mean(got, begun, over)
    offered = (bad.last("offered") or {"offered": 0})["offered"]
    return {**result(engine, how, honest, before, under, -1), "offered": offered}


@pytest.mark.slow
@pytest.mark.parametrize(
    "honest, how, seconds", [(2, "deny", 40.0), (2, "gone", 40.0), (2, "fresh", 40.0), (10, "deny", 20.0)]
)
def test_honest_nodes_get_their_rollouts_despite_unserved_offers(
    honest: int, how: str, seconds: float
) -> None:
    found = in_memory(how, honest, seconds)
    assert found["before"] == pytest.approx(WANTED, abs=0.3) and 0 <= found["lost"] < 0.2


def attack(
    folder: Path,
    engine: str = "libp2p",
    honest: int = 2,
    how: str = "deny",
    minutes: float = 3.0,
    seed: int = 1,
) -> dict[str, float]:
    if engine == "memory":
        return in_memory(how, honest, 60 * minutes, seed)
    if how == "silent":
        raise SystemExit("silent is for the memory engine")
    return in_processes(folder, engine, how, honest, 60 * minutes)


ATTACK = Attack(
    attack,
    {"lost": 0.2},
    choices={"engine": ["memory", "libp2p", "hivemind"], "how": ["deny", "silent", "gone", "fresh"]},
    about={
        "how": (
            "who is asked says no; says nothing (memory alone); nobody can be asked; and a new key for each"
            " offer"
        ),
        "seed": "of the memory engine's run",
    },
)
