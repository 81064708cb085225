"""Confidence intervals of the share of right answers, and the swarm-against-solo test. Pure.

`wilson` is valid for a single look at the data. `always` and `paired_test` are valid at all moments together:
the error rate is at most the stated one, even for a reader who looks after every answer and stops when the
result pleases.

**A node's pass@1** (`always`). A confidence sequence: with 95 % it contains the mean chance of a right answer
so far, at all moments together. The chance may change with training. For each bet b the product of exp(b x) /
(1 + p_i (exp(b) - 1)) over answers x is a martingale, and by Jensen the mean of the p_i may replace each p_i;
a fixed mixture of bets and Ville's inequality give the interval (Howard, Ramdas, McAuliffe, Sekhon, Annals of
Statistics 49, 2021; Waudby-Smith and Ramdas, JRSS B 86, 2024).

**Swarm against solo** (`paired_test`). The unit is the peer: the first swarm peer that reaches a normalised
round is paired with the first solo peer that reaches it, and so on. If sharing had no effect, the sign of a
difference would be a fair coin, whatever its size and however the evaluations of a peer depend on each other.
Bets on these coins, sized by the differences alone, multiply to an e-value (after de la Peña, Annals of
Probability 27, 1999): the chance that it ever reaches 20 is at most 5 %. It is computed at a few rounds
(rounds.HORIZONS), and each may spend an equal share of the 5 %.
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

    Unlike the normal approximation it stays inside [0, 1] and has a positive width at 0 or n successes, which
    is common for new nodes. successes: the sum of rewards from 0 to 1. For a given mean, rewards of only 0
    and 1 have the largest variance, so with rewards in between the interval is too wide rather than too
    narrow.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials")
    if trials == 0:
        return Interval(0.0, 1.0)
    share = successes / trials
    shrink = 1 + Z_95**2 / trials
    centre = (share + Z_95**2 / (2 * trials)) / shrink
    half = Z_95 / shrink * sqrt(share * (1 - share) / trials + Z_95**2 / (4 * trials**2))
    # The ends are set to exactly 0 and 1, because rounding would miss them slightly.
    return Interval(
        max(0.0, centre - half) if successes else 0.0, min(1.0, centre + half) if successes < trials else 1.0
    )


LEVEL = 0.05
ANSWER_BETS = np.geomspace(0.005, 5.0, 16)
PAIR_BETS = np.array([0.25, 0.5, 1.0, 2.0])[:, None]  # bets, in units of the mean size of a difference


@dataclass(frozen=True, slots=True)
class HorizonTest:
    """The test on pairs of peers that reached one normalised round."""

    round: int
    pairs: int
    difference: float  # mean of swarm less solo, in cumulative reward
    evidence: float  # the greatest e-value so far, two-sided


@dataclass(frozen=True, slots=True)
class AnytimeTest:
    """A test whose result is valid at every moment."""

    horizons: Sequence[HorizonTest]
    p: float  # over all horizons; once below 0.05 it stays there
    better: bool | None  # whether the swarm is better, if p is below 0.05; None: not known


# Large enough for all tallies of the last 100 questions, and for many early ones.
@lru_cache(maxsize=8_192)
def always(right: float, answers: int) -> Interval:
    """Return the 95 % interval of the mean reward, valid at all moments together.

    right: the sum of rewards from 0 to 1. The proof for rewards of 0 and 1 covers those in between, as exp is
    convex.
    """
    if not 0 <= right <= answers:
        raise ValueError(f"{right} right ones of {answers}")
    return Interval(_lowest(right, answers), 1.0 - _lowest(answers - right, answers))


def _lowest(right: float, answers: int) -> float:
    """Return the smallest mean against which the mixture of bets has not won 2 / LEVEL."""
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
    """Test swarm against solo. Each horizon lists its peers' values in the order of arrival."""
    horizons, greatest, better = [], 1.0, None
    for bin in HORIZONS:
        if not (pairs := min(len(swarm.get(bin, ())), len(solo.get(bin, ())))):
            continue
        differences = np.asarray(swarm[bin][:pairs]) - np.asarray(solo[bin][:pairs])
        for_swarm, for_solo = evidence(differences), evidence(-differences)
        # Each direction has half the stake (two-sided test).
        found = max(for_swarm, for_solo) / 2
        horizons.append(HorizonTest(bin_end(bin), pairs, bin_end(bin) * float(differences.mean()), found))
        if found / len(HORIZONS) > greatest:
            greatest, better = found / len(HORIZONS), for_swarm > for_solo
    p = min(1.0, 1.0 / greatest)
    return AnytimeTest(horizons, p, better if p < LEVEL else None)


def evidence(differences: NDArray[np.float64]) -> float:
    """Return the largest capital that bets on positive signs ever had, starting with 1.

    If the signs are fair coins, the chance that it ever reaches x is at most 1 / x.
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
