"""Swarm against solo over normalised rounds: SAPO (arXiv 2509.08721), section 6 and Figure 3. Pure.

The unit is the peer. Evaluations of one peer are answers of one model that learns: they depend on each other,
so a thousand of them are still one sample. Each peer gives one value at each normalised round, its cumulative
reward so far (rounds.py). The verdict comes from `intervals.paired_test`, which is valid at every moment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from judge.figures.intervals import LEVEL, AnytimeTest, paired_test
from judge.figures.rounds import bin_end

# A mean of fewer peers is not shown, because a handful of long-running peers is not representative.
FEWEST_PEERS = 6
# A variance below this share of the sum of squares counts as zero (rounding).
ROUNDING = 1e-12


# Sums over an arm's peers at the end of one bin: number of peers, sum of values, sum of squared values.
BinSums = tuple[int, float, float]


@dataclass(frozen=True, slots=True)
class ArmData:
    """The sums stored for one arm (swarm or solo) of one model."""

    bins: Mapping[int, BinSums]
    # The peers' values by horizon, in the order in which the peers reached it.
    finishers: Mapping[int, Sequence[float]]


@dataclass(frozen=True, slots=True)
class ArmsView:
    """Input of a comparison of swarm and solo."""

    # The largest arms, each as (model, "swarm" or "solo", number of peers with at least one bin).
    sizes: Sequence[tuple[str, str, int]]
    model: str | None  # the model whose arms these are; None: there is none
    swarm: ArmData
    solo: ArmData


# A column for each figure, with an entry for each bin.
Columns = Mapping[str, Sequence[Any]]


def curve(arm: Mapping[int, BinSums]) -> Columns:
    """Return the mean cumulative reward of the peers, with the 95 % interval of that mean (Student's t).

    A single peer has no interval.
    """
    bins = sorted(arm)
    n, total, squares = np.array([arm[bin] for bin in bins], dtype=float).reshape(-1, 3).T
    mean = total / n
    spread = squares - total * mean
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.where(spread > ROUNDING * squares, spread, 0.0) / (n - 1) / n
        half = stdtrit(n - 1, 1 - LEVEL / 2) * np.sqrt(variance)
    ends = np.array([bin_end(bin) for bin in bins])
    # Stored values are per round; multiplied by the rounds so far they are cumulative.
    figures = {"reward": mean, "low": mean - half, "high": mean + half}
    return {
        "round": ends.tolist(),
        **{of: (ends * values).tolist() for of, values in figures.items()},
        "peers": [arm[bin][0] for bin in bins],
    }


DIGITS = 6  # significant digits


def comparison_document(view: ArmsView) -> dict[str, Any]:
    """Build the JSON document of GET /v1/comparison; docs/judge-protocol.md describes the fields."""
    return {
        "schema": 1,
        "model": view.model,
        "models": _models(view.sizes),
        "level": LEVEL,
        "fewest_peers": FEWEST_PEERS,
        "swarm": _shown(curve(view.swarm.bins)),
        "solo": _shown(curve(view.solo.bins)),
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
    """Round to DIGITS digits; None for infinity and NaN, which JSON does not have."""
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
