"""Reward curves of runs, drawn from metrics.jsonl with matplotlib (the `plot` extra). Needs no display."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmd.errors import SwarmdError

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#000000")  # Okabe and Ito: told apart by everybody


class NoMatplotlib(SwarmdError):
    """Figures need matplotlib. Install it with `pip install 'swarmd[plot]'`."""


@dataclass(frozen=True)
class Curve:
    """One node's run."""

    name: str
    lines: Sequence[Mapping[str, Any]]  # of metrics.jsonl
    lost_at: int | None = None  # the round after which it was killed


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Means of `window` values in a row; shorter than `values` by window − 1."""
    return [sum(values[i : i + window]) / window for i in range(len(values) - window + 1)]


def draw_rewards(curves: Sequence[Curve], to: Path, title: str) -> None:
    """Write `reward_figure` as a PNG."""
    reward_figure(curves, title).savefig(to, dpi=120)


def reward_figure(curves: Sequence[Curve], title: str) -> Any:
    """Above: reward of each node per round with its moving mean. Below: rollouts of others it trained on."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlib from None

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for number, (curve, colour) in enumerate(zip(curves, COLOURS * (1 + len(curves) // len(COLOURS)), strict=False)):
        rounds = [line["round"] for line in curve.lines]
        rewards = [line["reward_mean"] for line in curve.lines]
        above.plot(rounds, rewards, color=colour, alpha=0.25, linewidth=1)
        window = max(1, min(len(rounds), max(3, len(rounds) // 6)))
        above.plot(rounds[window - 1 :], moving_mean(rewards, window), color=colour, linewidth=2, label=curve.name)
        beside = 0.12 * (number - (len(curves) - 1) / 2)  # equal counts would hide each other
        below.step(rounds, [line["external"] + beside for line in curve.lines], where="mid", color=colour, linewidth=1.5)
        if curve.lost_at is not None:
            for panel in (above, below):
                panel.axvline(curve.lost_at + 0.5, color=colour, linestyle=":", linewidth=1.5)
            above.annotate(
                f"{curve.name}:\nkilled, rejoined", (curve.lost_at + 0.5, 0.02), xycoords=("data", "axes fraction"), color=colour,
                fontsize=8, xytext=(4, 0), textcoords="offset points", va="bottom",
            )  # fmt: skip
    figure.suptitle(title)
    above.set(ylabel="reward of own completions\n(bold: mean of the last rounds)")
    above.set_ylim(bottom=0)
    figure.legend(frameon=False, loc="outside lower center", ncols=min(5, len(curves)))
    below.set(xlabel="round of the node", ylabel="external\nrollouts")
    below.set_ylim(bottom=0)
    for panel in (above, below):
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    return figure
