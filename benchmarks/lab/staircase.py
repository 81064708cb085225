"""Prints the share of mixed groups for several ways to choose a level, with simulated nodes.

    python -m benchmarks.lab.staircase [--nodes 200] [--groups 70]

A group is eight answers to one question; it is mixed if some are right and some are wrong. A node answers
questions of one subject. The chance of a right answer falls with the level along a logistic curve, `GAP`
logits a level; questions of one level differ by `SPREAD` logits. A node that learns gains `RATE` logits from
each mixed group. In 150 rounds of 4 questions, a real node asks about 70 questions of one subject.
"""

import argparse
import math
import random
from collections.abc import Callable
from functools import partial
from statistics import fmean

from p2p.types import PeerId
from swarmd.tasks.curriculum import Staircase, level_of
from swarmd.types import Completion, Rollout, Scored, TaskRef

LEVELS, GROUP = 5, 8
GAP, SPREAD, RATE = 1.5, 1.0, 0.1
NAMES = [f"subject.{level}" for level in range(1, LEVELS + 1)]

Choice = Callable[[random.Random], int]
Told = Callable[[int, int], None]  # level, right answers


def staircase() -> tuple[Choice, Told]:
    stairs = Staircase(NAMES)

    def told(level: int, right: int) -> None:
        rewards = (1.0,) * right + (0.0,) * (GROUP - right)
        rollout = Rollout(TaskRef(f"subject.{level}", 0), (Completion("", True),) * GROUP, PeerId("me"))
        stairs.saw([Scored(rollout, "", rewards, 0)])

    return lambda _: level_of(stairs.asked[0]), told


def half() -> tuple[Choice, Told]:
    """Go up a level if more than half of the answers are right, down if fewer than half are."""
    at = [1]

    def told(_: int, right: int) -> None:
        step = (right > GROUP / 2) - (right < GROUP / 2)
        at[0] = min(max(at[0] + step, 1), LEVELS)

    return lambda _: at[0], told


def thompson() -> tuple[Choice, Told]:
    """Draw each level's share of mixed groups from its posterior, and choose the largest draw's level."""
    seen = {level: [1, 1] for level in range(1, LEVELS + 1)}

    def told(level: int, right: int) -> None:
        seen[level][0 < right < GROUP] += 1

    def choose(rng: random.Random) -> int:
        return max(seen, key=lambda level: rng.betavariate(seen[level][1], seen[level][0]))

    return choose, told


def uniform() -> tuple[Choice, Told]:
    return lambda rng: rng.randint(1, LEVELS), lambda *_: None


def fixed(level: int) -> tuple[Choice, Told]:
    return lambda _: level, lambda *_: None


WAYS: dict[str, Callable[[], tuple[Choice, Told]]] = {
    "uniform": uniform,
    **{f"fixed {level}": partial(fixed, level) for level in range(1, LEVELS + 1)},
    "staircase": staircase,
    "half": half,
    "thompson": thompson,
}


def play(way: str, first: float, rate: float, groups: int, seed: int) -> float:
    """Return the share of mixed groups.

    first: chance of a right answer at level 1 at the start.
    """
    rng, ability, mixed = random.Random(seed), math.log(first / (1 - first)), 0
    choose, told = WAYS[way]()
    for _ in range(groups):
        level = choose(rng)
        logit = ability - GAP * (level - 1) + rng.gauss(0, SPREAD)
        chance = 1 / (1 + math.exp(-logit))
        right = sum(rng.random() < chance for _ in range(GROUP))
        if 0 < right < GROUP:
            mixed, ability = mixed + 1, ability + rate
        told(level, right)
    return mixed / groups


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--groups", type=int, default=70)
    given = parser.parse_args()
    for rate in (0.0, RATE):
        print(f"\n{'learns' if rate else 'does not learn'}; right at level 1 at first:")
        for first in (0.02, 0.05, 0.3, 0.7, 0.95, 0.995):
            mean = {
                way: fmean(play(way, first, rate, given.groups, seed) for seed in range(given.nodes))
                for way in WAYS
            }
            best = max((way for way in WAYS if way.startswith("fixed")), key=mean.__getitem__)
            shown = {best: f"best fixed ({best[-1]})", **{w: w for w in WAYS if not w.startswith("fixed")}}
            print(f"{first:6}", *(f"{name} {mean[way]:.2f}" for way, name in shown.items()), sep="  ")


if __name__ == "__main__":
    main()
