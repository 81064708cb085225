"""Builds a scenario's swarm, plays it and returns its figures."""

import gc
import random
import time
from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks.network.simulation.hostile import ATTACKS
from benchmarks.network.simulation.network import Event, Join, Leaves, Network, Node, Returns, Tally
from benchmarks.network.simulation.nodes import ROUND, Honest, SharedEars
from benchmarks.network.simulation.scenarios import Scenario
from p2p.identity import Identity
from swarmd.exchange.pacing import TARGET_PER_S

START_S = 60.0  # seconds within which all nodes start
# If hearing is shared, frames reach the nodes' boards only from this many rounds before the measured time on.
# A board keeps an offer for `round.max_age` rounds.
WARM_ROUNDS = ROUND.max_age + 1

CPU = "CPU, s"
Figures = Mapping[str, float]


class Churn(Node):
    """Kills nodes and restarts them with the same key and without their state."""

    def __init__(self, network: "Swarm") -> None:
        self.swarm = network
        super().__init__(network, Identity(bytes(31) + b"\2"), network.link(0))
        self._rng = random.Random(f"churn {network.seed}")

    def expect(self, node: Node, after: float = 0.0) -> None:
        """Draw the time at which a node is killed. after: seconds until the node starts."""
        time = self._rng.expovariate(1 / self.network.scenario.stays)
        self.network.at(self.network.now + after + time, self, Leaves(node))

    def take(self, event: Event) -> None:
        network = self.network
        match event:
            case Leaves(node):
                network.leave(node)
                network.at(
                    network.now + self._rng.expovariate(1 / network.scenario.away), self, Returns(node)
                )
            case Returns(Honest() as old):
                node = Honest(network, old.identity, old.link, old.number, old.life + 1, old.round - 1)
                self.swarm.honest[old.number] = node
                network.at(network.now, node, Join())
                self.expect(node)


class Swarm(Network):
    """A scenario's swarm. All its nodes start within a minute."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__(scenario, seed)
        self.honest: list[Honest] = []  # by the node's number
        if scenario.shared:
            self.ears = SharedEars(self)
        churn = Churn(self) if scenario.stays else None
        for number in range(scenario.nodes):
            node = Honest(self, Identity((2 + number).to_bytes(32)), self.link(number), number)
            self.honest.append(node)
            starts = self.rng.uniform(0.0, START_S)
            self.at(starts, node, Join())
            if churn is not None:
                churn.expect(node, starts)
        if scenario.attack is not None:
            for number in range(scenario.nodes, scenario.nodes + scenario.attackers):
                identity, link = Identity((2 + number).to_bytes(32)), self.link(number)
                hostile = ATTACKS[scenario.attack](self, identity, link, number)
                self.at(self.rng.uniform(0.0, START_S), hostile, Join())


def play(scenario: Scenario, seed: int) -> Figures:
    """Play a scenario; return its figures in the order of the table."""
    began = time.process_time()
    swarm = Swarm(scenario, seed)
    # The simulation makes hardly any cyclic garbage, and each pass of the garbage collector would visit all
    # nodes.
    gc.freeze()
    gc.disable()
    try:
        warm = WARM_ROUNDS * scenario.rounds_s[1] if scenario.shared else 0.0
        swarm.silenced = scenario.shared
        swarm.play(scenario.settle - warm)
        swarm.silenced = False
        swarm.play(warm)
        tally = swarm.tally = Tally()
        swarm.play(scenario.measured)
    finally:
        gc.enable()
        gc.unfreeze()
    return {**_figures(swarm, tally), CPU: time.process_time() - began}


def _figures(swarm: Swarm, tally: Tally) -> Figures:
    waits = sorted(tally.waits) or [float("nan")]
    paces = [min(node.exchange.pacing.pace, 1 / node.seconds) for node in swarm.honest]
    rounds = max(1, tally.rounds)
    return {
        "offers heard, in targets": tally.offers / swarm.scenario.measured / TARGET_PER_S,
        "rounds with all J, %": 100 * tally.full / rounds,
        "places filled, %": 100 * tally.places / (rounds * ROUND.wanted),
        "all J after, s (median)": waits[len(waits) // 2],
        "(95 %)": waits[int(0.95 * len(waits))],
        "questions a rollout": tally.questions / max(1, tally.delivered),
        "kB a node and round": _kilobytes(swarm, tally),
        "dials refused, %": 100 * tally.refused / max(1, tally.dials),
        "Jain": sum(paces) ** 2 / (len(paces) * sum(pace**2 for pace in paces)),
        "hostile rollouts, %": 100 * tally.hostile / max(1, tally.delivered),
        "hostile peers reported": tally.blamed.total(),
        "honest peers reported": tally.unserved,
        "wrongly reported": tally.wrong,
    }


def _kilobytes(swarm: Swarm, tally: Tally) -> float:
    """Return the kB that a node receives in one round of mean length."""
    per_second: float = tally.bytes.total() / len(swarm.nodes) / swarm.scenario.measured
    return per_second * fmean(node.seconds for node in swarm.honest) / 1000


def means(runs: Sequence[Figures]) -> Figures:
    """Return the mean of each figure over runs with several seeds."""
    return {name: fmean(run[name] for run in runs) for name in runs[0]}
