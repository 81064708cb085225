"""Simulates a growing swarm: do the shards follow, and do all nodes get rollouts meanwhile?"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from swarmd.lab.simulation.swarm import SimulatedSwarm, SwarmPlan

STAGES = 12
AFTERWARDS = 3  # stages more, in which it is left alone


@dataclass(frozen=True, slots=True)
class Stage:
    """The end of one stretch of time, and what passed in it."""

    minute: float
    nodes: int
    shards: float  # median
    agree: float  # share of nodes that have the most common number of shards
    size: float  # median of what the nodes take the swarm's size to be
    rounds_full: float  # share of rounds, of all nodes, that got all J
    bytes_per_round: float  # received, per node


def grow(first: int, last: int, seconds: float, text: str, *, seed: int = 0) -> Iterator[Stage]:
    """`first` nodes come within a minute; `last` there are after `seconds`: each takes the same share of them to double."""
    swarm = SimulatedSwarm(SwarmPlan(first, seed), text)
    swarm.run(180.0)
    rng = random.Random(seed)
    for i in range(last - first):
        swarm.expect(seconds * share_of_time(first + i + rng.random(), first, last))
    return _stages(swarm, seconds / STAGES)


def share_of_time(nodes: float, first: int, last: int) -> float:
    """When, from 0 to 1, the swarm has so many nodes."""
    return math.log(nodes / first) / math.log(last / first)


def _stages(swarm: SimulatedSwarm, length: float) -> Iterator[Stage]:
    for number in range(STAGES + AFTERWARDS):
        swarm.restart_count()
        swarm.run(length)
        tally, now = swarm.tally, swarm.events.now
        shards = Counter(node.shards.shards for node in swarm.present)
        yield Stage(
            minute=(number + 1) * length / 60,
            nodes=len(swarm.present),
            shards=float(median(node.shards.shards for node in swarm.present)),
            agree=shards.most_common(1)[0][1] / len(swarm.present),
            size=float(median(node.shards.size(now) for node in swarm.present)),
            rounds_full=tally.rounds_full / tally.rounds if tally.rounds else 0.0,
            bytes_per_round=swarm.ledger.total() * swarm.plan.period / swarm.present_seconds,
        )
