"""Confidence intervals of right answers, and the test of swarm against solo for all moments. Pure.

`wilson` holds for one look. `always` and `paired_test` hold for those who look at every moment: whenever one
stops to look, the error is at most the stated one.

**A node's pass@1** (`always`). A confidence sequence: with 95 % it holds the mean chance of a right answer so
far, at all moments together. The chance may change with training. For each bet b the product of exp(b x) / (1
+ p_i (exp(b) - 1)) over answers x is a martingale, and by Jensen the mean of the p_i may stand for each; a
fixed mixture of bets and Ville's inequality give the interval (Howard, Ramdas, McAuliffe, Sekhon, Annals of
Statistics 49, 2021; Waudby-Smith and Ramdas, JRSS B 86, 2024).

**Swarm against solo** (`paired_test`). The unit is the peer, so the first swarm peer to get to a normalised
round is paired with the first solo peer that does, and so on. If sharing changed nothing, the sign of a
difference would be a fair coin, whatever its size and however the evaluations of a peer depend on each other.
Bets on these coins, sized by the differences alone, multiply to an e-value (after de la Peña, Annals of
Probability 27, 1999): the chance that it ever gets to 20 is 5 % at most. It is worked out at a few rounds
(rounds.HORIZONS), and each may spend its share of the 5 %.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from judge.figures.rounds import HORIZONS, bin_end

Z_95 = 1.959963984540054  # two-sided 95 % of the normal distribution


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


def wilson(successes: float, trials: int) -> Interval:
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
    shrink = 1 + Z_95**2 / trials
    centre = (share + Z_95**2 / (2 * trials)) / shrink
    half = Z_95 / shrink * sqrt(share * (1 - share) / trials + Z_95**2 / (4 * trials**2))
    # Exactly 0 and 1 at the ends, where rounding would leave a hair.
    return Interval(
        max(0.0, centre - half) if successes else 0.0, min(1.0, centre + half) if successes < trials else 1.0
    )


LEVEL = 0.05
ANSWER_BETS = np.geomspace(0.005, 5.0, 16)
PAIR_BETS = np.array([0.25, 0.5, 1.0, 2.0])[:, None]  # bets, in units of the mean size of a difference


@dataclass(frozen=True, slots=True)
class HorizonTest:
    """The test on pairs of peers that got to one normalised round."""

    round: int
    pairs: int
    difference: float  # mean of swarm less solo, in cumulative reward
    evidence: float  # the greatest e-value so far, two-sided


@dataclass(frozen=True, slots=True)
class AnytimeTest:
    """A test whose result may be looked at at every moment."""

    horizons: Sequence[HorizonTest]
    p: float  # over all horizons; once below 0.05 it stays there
    better: bool | None  # whether the swarm is better, where p is below 0.05; None: not known


# Room for all tallies of the last 100 questions, and some of a peer's beginning.
@lru_cache(maxsize=8_192)
def always(right: float, answers: int) -> Interval:
    """Return the 95 % interval of the mean reward, valid at all moments together.

    right: the sum of rewards from 0 to 1; exp is convex, so that what holds for 0 and 1 holds between them.
    """
    if not 0 <= right <= answers:
        raise ValueError(f"{right} right ones of {answers}")
    return Interval(_lowest(right, answers), 1.0 - _lowest(answers - right, answers))


def _lowest(right: float, answers: int) -> float:
    """Return the least mean chance against which no mixture of bets has won 2 / LEVEL."""
    if right == 0:
        return 0.0
    growth, limit = np.expm1(ANSWER_BETS), log(2 / LEVEL) + log(len(ANSWER_BETS))
    low, high = 0.0, right / answers
    for _ in range(30):
        middle = (low + high) / 2
        won = np.logaddexp.reduce(ANSWER_BETS * right - answers * np.log1p(middle * growth))
        low, high = (middle, high) if won > limit else (low, middle)
    return low


def paired_test(swarm: Mapping[int, Sequence[float]], solo: Mapping[int, Sequence[float]]) -> AnytimeTest:
    """Test swarm against solo. Each horizon has its peers' values in the order in which they got there."""
    horizons, greatest, better = [], 1.0, None
    for bin in HORIZONS:
        pairs = min(len(swarm.get(bin, ())), len(solo.get(bin, ())))
        if not pairs:
            continue
        differences = np.asarray(swarm[bin][:pairs]) - np.asarray(solo[bin][:pairs])
        for_swarm, for_solo = evidence(differences), evidence(-differences)
        # Each direction has half the stake.
        found = max(for_swarm, for_solo) / 2
        horizons.append(HorizonTest(bin_end(bin), pairs, bin_end(bin) * float(differences.mean()), found))
        if found / len(HORIZONS) > greatest:
            greatest, better = found / len(HORIZONS), for_swarm > for_solo
    p = min(1.0, 1.0 / greatest)
    return AnytimeTest(horizons, p, better if p < LEVEL else None)


def evidence(differences: NDArray[np.float64]) -> float:
    """Return the most that bets on positive signs ever had, beginning with 1.

    Under fair signs the chance that it ever reaches x is at most 1 / x.
    """
    sizes = np.abs(differences)
    seen = sizes > 0
    if not seen.any():
        return 1.0
    differences, sizes = differences[seen], sizes[seen]
    usual = np.sqrt(np.cumsum(sizes**2) / np.arange(1, len(sizes) + 1))
    each = log(2) - np.logaddexp(0.0, -2 * PAIR_BETS * differences / usual)  # log of exp(b d) / cosh(b d)
    with np.errstate(over="ignore"):
        had = np.exp(np.cumsum(each, axis=1)).mean(axis=0)
    return max(1.0, float(had.max()))
