"""The learning rate by update number."""

import math

import pytest

from swarmd.policy.training.schedule import RateSchedule, learning_rate


def rates(schedule: RateSchedule, count: int) -> list[float]:
    return [learning_rate(2.0, schedule, n) for n in range(count)]


def test_constant_is_constant_whatever_its_total() -> None:
    assert rates(RateSchedule(), 3) == [2.0] * 3
    assert rates(RateSchedule(total=2), 4) == [2.0] * 4


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warm_up_rises_in_equal_steps_and_its_first_step_is_not_nothing(kind: str) -> None:
    assert rates(RateSchedule(kind, warmup=4, total=100), 5) == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_linear_falls_in_equal_steps_and_stays_down() -> None:
    assert rates(RateSchedule("linear", warmup=1, total=5, lowest=0.5), 8) == [2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0, 1.0]


def test_cosine_is_half_a_wave() -> None:
    schedule = RateSchedule("cosine", total=8)
    assert rates(schedule, 9) == pytest.approx([1 + math.cos(math.pi * n / 8) for n in range(9)])
    assert learning_rate(2.0, schedule, 4) == pytest.approx(1.0)
    assert learning_rate(2.0, schedule, 10**9) == 0.0
    assert learning_rate(2.0, RateSchedule("cosine", total=8, lowest=0.1), 8) == pytest.approx(0.2)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_without_an_end_nothing_falls(kind: str) -> None:
    assert rates(RateSchedule(kind), 3) == [2.0] * 3


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_warm_up_to_the_end(kind: str) -> None:
    assert rates(RateSchedule(kind, warmup=2, total=2), 3) == [1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    "wrong", [{"kind": "sine"}, {"warmup": -1}, {"total": -1}, {"lowest": 1.5}, {"lowest": float("nan")}, {"warmup": 3, "total": 2}]
)
def test_what_is_no_schedule(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"schedule|counts of updates"):
        RateSchedule(**wrong)  # type: ignore[arg-type]
