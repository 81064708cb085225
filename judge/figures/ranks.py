"""Ranks: those that chance can explain are shown as ties. Pure.

Every listed peer gets an exact interval (Clopper and Pearson) wide enough that all of them hold at once with
95 % (Šidák). A peer is certainly behind those whose interval lies above its own, and certainly before those
whose interval lies below. So its true rank lies between, for all peers at once (Klein, Wright and Wieczorek,
JRSS C 69, 2020). It holds for one look at the board, not for all looks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

LEVEL = 0.05

Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RankRange:
    first: int
    last: int


class RankRanges:
    def __init__(self, peers: Mapping[tuple[float, int], int]) -> None:
        """Compute the ranges. peers: how many there are with such a sum of rewards of so many questions."""
        if not peers:
            self._ranges: dict[tuple[float, int], RankRange] = {}
            return
        right, n, many = (
            np.array(column, dtype=float)
            for column in zip(*((*score, m) for score, m in peers.items()), strict=True)
        )
        tail = (1 - (1 - LEVEL) ** (1 / many.sum())) / 2
        with np.errstate(invalid="ignore"):
            low = np.where(right > 0, betaincinv(right, n - right + 1, tail), 0.0)
            high = np.where(right < n, betaincinv(right + 1, n - right, 1 - tail), 1.0)
        above, below = _weight_above(low, many, high), _weight_above(-high, many, -low)
        ranges = zip((1 + above).astype(int).tolist(), (many.sum() - below).astype(int).tolist(), strict=True)
        self._ranges = {score: RankRange(*between) for score, between in zip(peers, ranges, strict=True)}

    def of(self, right: float, n: int) -> RankRange:
        return self._ranges[right, n]


def _weight_above(values: Reals, weights: Reals, than: Reals) -> Reals:
    """Return for each of `than` the weight of all values that are greater."""
    order = np.argsort(values)
    sums = np.concatenate([[0.0], np.cumsum(weights[order])])
    return np.asarray(sums[-1] - sums[np.searchsorted(values[order], than, side="right")])
