"""Two loud authors within every limit: ten right rollouts a round each, of the easiest specialty.

`pytest -s` prints the figures.

Measure their share of honest nodes' batches, and its effect on learning. A swarm on one machine, so
network groups tell nobody apart.
"""

from pathlib import Path
from statistics import fmean

from swarmd.tasks.sandbox.client import Verifier
from tests.attacks.harness import Attack
from tests.attacks.learners import over_seeds
from tests.attacks.test_singles import NOBODY, Result, play

HONEST, LOUD, EACH = 4, 2, 10
FAIR = LOUD / (HONEST - 1 + LOUD)  # of the external rollouts of an honest node


def test_two_loud_authors_get_little_more_than_a_fair_share(verifier: Verifier) -> None:
    """The run has few rounds; without caps the share is 0.9.

    The effect on learning: `python -m tests.attacks loud`.
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
