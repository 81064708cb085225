"""Loud: two authors stay within every limit, but each sends ten right rollouts of the easiest specialty a
round.

`pytest -s` prints the figures.

The attack measures their share of honest nodes' batches, and the effect on learning. The swarm runs on one
machine, so network groups do not distinguish nodes.
"""

from pathlib import Path
from statistics import fmean

from swarmd.tasks.sandbox.client import Verifier
from tests.attacks.harness import Attack
from tests.attacks.learners import over_seeds
from tests.attacks.test_singles import NOBODY, Result, play

HONEST, LOUD, EACH = 4, 2, 10
FAIR = LOUD / (HONEST - 1 + LOUD)  # fair share of an honest node's external rollouts


def test_two_loud_authors_get_little_more_than_a_fair_share(verifier: Verifier) -> None:
    """A short run; without caps the share is 0.9.

    `python -m tests.attacks loud` measures the effect on learning.
    """
    assert (
        play(verifier, "easy groups", 4, 1, honest=HONEST, keys=LOUD, questions=9, each=EACH).crowd
        <= FAIR + 0.2
    )


def attack(folder: Path, rounds: int = 40, seeds: int = 3) -> dict[str, float]:
    def one(verifier: Verifier, kind: str, seed: int) -> Result:
        return play(verifier, kind, rounds, seed, honest=HONEST, keys=LOUD, each=EACH)

    clean, attacked = over_seeds("loud", [NOBODY, "easy groups"], seeds, one).values()
    return {
        "share_over_fair": fmean(result.crowd for result in attacked) - FAIR,
        "reward_lost": (
            1 - fmean(result.reward for result in attacked) / fmean(result.reward for result in clean)
        ),
        "honest_taken": (
            fmean(r.external * (1 - r.crowd) for r in attacked) / fmean(r.external for r in clean)
        ),
    }


ATTACK = Attack(attack, {"share_over_fair": 0.11}, about={"rounds": "of each run"})
