"""Comparison of runs with and without replay, on made-up curves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lab.replay import Run, compare, rising


def climbing(rate: float, seed: int, slope: float, end: float = 0.6, trained: float = 0.5) -> Run:
    """Return a run whose curve rises from 0.2 to `end` by `slope` a rollout, measured every 10 rollouts."""
    curve = [(g, g * trained, min(end, 0.2 + slope * g)) for g in range(0, 410, 10)]
    return Run(rate, seed, curve, pass_1=end, pass_8=0.8)


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_the_rising_fit_never_falls_and_keeps_the_mean(values: list[float]) -> None:
    curve = rising(values)
    assert len(curve) == len(values) and curve == sorted(curve)
    assert sum(curve) == pytest.approx(sum(values))
    assert rising(sorted(values)) == pytest.approx(sorted(values))


def test_one_lucky_measurement_does_not_cross_the_target() -> None:
    flat = [(g, 0.0, 0.2) for g in range(0, 400, 10)]
    flat[5] = (50, 0.0, 0.7)
    assert Run(0.1, 1, flat).until(0.4, 6.0) == (None, None)
    generated, compute = climbing(0.1, 1, 0.002).until(0.4, 6.0)
    assert generated == pytest.approx(100, abs=1) and compute == pytest.approx(650, abs=7)


def test_each_side_is_compared_at_its_best_rate() -> None:
    plain = [
        climbing(rate, seed, slope) for seed in (1, 2, 3) for rate, slope in ((1e-4, 0.001), (3e-4, 0.002))
    ]
    replay = [
        climbing(rate, seed, slope, trained=1.0)
        for seed in (1, 2, 3)
        for rate, slope in ((1e-4, 0.004), (3e-4, 0.001))
    ]
    told = compare(plain, replay, 6.0)
    assert (told["plain"]["rate"], told["replay"]["rate"]) == (3e-4, 1e-4)
    assert told["target"] == pytest.approx(0.56)
    assert told["ratio"] == pytest.approx(2, rel=0.05) and told["compute_ratio"] == pytest.approx(
        2 * 6.5 / 7, rel=0.05
    )
    assert told["heights"]["plain"].keys() == {"0.0001", "0.0003"}


def test_replay_that_misses_the_target_has_no_ratio_and_a_plain_run_gets_one() -> None:
    told = compare([climbing(1e-4, 1, 0.002)], [climbing(1e-4, 1, 0.002, end=0.4)], 6.0)
    assert told["ratio"] is None and told["ours"] is None and told["replay"]["generated"]["median"] is None
    assert told["plain"]["generated"]["median"] is not None and told["replay"]["pass_1"]["median"] == 0.4
    slow = [climbing(1e-4, seed, 0.002 if seed < 3 else 0.0005) for seed in (1, 2, 3)]
    told = compare(slow, [climbing(1e-4, seed, 0.002) for seed in (1, 2, 3)], 6.0)
    assert told["plain"]["generated"]["high"] == 400 and told["ratios"][2] == pytest.approx(
        400 / 180, rel=0.05
    )
