"""The settings of a results folder as columns.

Figures of their finished runs, and what each gains over its baseline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from swarmd.lab.results import BadResults, Results, Run
from swarmd.lab.statistics import Interval, RunFigures, figures, interval

# Fields of RunFigures that `document` gives to programs.
FIGURES = (
    "cumulative",
    "late",
    "per_thousand",
    "mixed",
    "useful",
    "predicted",
    "external",
    "gated",
    "roughness",
    "cpu_seconds",
)


@dataclass(frozen=True)
class Column:
    """One setting: the figures of its finished runs, by seed."""

    name: str
    slug: str
    runs: Mapping[int, RunFigures]

    def over_seeds(self, of: str) -> Interval:
        return interval([value for run in self.runs.values() if (value := getattr(run, of)) is not None])

    def curve(self, of: str = "curve") -> list[float]:
        """Return the curve's mean over seeds, round by round."""
        return [
            fmean(values) for values in zip(*(getattr(run, of) for run in self.runs.values()), strict=True)
        ]

    def pass_at(self, k: int) -> Interval | None:
        """Return pass@k at the end; None where it was not measured."""
        ends = [run.passes[max(run.passes)] for run in self.runs.values() if run.passes]
        return interval([end[k] for end in ends if k in end]) if any(k in end for end in ends) else None


def columns(results: Results) -> Sequence[Column]:
    """Return the settings with at least one finished run, in the experiment's order.

    Raises BadResults where there is none.
    """
    found = []
    for setting in results.experiment.settings:
        local, external = (
            [getattr(node.round, key) for node in setting.nodes] for key in ("local", "external")
        )
        completions = [node.round.completions for node in setting.nodes]
        runs = [Run(setting.slug, seed) for seed in range(1, results.experiment.seeds + 1)]
        done = {
            run.seed: figures(results.lines(run), local, external, completions)
            for run in runs
            if results.path(run).exists()
        }
        if done:
            found.append(Column(setting.name, setting.slug, done))
    if not found:
        raise BadResults(f"{results.folder}: no run is finished yet. `swarmd lab run … --resume` goes on.")
    return found


def baseline(results: Results, column: Column, found: Sequence[Column]) -> Column | None:
    """Return the column that this one is compared with, or None if it has no finished run."""
    wanted = results.experiment.baseline_of(results.experiment.setting(column.slug))
    return next((other for other in found if other.slug == wanted.slug), None)


def gain(column: Column, other: Column) -> Interval:
    """Return the mean of `gains` with its interval."""
    return interval(list(gains(column, other).values()))


def gains(column: Column, other: Column) -> Mapping[int, float]:
    """Return, by seed, the cumulative reward over the baseline's, in percent.

    Seeds in which the baseline earned nothing are left out.
    """
    both = [
        seed for seed in sorted(column.runs.keys() & other.runs.keys()) if other.runs[seed].cumulative > 0
    ]
    return {seed: 100 * (column.runs[seed].cumulative / other.runs[seed].cumulative - 1) for seed in both}


def document(results: Results) -> list[dict[str, Any]]:
    """Return one JSON object per setting: its seeds, FIGURES, gain over its baseline, pass@k.

    The gain is in percent; pass@k is measured at the end. A figure is a mean over seeds, half of its 95 %
    interval (None: one seed) and the number of seeds that have it; None where no seed has it.
    """
    found, told = columns(results), []
    for column in found:
        other = baseline(results, column, found)
        over = gain(column, other) if other is not None and other is not column else None
        intervals = {"over_baseline": over, "pass@1": column.pass_at(1), "pass@8": column.pass_at(8)}
        intervals |= {of: column.over_seeds(of) for of in FIGURES}
        each = {
            name: {"mean": i.mean, "half": i.half, "n": i.n} if i and i.n else None
            for name, i in intervals.items()
        }
        told.append({"setting": column.name, "seeds": sorted(column.runs), **each})
    return told
