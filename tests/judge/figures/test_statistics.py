"""Wilson's interval against published values, and the points of a curve."""

from itertools import combinations, pairwise

import pytest

from judge.figures.intervals import Interval, wilson
from judge.figures.leaderboard import CURVE_POINTS, ScoreTally, by_specialty, curve_numbers, tally
from judge.figures.verification import Upload, VerifiedAnswer, found
from p2p.types import PeerId
from swarmd.tasks.answers import pass_at


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilsons_interval_matches_published_values(
    successes: int, trials: int, low: float, high: float
) -> None:
    interval = wilson(successes, trials)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


def test_wilsons_interval_is_correct_for_none_and_all_right() -> None:
    assert wilson(0, 0) == Interval(0.0, 1.0) and wilson(5, 5).high == 1.0
    for bad in [(-1, 3), (4, 3)]:
        with pytest.raises(ValueError, match="successes"):
            wilson(*bad)


def test_wilsons_interval_narrows_with_trials_and_is_symmetric() -> None:
    for trials in (1, 7, 40):
        for successes in range(trials + 1):
            interval, mirror = wilson(successes, trials), wilson(trials - successes, trials)
            assert 0 <= interval.low <= successes / trials <= interval.high <= 1
            assert interval.low == pytest.approx(1 - mirror.high)
    widths = [wilson(n // 2, n).high - wilson(n // 2, n).low for n in (4, 16, 64, 256)]
    assert all(wide > narrow for wide, narrow in pairwise(widths))


@pytest.mark.parametrize("answered", [0, 1, 2, CURVE_POINTS, CURVE_POINTS + 1, 1_000, 123_457])
def test_a_curve_ends_at_the_last_answer(answered: int) -> None:
    numbers = curve_numbers(answered)
    assert len(numbers) <= CURVE_POINTS and list(numbers) == sorted(set(numbers))
    assert numbers[-1:] == ((answered,) if answered else ())
    assert answered < 2 * CURVE_POINTS or len(numbers) >= CURVE_POINTS // 2


def test_the_greedy_answer_is_not_a_sample() -> None:
    """Of three answers, the first is greedy. Of the two samples, one and two are right."""
    upload = Upload("ab", PeerId("me"), "tiny", None, "cd", 1, 3)
    answers = [
        VerifiedAnswer("bf", 1, 1.0, 2, "correct", "x", True),  # the greedy answer and one sample are right
        VerifiedAnswer("bf", 2, 0.0, 2, "wrong", "x", True),  # both samples are right
    ]
    assert found(upload.answers, answers)["pass_at"] == {"1": 0.75, "2": 1.0}
    assert found(1, answers[:1])["pass_at"] == {}


def test_pass_at_k_is_the_share_of_draws_of_k_with_a_right_answer() -> None:
    for answers in range(1, 7):
        for right in range(answers + 1):
            marks = [1] * right + [0] * (answers - right)
            for k in range(1, answers + 1):
                draws = list(combinations(marks, k))
                assert pass_at(k, answers, right) == pytest.approx(sum(map(any, draws)) / len(draws))
    for bad in [(0, 3, 1), (4, 3, 1), (1, 3, 4)]:
        with pytest.raises(ValueError, match="pass@"):
            pass_at(*bad)


def test_a_score_is_the_mean_reward() -> None:
    answers = [("add", 0.25), ("add", 1.0), ("count", 0.5)]
    assert tally(answers) == ScoreTally(1.75, 3)
    assert by_specialty(answers) == {"add": ScoreTally(1.25, 2), "count": ScoreTally(0.5, 1)}
