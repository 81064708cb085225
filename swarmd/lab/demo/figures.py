"""Figures drawn with matplotlib (the `research` extra), without a display.

They are reward curves of runs, from metrics.jsonl, and SAPO's Figure 3, from a judge's /v1/comparison
(docs/judge-protocol.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from swarmd.errors import SwarmdError, command_for
from swarmd.types import RoundLine

TOGETHER, ALONE, LOST = "#0072b2", "#d55e00", "#8a2f6b"
# The palette of Okabe and Ito is distinguishable for colour-blind readers. Then Paul Tol's "muted" scheme,
# for figures with more lines.
COLOURS = (
    *(TOGETHER, ALONE, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#000000"),
    *("#332288", "#cc6677", "#117733", "#ddcc77", "#88ccee", "#882255", "#44aa99", "#999933"),
)


class NoMatplotlib(SwarmdError):
    """Figures need matplotlib, which is not installed."""


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


def canvas(width: float, height: float, rows: int = 1, columns: int = 1, **layout: Any) -> tuple[Any, Any]:
    """Return a figure and its empty panels, row by row. Raises NoMatplotlib.

    width, height: in inches. layout: arguments of `Figure.subplots`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlib(f"Figures need matplotlib. Run `{command_for('research')}`.") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **layout).flatten()
    for panel in panels:
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def reward_figure(curves: Sequence[Curve], title: str) -> Any:
    """Draw rewards above, and rounds over time below; a kill shows as a gap.

    Rewards are each node's moving mean; the swarm's mean is drawn next to the node alone.
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


def comparison_figure(comparisons: Sequence[Mapping[str, Any]]) -> Any:
    """Draw a panel for each comparison: cumulative rewards over rounds with 95 % bands, and the verdict.

    All panels share one scale.
    """
    figure, panels = canvas(
        4.2 * len(comparisons) + 0.6, 4.4, columns=len(comparisons), sharex=True, sharey=True
    )
    handles: dict[str, Any] = {}
    for panel, found in zip(panels, comparisons, strict=True):
        _draw_comparison(panel, found)
        handles |= {name: handle for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(),
        handles.keys(),
        frameon=False,
        loc="outside lower center",
        ncols=min(3, 1 + len(panels)),
    )
    panels[0].set_ylabel("right answers, added up over rounds")
    return figure


def _draw_comparison(panel: Any, found: Mapping[str, Any]) -> None:
    for arm, words, colour in (("swarm", "nodes that share", TOGETHER), ("solo", "nodes alone", ALONE)):
        curve = found[arm]
        most = max(curve["peers"], default=0)
        rows = zip(*(curve[key] for key in ("round", "reward", "low", "high", "peers")), strict=True)
        # The mean of a few peers jumps when one of them leaves.
        points = [point for *point, peers in rows if peers >= min(most, found["fewest_peers"])]
        panel.plot(
            [x for x, *_ in points], [mean for _, mean, *_ in points], color=colour, linewidth=2, label=words
        )
        band = [(x, low, high) for x, _, low, high in points if low is not None]
        if band:
            panel.fill_between(*zip(*band, strict=True), color=colour, alpha=0.15, linewidth=0)
    verdict = found["anytime"]
    words = {"better": "sharing is better", "worse": "sharing is worse"}.get(
        verdict["verdict"], "not decided yet"
    )
    panel.set_title(f"{found['model']}\n{words} (p = {verdict['p']:.2g})", fontsize=10)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("training rounds of a node")
