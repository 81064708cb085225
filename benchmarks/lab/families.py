"""Shows how two families of models learn from each other, from the results of `families.toml`.

    python -m tiny_models.make --family llama --steps 0.6 --out llama
    swarmd lab run benchmarks/lab/families.toml --seeds 3
    python -m benchmarks.lab.families families

Each row shows the nodes of one family in one setting. Differences from the baseline are paired by seed, with
the baseline's nodes of the same family; the intervals are over the seeds.
"""

import argparse
from collections.abc import Sequence
from math import nan
from pathlib import Path
from statistics import fmean

from swarmd.lab.experiment import Setting
from swarmd.lab.report import shown
from swarmd.lab.results import Results, Run
from swarmd.lab.statistics import interval


def members(setting: Setting) -> dict[str, list[int]]:
    """Return the indices of the nodes of each model."""
    found: dict[str, list[int]] = {}
    for place, node in enumerate(setting.nodes):
        found.setdefault(Path(node.model.name).name, []).append(place)
    return found


def reward(results: Results, run: Run, places: Sequence[int]) -> float:
    """Return a node's rewards, summed over all rounds, as the mean over the nodes `places`."""
    lines = [line["reward"] for line in results.lines(run) if line["round"]]
    return sum(fmean(line[place] for place in places) for line in lines)


def passed(results: Results, run: Run, places: Sequence[int]) -> float:
    """Return the mean pass@1 of the nodes `places` at the end."""
    look = [line["evaluation"] for line in results.lines(run) if "evaluation" in line][-1]
    return fmean(fmean(look["right"][place]) for place in places) / int(look["answers"])


def refused(results: Results, run: Run, places: Sequence[int]) -> tuple[float, float]:
    """Return the shares of external rollouts that were unfit for training, and that the gate rejected."""
    rounds = [line for line in results.lines(run) if line["round"]]
    used, unfit, gated = (
        sum(line[key][place] for line in rounds for place in places) for key in ("external", "unfit", "gated")
    )
    drawn = max(1, used + unfit + gated)
    return unfit / drawn, gated / drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="results of `swarmd lab run benchmarks/lab/families.toml`")
    results = Results.open(parser.parse_args().folder)
    missing = set(results.missing)
    baseline = results.experiment.baseline
    print("| setting | family | seeds | reward of a node | over alone, % | pass@1 | unfit | gated |")
    print("|---|---|---|---|---|---|---|---|")
    for setting in results.experiment.settings:
        played = [
            (run, alone)
            for run in results.runs
            for alone in [Run(baseline.slug, run.seed)]
            if run.setting == setting.slug and not {run, alone} & missing
        ]
        for family, places in members(setting).items() if played else ():
            own = members(baseline)[family]
            earned = [reward(results, run, places) for run, _ in played]
            before = [reward(results, alone, own) for _, alone in played]
            gains = [
                100 * (here / there - 1) if there else nan for here, there in zip(earned, before, strict=True)
            ]
            cells = (
                setting.name,
                family,
                str(len(played)),
                shown(interval(earned), 1),
                "–" if setting is baseline else shown(interval(gains), 1),
                shown(interval([passed(results, run, places) for run, _ in played]), 3),
                *(
                    f"{fmean(s):.1%}"
                    for s in zip(*(refused(results, r, places) for r, _ in played), strict=True)
                ),
            )
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
