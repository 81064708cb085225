"""GET /v1/comparison: swarm against solo of one model, as a chart needs it.

Pure; docs/judge-protocol.md describes the fields.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from judge.figures.anytime import AnytimeTest, paired_test
from judge.figures.comparison import FEWEST, LEVEL, ArmPoint, ArmSize, ArmsView, RoundTest, compare

SCHEMA = 1
DIGITS = 6  # significant ones


def comparison_document(view: ArmsView) -> dict[str, Any]:
    found = compare(view.swarm.bins, view.solo.bins)
    return {
        "schema": SCHEMA,
        "model": view.model,
        "models": _models(view.sizes),
        "level": LEVEL,
        "fewest_peers": FEWEST,
        "swarm": _curve(found.swarm),
        "solo": _curve(found.solo),
        "tests": _tests(found.tests),
        "significant_from": {"holm": found.holm_from, "benjamini_hochberg": found.benjamini_hochberg_from},
        "anytime": _anytime(paired_test(view.swarm.finishers, view.solo.finishers)),
    }


def _models(sizes: Sequence[ArmSize]) -> list[dict[str, Any]]:
    peers: dict[str, dict[str, int]] = {}
    for size in sizes:
        peers.setdefault(size.model, {"swarm": 0, "solo": 0})[size.sharing] = size.peers
    return [{"model": model, **arms} for model, arms in peers.items()]


def _curve(points: Sequence[ArmPoint]) -> dict[str, list[Any]]:
    return {
        "round": [point.round for point in points],
        "peers": [point.peers for point in points],
        "reward": [_short(point.mean) for point in points],
        "low": [_short(point.band.low) if point.band else None for point in points],
        "high": [_short(point.band.high) if point.band else None for point in points],
    }


def _tests(tests: Sequence[RoundTest]) -> dict[str, list[Any]]:
    return {
        "round": [test.round for test in tests],
        "difference": [_short(test.difference) for test in tests],
        "low": [_short(test.interval.low) for test in tests],
        "high": [_short(test.interval.high) for test in tests],
        "p": [_short(test.p) for test in tests],
        "holm": [_short(test.holm) for test in tests],
        "benjamini_hochberg": [_short(test.benjamini_hochberg) for test in tests],
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
    """JSON knows no infinity."""
    return float(f"{value:.{DIGITS}g}") if isfinite(value) else None
