"""Shows how a skill of one node spreads to the other nodes, from the results of the experiment `spread`.

    swarmd lab run spread --seeds 3
    python -m benchmarks.lab.spread spread [--specialty binary_matrix]

A node has the skill from the first evaluation in which a quarter of its answers to the specialty's held-out
questions are right. One node has the skill from the start and asks only questions of this specialty; it does
not count.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from swarmd.exchange.swarm_id import curriculum_of
from swarmd.lab.play import QUESTIONS_SEED
from swarmd.lab.results import Results, Run
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import open_tasks

SKILLED = 0.25  # share of right answers


def places(results: Results, specialty: str) -> list[int]:
    """Return the indices of the specialty's questions among the held-out questions."""
    curriculum = curriculum_of(results.experiment.settings[0].nodes[0])
    with Verifier(curriculum) as verifier:
        questions = open_tasks(curriculum, verifier).draw_held_out(
            results.experiment.evaluation.questions, random.Random(QUESTIONS_SEED)
        )
    return [place for place, task in enumerate(questions) if task.ref.specialty == specialty]


def shares(results: Results, run: Run, asked: Sequence[int]) -> dict[int, list[float]]:
    """Return each node's share of right answers, for each round after which the nodes were evaluated."""
    return {
        line["round"]: [
            fmean(right[place] for place in asked) / line["evaluation"]["answers"]
            for right in line["evaluation"]["right"]
        ]
        for line in results.lines(run)
        if "evaluation" in line
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="the results folder of `swarmd lab run spread`")
    parser.add_argument("--specialty", default="binary_matrix")
    arguments = parser.parse_args()
    results = Results.open(arguments.folder)
    asked = places(results, arguments.specialty)
    missing = set(results.missing)
    print("| setting | seed | rounds until half can | share of right answers, by rounds |\n|---|---|---|---|")
    for run in results.runs:
        if run in missing:
            continue
        by_round = shares(results, run, asked)
        setting = results.experiment.setting(run.setting)
        learners = [place for place, node in enumerate(setting.nodes) if not node.tasks.specialties]
        half = next(
            (
                str(number)
                for number, found in by_round.items()
                if 2 * sum(found[node] >= SKILLED for node in learners) >= len(learners)
            ),
            "never",
        )
        curve = ", ".join(
            f"{number}: {fmean(found[node] for node in learners):.2f}" for number, found in by_round.items()
        )
        print(f"| {setting.name} | {run.seed} | {half} | {curve} |")


if __name__ == "__main__":
    main()
