"""The closed forms of Theorem 3.5 (see swarmd/experience/replay_theory.py) equal a numerical minimum."""

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmd.experience.replay_theory import Reuse, best_reuse, compute_ratio, cost


def lowest(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the position of the only minimum of a function, by golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(45):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if function(a) < function(b) else (a, high)
    return (low + high) / 2


@settings(derandomize=True, max_examples=60)
@given(st.floats(0.05, 20), st.floats(0.01, 1) | st.just(0.0), st.floats(0.05, 0.45))
@example(10, 0.1, 0.25)  # 1/mu = rho, where the published formula divides by zero
@example(1, 1, 0.4)
def test_the_closed_form_is_the_numerical_minimum(mu: float, rho: float, alpha: float) -> None:
    def best_y(log_x: float) -> float:
        return lowest(
            lambda log_y: math.log(cost(Reuse(math.exp(log_x), math.exp(log_y)), mu, rho, alpha)), -12, 12
        )

    def at(log_x: float) -> float:
        return math.log(cost(Reuse(math.exp(log_x), math.exp(best_y(log_x))), mu, rho, alpha))

    log_x = lowest(at, 0, 16)  # x starts at 1
    found, closed = Reuse(math.exp(log_x), math.exp(best_y(log_x))), best_reuse(mu, rho, alpha)
    assert closed.kept == pytest.approx(found.kept, rel=1e-4) and closed.trained == pytest.approx(
        found.trained, rel=1e-4
    )
    assert cost(closed, mu, rho, alpha) <= cost(found, mu, rho, alpha) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("mu", "rho", "alpha"),
    [(0, 0.1, 0.2), (1, -0.1, 0.2), (1, 0.1, 0), (1, 0.1, 0.5), (math.nan, 0.1, 0.2), (math.inf, 0, 0.2)],
)
def test_settings_without_an_optimum_raise_an_error(mu: float, rho: float, alpha: float) -> None:
    with pytest.raises(ValueError, match="Theorem"):
        best_reuse(mu, rho, alpha)


def test_the_compute_ratios_equal_the_papers_table() -> None:
    """Table 2 of the paper: Qwen3-0.6B, W generators, T trainers. Entry (6,2) is computed by its formula."""
    for (w, t), gamma in {
        (7, 1): 1.02,
        (6, 2): 0.51,
        (5, 3): 0.34,
        (4, 4): 0.26,
        (2, 6): 0.17,
        (1, 7): 0.15,
    }.items():
        ratio = compute_ratio(6.84, generated=w / t / 6.84, trained=1)
        assert ratio == pytest.approx((1 + w / t) / 7.84) and ratio == pytest.approx(gamma, abs=0.006)
    assert compute_ratio(3.0, 8, 8) == 1 and compute_ratio(6.0, 8, 32) == pytest.approx((48 + 32) / (7 * 32))
    with pytest.raises(ValueError, match="compute ratio"):
        compute_ratio(1, 8, 0)
