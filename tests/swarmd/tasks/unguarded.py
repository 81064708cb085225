"""A contained verifier that marks with ReasoningGYM's own scorers, which execute answers.

test_containment.py runs it as a command. The argument disables one layer of the containment, to test the
other layers.
"""

import sys

from swarmd.tasks.answers import GradeReason
from swarmd.tasks.sandbox import containment, seccomp
from swarmd.tasks.sandbox.verifier import warm_up
from swarmd.tasks.sandbox.worker import Prepared, Work, run
from swarmd.tasks.source import TaskRef, tasks_of


def prepare(curriculum: str, specialty: str, n: int) -> Prepared | None:
    tasks = tasks_of(curriculum)
    task, dataset = tasks.task(TaskRef(specialty, n)), tasks.dataset(specialty)
    if task is None:
        return None
    return Prepared(
        task.question,
        lambda answer: (
            GradeReason.CORRECT if dataset.score_answer(answer, task.entry) >= 0.999 else GradeReason.WRONG
        ),
    )


def load() -> Work:
    warm_up()
    return Work(prepare)


if __name__ == "__main__":
    if "no-hook" in sys.argv:
        containment._refuse = lambda event, arguments: None
    if "no-seccomp" in sys.argv:
        seccomp.install = lambda: False
    run(load)
