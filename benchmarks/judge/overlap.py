"""Prints the share of a judge's questions whose text does not occur in training, by specialty.

    python -m benchmarks.judge.overlap [CURRICULUM ...] [--training 4000] [--held-out 1000] [--seeds 1 2 3]

A judge draws question numbers that no node trains on and, if there are enough, only texts that no node trains
on (swarmd/tasks/held_out.py). Eight nodes ask 4,000 training questions of a specialty in a thousand rounds.
The program draws as many training questions, and prints the share of the judge's questions whose text is not
among them: mean, lowest and highest over the seeds. `judge.figures.overlap` holds the means, and the judge's
page shows them.
"""

import argparse
import random
from collections import defaultdict
from statistics import fmean

from swarmd.tasks import held_out
from swarmd.tasks.curriculum import CURRICULA, Curriculum
from swarmd.tasks.source import CurriculumTasks


def new_shares(curriculum: Curriculum, training: int, asked: int, seed: int) -> dict[str, float]:
    """Return, by specialty, the share of the judge's questions whose text is not among training questions."""
    texts, rng = defaultdict(list), random.Random(seed)
    tasks, window = CurriculumTasks(curriculum), rng.randbytes(held_out.SEED_BYTES)
    for index in range(asked * len(curriculum.specialties)):
        task = held_out.question(tasks, window, index)
        texts[task.ref.specialty].append(task.question)
    shares = {}
    for specialty, held in texts.items():
        known = {task.question for task in CurriculumTasks(curriculum, [specialty]).draw(training, rng)}
        shares[specialty] = sum(text not in known for text in held) / len(held)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("curricula", nargs="*", default=list(CURRICULA), metavar="CURRICULUM")
    parser.add_argument("--training", type=int, default=4000)
    parser.add_argument("--held-out", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args()
    for name in given.curricula:
        print(f"{name} {CURRICULA[name].questions}")
        means = []
        measured = [new_shares(CURRICULA[name], given.training, given.held_out, seed) for seed in given.seeds]
        for specialty in CURRICULA[name].specialties:
            shares = [found[specialty] for found in measured]
            means.append(fmean(shares))
            print(f"  {specialty:24} {means[-1]:.3f}  ({min(shares):.3f} to {max(shares):.3f})", flush=True)
        print(f"  {'all':24} {fmean(means):.3f}", flush=True)


if __name__ == "__main__":
    main()
