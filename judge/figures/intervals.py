"""Confidence interval of a share of right answers. Pure."""

from dataclasses import dataclass
from math import sqrt

Z_95 = 1.959963984540054  # two-sided 95 % of the normal distribution


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


def wilson(successes: float, trials: int, z: float = Z_95) -> Interval:
    """Return Wilson's score interval (JASA 22, 1927) of a proportion; [0, 1] without trials.

    Unlike the normal approximation it stays inside [0, 1] and is not empty at 0 or n successes, which is
    where new nodes are. successes: the sum of rewards from 0 to 1. Of all such rewards with one mean those of
    0 and 1 spread most, so between them the interval is too wide rather than too narrow.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials")
    if trials == 0:
        return Interval(0.0, 1.0)
    share = successes / trials
    shrink = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / shrink
    half = z / shrink * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # Exactly 0 and 1 at the ends, where rounding would leave a hair.
    return Interval(
        max(0.0, centre - half) if successes else 0.0, min(1.0, centre + half) if successes < trials else 1.0
    )
