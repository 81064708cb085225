"""Reward curves of runs, drawn from metrics.jsonl with matplotlib (the `plot` extra). Needs no display."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from swarmd.errors import SwarmdError

TOGETHER, ALONE = "#0072b2", "#d55e00"
COLOURS = (TOGETHER, ALONE, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#000000")  # Okabe and Ito: told apart by everybody


class NoMatplotlib(SwarmdError):
    """Figures need matplotlib. Install it with `pip install 'swarmd[plot]'`."""


@dataclass(frozen=True)
class Curve:
    """One node's run."""

    name: str
    lines: Sequence[Mapping[str, Any]]  # of metrics.jsonl
    lost_at: int | None = None  # the round after which it was killed
    alone: bool = False  # it shares with nobody


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Means of `window` values in a row; shorter than `values` by window − 1."""
    return [sum(values[i : i + window]) / window for i in range(len(values) - window + 1)]


def draw_rewards(curves: Sequence[Curve], to: Path, title: str) -> None:
    """Write `reward_figure` as a PNG."""
    reward_figure(curves, title).savefig(to, dpi=120)


def reward_figure(curves: Sequence[Curve], title: str) -> Any:
    """Above: moving mean of each node's reward, the swarm's mean beside the node alone. Below: others' rollouts a node trained on."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlib from None

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    swarm = [curve for curve in curves if not curve.alone]
    rounds = min(len(curve.lines) for curve in curves)
    window = max(1, rounds // 8)
    shown = range(window, rounds + 1)
    rewards = {curve.name: [line["reward_mean"] for line in curve.lines[:rounds]] for curve in curves}
    for number, curve in enumerate(swarm):
        label = f"each of the {len(swarm)} nodes of the swarm" if number == 0 else None
        above.plot(shown, moving_mean(rewards[curve.name], window), color=TOGETHER, alpha=0.35, linewidth=1, label=label)
        if curve.lost_at is not None:
            above.axvline(curve.lost_at + 0.5, color="0.4", linestyle=":", linewidth=1.5, label=f"{curve.name} killed, and back")
            below.axvline(curve.lost_at + 0.5, color="0.4", linestyle=":", linewidth=1.5)
    means = [fmean(each) for each in zip(*(rewards[curve.name] for curve in swarm), strict=True)]
    above.plot(shown, moving_mean(means, window), color=TOGETHER, linewidth=2.5, label="their mean")
    for curve in curves:
        if curve.alone:
            above.plot(shown, moving_mean(rewards[curve.name], window), color=ALONE, linewidth=2.5, label="the node alone")
        below.plot([line["round"] for line in curve.lines], [line["external"] for line in curve.lines],
                   color=ALONE if curve.alone else TOGETHER, alpha=1 if curve.alone else 0.5, linewidth=1.2)  # fmt: skip
    figure.suptitle(title)
    above.set(ylabel=f"reward of own completions\n(mean of {window} rounds)")
    figure.legend(frameon=False, loc="outside lower center", ncols=4)
    below.set(xlabel="round of the node", ylabel="others' rollouts\ntrained on")
    for panel in (above, below):
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    return figure
