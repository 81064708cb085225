"""How many of a judge's questions have a text that training has too, by specialty.

    python -m benchmarks.overlap [CURRICULUM ...] [--training 4000] [--held-out 1000] [--seeds 1 2 3]

A judge draws from numbers that no node trains on (swarmd/tasks/curriculum.py), but two numbers may give one text. 4,000 training
questions of a specialty are what eight nodes ask in a thousand rounds. Prints the share of held-out questions whose text is not among so
many training questions, the mean of the seeds with its extremes. judge/overlap.py holds the means, and the judge's page shows them.
"""

import argparse
import random
from statistics import fmean

from swarmd.tasks.curriculum import CURRICULA, HELD_OUT, HELD_OUT_END, TRAINING_TASKS
from swarmd.tasks.source import CurriculumTasks, tasks_of
from swarmd.types import TaskRef


def new_share(tasks: CurriculumTasks, specialty: str, training: int, held_out: int, seed: int) -> float:
    """Of `held_out` questions, those whose text is not among `training` training questions."""
    rng = random.Random(seed)

    def draw(low: int, high: int) -> str:
        while (task := tasks.task(TaskRef(specialty, rng.randrange(low, high)))) is None:
            pass
        return task.question

    known = {draw(0, TRAINING_TASKS) for _ in range(training)}
    return sum(draw(HELD_OUT, HELD_OUT_END) not in known for _ in range(held_out)) / held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curricula", nargs="*", default=list(CURRICULA), metavar="CURRICULUM")
    parser.add_argument("--training", type=int, default=4000)
    parser.add_argument("--held-out", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args()
    for name in given.curricula:
        tasks = tasks_of(name)
        print(f"{name} {tasks.curriculum.digest}")
        means = []
        for specialty in tasks.curriculum.specialties:
            shares = [new_share(tasks, specialty, given.training, given.held_out, seed) for seed in given.seeds]
            means.append(fmean(shares))
            print(f"  {specialty:24} {means[-1]:.3f}  ({min(shares):.3f} to {max(shares):.3f})", flush=True)
        print(f"  {'all':24} {fmean(means):.3f}", flush=True)


if __name__ == "__main__":
    main()
