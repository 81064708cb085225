"""Small repetitions of measurements of the judge that documents and pages quote."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.judge.overlap import new_shares
from benchmarks.judge.significance import table
from judge.figures.overlap import TRAINING, new_texts
from swarmd.tasks.curriculum import SAPO_9, TINY_9, Curriculum


def test_the_judge_rarely_calls_equal_sides_different_and_detects_large_gains() -> None:
    """A short run of `python -m benchmarks.judge.significance`."""
    (equal,) = table([(8, 8)], 1.0, 20, 1)
    (better,) = table([(30, 30)], 2.0, 3, 1)
    shares: Any = equal["better_%"]
    assert shares["anytime verdict"]["ever"] <= 5.0
    found: Any = better["better_%"]
    assert found["anytime verdict"]["end"] == 100.0


@pytest.mark.slow
@pytest.mark.parametrize("curriculum", [TINY_9, SAPO_9], ids=lambda curriculum: curriculum.name)
def test_the_recorded_share_of_new_texts_matches_a_new_measurement(curriculum: Curriculum) -> None:
    """The seed differs from the seeds in benchmarks.judge.overlap.

    The specialty bf is left out, because its tasks take longer to generate than all other tasks.
    """
    said = new_texts(curriculum.questions)
    assert set(said) == set(curriculum.specialties)
    quick = replace(
        curriculum, configs={name: config for name, config in curriculum.configs.items() if name != "bf"}
    )
    for specialty, share in new_shares(quick, TRAINING, 150, seed=9).items():
        assert share == pytest.approx(said[specialty], abs=0.1), specialty
