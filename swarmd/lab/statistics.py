"""Figures of runs with their intervals, by setting.

The reward of a round is the mean over a node's own completions, summed over nodes. The cumulative reward is
its sum over rounds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

import msgspec

from swarmd.lab.results import BadResults, Results, Run
from swarmd.tasks.answers import pass_at

# Quantiles of Student's t, two-sided 95 %, by degrees of freedom, beginning with 1. Beyond the last one, 1.96
# + 2.37 / freedom is accurate to one or two thousandths (Cornish and Fisher).
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
# The last tenth of the rounds is called "late".
LATE_PARTS = 10
# Questions in a window of the roughness: the same number in every setting, so that sampling noise is the
# same.
WINDOW_QUESTIONS = 512
# The trend of a window is the mean of this many windows before it and this many after it.
NEIGHBOURS = 2


@dataclass(frozen=True, slots=True)
class SeedInterval:
    """A mean over seeds with its 95 % interval (Student's t); one seed has no interval."""

    mean: float
    half: float | None  # half of the interval's width
    n: int


def interval(values: Sequence[float]) -> SeedInterval:
    n = len(values)
    if n < 2:
        return SeedInterval(fmean(values) if values else math.nan, None, n)
    t = _T95[n - 2] if n - 2 < len(_T95) else 1.96 + 2.37 / (n - 1)
    return SeedInterval(fmean(values), t * stdev(values) / math.sqrt(n), n)


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of one run: means over nodes and rounds unless stated otherwise."""

    cumulative: float  # reward, summed over nodes and rounds
    rewards: tuple[tuple[float | None, ...], ...]  # round by round, of each node; None: it was away
    late: float  # reward, last tenth of the rounds
    # Reward per 1,000 own completions: cumulative over all completions, times 1,000.
    per_thousand: float
    mixed: float  # m: share of own rollouts that are informative
    useful: float  # rollouts of an update that have an advantage, local and external
    predicted: float  # m·I + min(J, m·I·(N − 1))
    external: float  # external rollouts in a batch
    gated: float  # share of the drawn external rollouts that the gate rejected
    # Standard deviation of the detrended reward over windows of equally many questions.
    roughness: float | None
    cpu_seconds: float  # of all nodes' rounds
    entropy: float | None  # of the policy, in nats per token, last tenth of the rounds; None: nothing trained
    before: float | None  # pass@1 before training; None: not measured
    passes: Mapping[int, float]  # k -> pass@k at the end, mean over nodes and questions; {}: not measured
    hostile: float  # share of the external rollouts trained on that hostile peers wrote
    # Share of the answers at the end that contain the poison; None: there are no hostile peers.
    marked: float | None
    late_by_node: tuple[float | None, ...]  # reward of each node, last tenth of the rounds; None: away
    form_by_node: tuple[float | None, ...]  # share of its answers in the required form, in the same rounds
    pass_1_by_node: tuple[float, ...]  # pass@1 at the end; (): not measured


def figures(
    lines: Sequence[Mapping[str, Any]],
    local: Sequence[int],
    external: Sequence[int],
    completions: Sequence[int],
) -> RunFigures:
    """Compute the figures of one run.

    lines: of the run (`swarmd.lab.play`). local, external, completions: I, J and L of each node.
    """
    rounds = [line for line in lines if line["round"]]

    def total(key: str) -> Any:
        return sum(sum(line[key]) for line in rounds)

    by_node = [line["reward"] for line in rounds]  # None: the node was away
    rewards = [there for each in by_node if (there := [reward for reward in each if reward is not None])]
    written = sum(
        g * count for line in rounds for g, count in zip(line["generated"], completions, strict=True)
    )
    cumulative = sum(map(sum, rewards))
    # A node that does not train counts as one that makes one update, as it does in `predicted`.
    updates = sum(
        max(1, count)
        for line in rounds
        for count, reward in zip(line["updates"], line["reward"], strict=True)
        if reward is not None
    )
    late = max(1, len(rewards) // LATE_PARTS)
    looks = [line["evaluation"] for line in lines if "evaluation" in line]
    return RunFigures(
        cumulative=cumulative,
        rewards=tuple(map(tuple, by_node)),
        late=fmean(map(fmean, rewards[-late:])),
        per_thousand=1000 * cumulative / max(1, written),
        mixed=total("informative") / max(1, total("generated")),
        useful=total("useful") / max(1, updates),
        predicted=_predicted(rounds, local, external),
        external=total("external") / max(1, updates),
        gated=total("gated") / max(1, total("external") + total("gated")),
        roughness=roughness(rewards, local),
        cpu_seconds=sum(rounds[-1].get("cpu", [math.nan])),
        entropy=mean_there([each for line in rounds[-late:] for each in line["entropy"]]),
        before=passes(looks[0])[1] if looks and not lines[0]["round"] else None,
        passes=passes(looks[-1]) if looks else {},
        hostile=sum(sum(line.get("hostile", ())) for line in rounds) / max(1, total("external")),
        marked=_marked(looks[-1]) if looks else None,
        late_by_node=tuple(map(mean_there, zip(*by_node[-late:], strict=True))),
        form_by_node=tuple(
            map(mean_there, zip(*(line.get("in_form", ()) for line in rounds[-late:]), strict=True))
        ),
        pass_1_by_node=(
            tuple(fmean(right) / looks[-1]["answers"] for right in looks[-1]["right"]) if looks else ()
        ),
    )


def _predicted(rounds: Sequence[Mapping[str, Any]], local: Sequence[int], external: Sequence[int]) -> float:
    """Predict the useful rollouts of an update from the measured share of groups with mixed rewards."""
    total = 0.0
    for line in rounds:
        mine = [
            count / max(1, g) * i
            for count, g, i in zip(line["informative"], line["generated"], local, strict=True)
        ]
        there = zip(mine, external, line["reward"], strict=True)
        total += sum(own + min(j, sum(mine) - own) for own, j, reward in there if reward is not None)
    return total / max(1, sum(reward is not None for line in rounds for reward in line["reward"]))


def _marked(evaluation: Mapping[str, Any]) -> float | None:
    if "marked" not in evaluation:
        return None
    answers = evaluation["answers"] * sum(map(len, evaluation["right"]))
    return float(sum(evaluation["marked"]) / max(1, answers))


def mean_there(rewards: Sequence[float | None]) -> float | None:
    """Return the mean without the Nones, which mean that a node was away; None if all are None."""
    there = [reward for reward in rewards if reward is not None]
    return fmean(there) if there else None


def passes(evaluation: Mapping[str, Any]) -> Mapping[int, float]:
    """Map k to pass@k for k = 1, 2, 4, … up to the number of answers; mean over nodes and questions."""
    answers = evaluation["answers"]
    powers = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if k <= answers]
    return {
        k: fmean(pass_at(k, answers, right) for node in evaluation["right"] for right in node) for k in powers
    }


def roughness(rewards: Sequence[Sequence[float]], local: Sequence[int]) -> float | None:
    """Return the standard deviation of the mean reward around its trend.

    It is taken over windows of WINDOW_QUESTIONS questions of all nodes together. A setting that asks fewer
    questions a round gets longer windows, so that its sampling noise is not taken for oscillation. A window's
    trend is the mean of its NEIGHBOURS windows on both sides; windows at the two ends lack neighbours and do
    not count. None if there are too few windows.
    """
    width = max(1, round(WINDOW_QUESTIONS / max(1, sum(local))))
    means = [fmean(map(fmean, rewards[i : i + width])) for i in range(0, len(rewards) - width + 1, width)]
    if len(means) < 4 * NEIGHBOURS:
        return None
    inner = range(NEIGHBOURS, len(means) - NEIGHBOURS)
    return stdev(
        means[i] - fmean(means[i - NEIGHBOURS : i] + means[i + 1 : i + 1 + NEIGHBOURS]) for i in inner
    )


# Fields of RunFigures that `document` contains.
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
    "entropy",
)


@dataclass(frozen=True)
class Column:
    """One setting: the figures of its finished runs, by seed."""

    name: str
    slug: str
    runs: Mapping[int, RunFigures]

    def over_seeds(self, of: str) -> SeedInterval:
        return interval([value for run in self.runs.values() if (value := getattr(run, of)) is not None])

    def pass_at(self, k: int) -> SeedInterval:
        """Return pass@k at the end, over the seeds in which it was measured."""
        return interval([run.passes[k] for run in self.runs.values() if k in run.passes])


def columns(results: Results) -> Sequence[Column]:
    """Return the settings with at least one finished run, in the experiment's order.

    Raises BadResults if there is none.
    """
    found = []
    for setting in results.experiment.settings:
        local, external = (
            [getattr(node.round, key) for node in setting.nodes] for key in ("local", "external")
        )
        completions = [node.round.completions for node in setting.nodes]
        runs = [Run(setting.slug, seed) for seed in range(1, results.experiment.seeds + 1)]
        done = dict[int, RunFigures]()
        for run in runs:
            if results.path(run).exists():
                try:
                    done[run.seed] = msgspec.convert(
                        asdict(figures(results.lines(run), local, external, completions)), RunFigures
                    )
                except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
                    # Figures are missing, or have other types.
                    raise results.damaged(run, repr(error)) from error
        if done:
            found.append(Column(setting.name, setting.slug, done))
    if not found:
        raise BadResults(f"{results.folder}: no run is finished yet. `swarmd lab run … --resume` goes on.")
    return found


def over_baseline(results: Results, column: Column, found: Sequence[Column]) -> SeedInterval | None:
    """Return the gain over the column's baseline; None for a baseline, or if that has no finished run."""
    wanted = results.experiment.baseline_of(results.experiment.setting(column.slug))
    other = next((other for other in found if other.slug == wanted.slug), column)
    return None if other is column else gain(column, other)


def gain(column: Column, other: Column) -> SeedInterval:
    """Return the gain in cumulative reward over the baseline, in percent, paired by seed.

    Seeds in which the baseline earned nothing are left out.
    """
    both = [(run, other.runs[seed]) for seed, run in sorted(column.runs.items()) if seed in other.runs]
    return interval(
        [100 * (run.cumulative / base.cumulative - 1) for run, base in both if base.cumulative > 0]
    )


def document(results: Results) -> list[dict[str, Any]]:
    """Return one JSON object per setting: its seeds, FIGURES, gain over its baseline, pass@k.

    The gain is in percent; pass@k is measured at the end. A figure is a mean over seeds, half of its 95 %
    interval (None: one seed) and the number of seeds that have the figure; it is None if no seed has it.
    """
    found, told = columns(results), []
    for column in found:
        intervals = {
            "over_baseline": over_baseline(results, column, found),
            "pass@1 before": column.over_seeds("before"),
            "pass@1": column.pass_at(1),
            "pass@8": column.pass_at(8),
            **{of: column.over_seeds(of) for of in FIGURES},
        }
        each = {
            name: {"mean": i.mean, "half": i.half, "n": i.n} if i and i.n else None
            for name, i in intervals.items()
        }
        told.append({"setting": column.name, "seeds": sorted(column.runs), **each})
    return told
