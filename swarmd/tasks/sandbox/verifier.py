"""The contained process that scores answers to swarmd's own curricula, started by `client.Verifier`.

It runs as `python -m swarmd.tasks.sandbox.verifier [CURRICULUM [REWARD DIGEST]]`. It loads ReasoningGYM once.
Its workers (worker.py) regenerate each task from its reference and score the answers.
"""

import sys

from swarmd.tasks.curriculum import CURRICULA, SAPO_9
from swarmd.tasks.plugin import rewarded
from swarmd.tasks.sandbox.worker import Prepared, Work, run
from swarmd.tasks.scoring.grading import grade, solution
from swarmd.tasks.source import TaskRef, tasks_of


def prepare(curriculum: str, specialty: str, n: int) -> Prepared | None:
    """Regenerate the task; None if there is no such task."""
    if curriculum not in CURRICULA:
        return None
    tasks = tasks_of(curriculum)
    task = tasks.task(TaskRef(specialty, n))
    return (
        None
        if task is None
        else Prepared(task.question, lambda answer: grade(tasks, task, answer), task.entry)
    )


def warm_up() -> Work:
    """Generate and grade one task of each subject, so that workers need no further imports."""
    tasks = tasks_of(SAPO_9.name)
    for specialty in SAPO_9.specialties:
        if (task := tasks.task(TaskRef(specialty, 1))) is not None:
            grade(tasks, task, solution(tasks, task))
    return Work(prepare)


def load(curriculum: str = "", *own_reward: str) -> Work:
    """Load ReasoningGYM and, if given, a node's own reward (file and digest)."""
    work = warm_up()
    return rewarded(work, curriculum, CURRICULA[curriculum].specialties, *own_reward) if own_reward else work


if __name__ == "__main__":
    run(lambda: load(*sys.argv[1:]))
