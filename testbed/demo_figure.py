"""The demo's figure: reward curves of the nodes that share, and of the node alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from swarmd.lab.figures import ALONE, TOGETHER, canvas
from swarmd.types import RoundLine

LOST = "#8a2f6b"


@dataclass
class Curve:
    """One node's run."""

    name: str
    lines: Sequence[RoundLine] = ()
    lost_at: int | None = None  # the round after which it was killed
    alone: bool = False  # whether it shares with no other node


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the means of `window` consecutive values: window − 1 fewer than `values`."""
    return [sum(values[i : i + window]) / window for i in range(len(values) - window + 1)]


def reward_figure(curves: Sequence[Curve], title: str) -> Any:
    """Draw rewards in the upper panel, and rounds over time in the lower panel; a kill shows as a gap.

    Each node's rewards are shown as a moving mean. The mean of the swarm's nodes is drawn as a line, too.
    """
    figure, (above, below) = canvas(9, 6.5, rows=2, height_ratios=(3, 1.4))
    swarm = [curve for curve in curves if not curve.alone]
    rounds = min(len(curve.lines) for curve in curves)
    window = max(1, rounds // 8)
    shown = range(window, rounds + 1)
    rewards = {curve.name: [line.reward_mean or 0.0 for line in curve.lines[:rounds]] for curve in curves}
    for number, curve in enumerate(swarm):
        lost = curve.lost_at is not None
        label = (
            f"{curve.name}, killed after round {curve.lost_at}"
            if lost
            else "each node that shares"
            if number == 0
            else None
        )
        colour, width = (LOST, 1.6) if lost else (TOGETHER, 1.0)
        means = moving_mean(rewards[curve.name], window)
        above.plot(shown, means, color=colour, alpha=1 if lost else 0.35, linewidth=width, label=label)
        if curve.lost_at is not None and window <= curve.lost_at <= rounds:
            above.plot(
                [curve.lost_at],
                [means[curve.lost_at - window]],
                "x",
                color=LOST,
                markersize=10,
                markeredgewidth=2.5,
            )
    means = [fmean(each) for each in zip(*(rewards[curve.name] for curve in swarm), strict=True)]
    above.plot(
        shown,
        moving_mean(means, window),
        color=TOGETHER,
        linewidth=2.8,
        label=f"mean of the {len(swarm)} that share",
    )
    for curve in curves:
        if curve.alone:
            above.plot(
                shown,
                moving_mean(rewards[curve.name], window),
                color=ALONE,
                linewidth=2.8,
                label="the node alone",
            )
    _draw_times(below, curves)
    figure.suptitle(title)
    above.set(ylabel=f"right answers, share\n(mean of {window} rounds)", xlabel="round of the node")
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    for panel in (above, below):
        panel.set_ylim(bottom=0)
    return figure


def _draw_times(panel: Any, curves: Sequence[Curve]) -> None:
    """Draw rounds over minutes.

    The longest gap between two rounds of the killed node is marked as its downtime.
    """
    begun = min(curve.lines[0].time for curve in curves)
    for curve in curves:
        minutes = [(line.time - begun) / 60 for line in curve.lines]
        numbers = [line.round for line in curve.lines]
        colour = ALONE if curve.alone else TOGETHER if curve.lost_at is None else LOST
        panel.plot(
            minutes,
            numbers,
            color=colour,
            linewidth=2 if curve.lost_at is not None else 1.2,
            alpha=1 if curve.alone else 0.7,
        )
        if curve.lost_at is not None:
            gap = max(range(1, len(minutes)), key=lambda at: minutes[at] - minutes[at - 1])
            panel.plot(
                minutes[gap - 1], numbers[gap - 1], "x", color=LOST, markersize=10, markeredgewidth=2.5
            )
            panel.annotate(
                "killed",
                (minutes[gap - 1], numbers[gap - 1]),
                (-6, 8),
                textcoords="offset points",
                ha="right",
                color=LOST,
            )
            panel.annotate(
                "back", (minutes[gap], numbers[gap]), (8, -10), textcoords="offset points", color=LOST
            )
    panel.set(xlabel="minutes", ylabel="rounds finished")
