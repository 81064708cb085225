"""Swarm against solo over normalised rounds: SAPO (arXiv 2509.08721), section 6 and Figure 3. Pure.

The unit is the peer. Evaluations of one peer are answers of one model that learns: they depend on each other,
and a thousand of them are still one node. So each peer gives one value at each normalised round, its
cumulative reward so far (rounds.py), and the means of peers are compared by Welch's t, which wants neither
equal variances nor equal numbers: solo peers are few. A permutation test would need every peer's value at
every look; Welch needs three sums, and among 6 peers or more its level was within a percent of it in
simulations (docs/judge-protocol.md).

The values at successive rounds contain each other, so their tests depend on each other. Holm's correction
holds under any dependence, and bounds the chance of one false round among all.

All of this is for a look at a time that was set beforehand. For the one who looks at every moment there is
`intervals.paired_test`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from judge.figures.intervals import LEVEL, AnytimeTest, paired_test
from judge.figures.rounds import bin_end

# The first round that is tested: before it most peers have 0 or 1, and Welch's t errs where one side is
# small.
FIRST = 20
# A round is tested if each side has so many peers, and SHARE of those it had at first: a handful that stayed
# longest says little of all.
FEWEST_PEERS = 6
SHARE = 0.1
# A spread below this share of the sum of squares is none.
ROUNDING = 1e-12

Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BinSums:
    """Sums over an arm's peers at the end of one bin: their number, their values, the values squared."""

    peers: int
    total: float
    squares: float


@dataclass(frozen=True, slots=True)
class ArmData:
    """What is kept of one model, swarm or solo."""

    bins: Mapping[int, BinSums]
    # The peers' values by horizon, in the order in which they got there.
    finishers: Mapping[int, Sequence[float]]


@dataclass(frozen=True, slots=True)
class ArmsView:
    """What a comparison of swarm and solo needs."""

    # Of the largest models: the model, swarm or solo, and the peers with at least one bin.
    sizes: Sequence[tuple[str, str, int]]
    model: str | None  # the model whose arms these are; None: there is none
    swarm: ArmData
    solo: ArmData


# A column for each figure, with an entry for each bin.
Columns = Mapping[str, Sequence[Any]]


def tested(swarm: Mapping[int, BinSums], solo: Mapping[int, BinSums]) -> Columns:
    """Test the difference in cumulative reward at each bin where both arms have enough peers.

    Returns the difference, swarm less solo, with its 95 % interval, not corrected; two-sided p, plain and
    adjusted.
    """
    both = sorted(_enough(swarm) & _enough(solo))
    gains, halves, p = welch([swarm[bin] for bin in both], [solo[bin] for bin in both])
    return {**_over_rounds(both, "difference", gains, halves), "p": p.tolist(), "holm": holm(p)}


def _enough(arm: Mapping[int, BinSums]) -> set[int]:
    """Return the bins at which an arm has enough peers for a test."""
    fewest = max(FEWEST_PEERS, SHARE * max((sums.peers for sums in arm.values()), default=0))
    return {bin for bin, sums in arm.items() if sums.peers >= fewest and bin_end(bin) >= FIRST}


def welch(ones: Sequence[BinSums], others: Sequence[BinSums]) -> tuple[Reals, Reals, Reals]:
    """Test each pair: difference of means, half its 95 % interval, and the two-sided p of Welch's t.

    Welch, Biometrika 34, 1947.

    Where neither arm varies nothing is known of chance: the interval is unbounded and p is 1.
    """
    (n, mean, error), (n_other, mean_other, error_other) = _columns(ones), _columns(others)
    gain, variance = mean - mean_other, error + error_other
    with np.errstate(divide="ignore", invalid="ignore"):
        freedom = variance**2 / (error**2 / (n - 1) + error_other**2 / (n_other - 1))
        half = stdtrit(freedom, 1 - LEVEL / 2) * np.sqrt(variance)
        p = 2 * stdtr(freedom, -np.abs(gain) / np.sqrt(variance))
    varies = variance > 0
    return gain, np.where(varies, half, np.inf), np.where(varies, p, 1.0)


