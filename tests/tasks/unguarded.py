"""A verifier whose worker marks with ReasoningGYM's own scorers, which evaluate what they are given. What contains it is ours.

Run as a command by test_containment.py. The argument leaves one layer out, to show what the others hold.
"""

import sys

from swarmd.tasks import containment, seccomp, verifier
from swarmd.tasks.answers import GradeReason
from swarmd.tasks.source import TaskRef, tasks_of


def prepare(curriculum: str, specialty: str, n: int) -> verifier.Mark | None:
    tasks = tasks_of(curriculum)
    task, dataset = tasks.task(TaskRef(specialty, n)), tasks.dataset(specialty)
    return (
        None
        if task is None
        else lambda answer: GradeReason.CORRECT if dataset.score_answer(answer, task.entry) >= 0.999 else GradeReason.WRONG
    )


if __name__ == "__main__":
    if "no-hook" in sys.argv:
        containment._refuse = lambda event, arguments: None
    if "no-seccomp" in sys.argv:
        seccomp.install = lambda: False
    verifier.run(prepare)
