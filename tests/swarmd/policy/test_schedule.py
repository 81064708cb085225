"""The learning rate by update number."""

import math

import pytest

from swarmd.policy.training.optimizer import RateSchedule, learning_rate

WAVE = [1 + math.cos(math.pi * n / 8) for n in range(9)]


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (RateSchedule(), [2.0] * 3),
        (RateSchedule(total=2), [2.0] * 4),  # constant, whatever its total
        *(
            (RateSchedule(kind, warmup=4, total=100), [0.5, 1.0, 1.5, 2.0, 2.0])
            for kind in ("constant", "linear", "cosine")
        ),
        (RateSchedule("linear", warmup=1, total=5, lowest=0.5), [2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0, 1.0]),
        (RateSchedule("cosine", total=8), [*WAVE, 0.0, 0.0]),
        (RateSchedule("cosine", total=8, lowest=0.1), [0.2 + 0.9 * rate for rate in WAVE]),
        *((RateSchedule(kind), [2.0] * 3) for kind in ("linear", "cosine")),  # without an end nothing falls
        *((RateSchedule(kind, warmup=2, total=2), [1.0, 2.0, 0.0]) for kind in ("linear", "cosine")),
    ],
)
def test_rates_after_a_warm_up_in_equal_steps_fall_in_their_shape_and_stay_down(
    schedule: RateSchedule, rates: list[float]
) -> None:
    assert [learning_rate(2.0, schedule, n) for n in range(len(rates))] == pytest.approx(rates)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "sine"},
        {"warmup": -1},
        {"total": -1},
        {"lowest": 1.5},
        {"lowest": float("nan")},
        {"warmup": 3, "total": 2},
    ],
)
def test_malformed_schedules_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"schedule|counts of updates"):
        RateSchedule(**wrong)  # type: ignore[arg-type]