def _columns(arms: Sequence[BinSums]) -> tuple[Reals, Reals, Reals]:
    """Return the number of peers, their mean, and the mean's variance."""
    n, total, squares = (
        np.array([(arm.peers, arm.total, arm.squares) for arm in arms], dtype=float).reshape(-1, 3).T
    )
    mean = total / n
    spread = squares - total * mean
    return n, mean, np.where(spread > ROUNDING * squares, spread, 0.0) / (n - 1) / n


def holm(p: Sequence[float] | Reals) -> list[float]:
    """Adjust p-values by Holm (Scandinavian Journal of Statistics 6, 1979)."""
    order = np.argsort(p, kind="stable")
    scaled = np.asarray(p, dtype=float)[order] * np.arange(len(p), 0, -1)
    found = np.empty(len(order))
    found[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return [float(value) for value in found]


def stays_from(tests: Columns) -> int | None:
    """Find the first round from which all differences are significant and have the last one's sign.

    None: there is no such round.
    """
    first = None
    rows = [*zip(tests["round"], tests["difference"], tests["holm"], strict=True)]
    for round_number, difference, chance in reversed(rows):
        if chance >= LEVEL or difference * rows[-1][1] <= 0:
            break
        first = round_number
    return first


def curve(arm: Mapping[int, BinSums]) -> Columns:
    """Return the cumulative reward of the mean peer, with the 95 % interval of that mean (Student's t).

    One peer alone has no interval.
    """
    bins = sorted(arm)
    with np.errstate(divide="ignore", invalid="ignore"):
        n, mean, error = _columns([arm[bin] for bin in bins])
        half = stdtrit(n - 1, 1 - LEVEL / 2) * np.sqrt(error)
    return {**_over_rounds(bins, "reward", mean, half), "peers": [arm[bin].peers for bin in bins]}


def _over_rounds(bins: Sequence[int], name: str, middle: Reals, half: Reals) -> Columns:
    """Return what is of one round, and its interval, times the rounds at the end of each bin."""
    ends = [bin_end(bin) for bin in bins]
    figures = {name: middle, "low": middle - half, "high": middle + half}
    return {"round": ends, **{of: (np.array(ends) * values).tolist() for of, values in figures.items()}}


SCHEMA = 1
DIGITS = 6  # significant digits


def comparison_document(view: ArmsView) -> dict[str, Any]:
    """Make the document of GET /v1/comparison; docs/judge-protocol.md describes the fields."""
    tests = tested(view.swarm.bins, view.solo.bins)
    return {
        "schema": SCHEMA,
        "model": view.model,
        "models": _models(view.sizes),
        "level": LEVEL,
        "fewest_peers": FEWEST_PEERS,
        "swarm": _shown(curve(view.swarm.bins)),
        "solo": _shown(curve(view.solo.bins)),
        "tests": _shown(tests),
        "significant_from": stays_from(tests),
        "anytime": _anytime(paired_test(view.swarm.finishers, view.solo.finishers)),
    }


def _models(sizes: Sequence[tuple[str, str, int]]) -> list[dict[str, Any]]:
    peers: dict[str, dict[str, int]] = {}
    for model, sharing, many in sizes:
        peers.setdefault(model, {"swarm": 0, "solo": 0})[sharing] = many
    return [{"model": model, **arms} for model, arms in peers.items()]


def _shown(columns: Columns) -> Columns:
    return {
        name: values if name in ("round", "peers") else [*map(_short, values)]
        for name, values in columns.items()
    }


def _anytime(test: AnytimeTest) -> dict[str, Any]:
    horizons = [
        {
            "round": at.round,
            "pairs": at.pairs,
            "difference": _short(at.difference),
            "evidence": _short(at.evidence),
        }
        for at in test.horizons
    ]
    verdict = "not known" if test.better is None else "better" if test.better else "worse"
    return {"verdict": verdict, "p": _short(test.p), "horizons": horizons}


def _short(value: float) -> float | None:
    """Round for JSON, which knows no infinity."""
    return float(f"{value:.{DIGITS}g}") if isfinite(value) else None
