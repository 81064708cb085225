"""Data of the pages, computed from the store's data. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from judge.figures.intervals import wilson
from judge.pages.drawing import Arm, Segment
from swarmd.tasks.answers import added

# Segments of a node's curve, and the fewest questions of a segment.
MAX_SEGMENTS = 24
MIN_SEGMENT_QUESTIONS = 10


def segments(curve: Sequence[tuple[int, float]]) -> list[Segment]:
    """Return pass@1 of consecutive segments of questions, each of at least MIN_SEGMENT_QUESTIONS.

    A shorter remainder is merged into the segment before it.
    """
    if not curve:
        return []
    least = max(MIN_SEGMENT_QUESTIONS, -(-curve[-1][0] // MAX_SEGMENTS))
    found: list[Segment] = []
    begun, had = 0, 0.0
    for number, total in curve:
        if number - begun >= least or (number == curve[-1][0] and number > begun):
            right, many = added(total, -had), number - begun
            # A few questions are no point of a curve: three right ones would draw 100 %.
            if many < least and found:
                first, last, share, _ = found.pop()
                right = added(right, share * (last - first + 1))
                begun, many = first - 1, number - first + 1
            found.append((begun + 1, number, right / many, wilson(right, many)))
            begun, had = number, total
    return found


def segment_rows(found: Iterable[Segment]) -> list[tuple[str, ...]]:
    return [
        (
            f"{first:,} to {last:,}",
            f"{100 * share:.0f} %",
            f"{100 * i.low:.0f}–{100 * i.high:.0f} %",
        )
        for first, last, share, i in found
    ]


def arms(document: Mapping[str, Any]) -> list[Arm]:
    """Return the two curves of a comparison, at the rounds with enough peers for a band."""
    return [(name, _band(document[name], document["fewest_peers"])) for name in ("swarm", "solo")]


def _band(curve: Mapping[str, Sequence[Any]], fewest: int) -> list[tuple[float, float, float, float]]:
    rows = zip(curve["round"], curve["reward"], curve["low"], curve["high"], curve["peers"], strict=True)
    return [(x, mean, low, high) for x, mean, low, high, peers in rows if peers >= fewest and low is not None]


def comparison_rows(document: Mapping[str, Any], most: int = 24) -> list[tuple[str, ...]]:
    """Choose evenly among the rounds at which both arms have enough peers, with the last one included."""
    swarm, solo = (
        {
            at: (mean, peers)
            for at, mean, peers in zip(arm["round"], arm["reward"], arm["peers"], strict=True)
            if peers >= document["fewest_peers"]
        }
        for arm in (document["swarm"], document["solo"])
    )
    rounds = [at for at in swarm if at in solo]
    step = max(1, -(-len(rounds) // most))
    return [
        (
            f"{at:,}",
            *(f"{mean:,.1f} ({peers} nodes)" for mean, peers in (swarm[at], solo[at])),
            f"{swarm[at][0] - solo[at][0]:+,.1f}",
        )
        for at in rounds[(len(rounds) - 1) % step :: step]
    ]
