"""Draws tasks, and regenerates a task from its reference, identically in every process."""

import contextlib
import decimal
import locale
import math
import os
import random
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from swarmd.tasks.curriculum import CURRICULA, Curriculum, DrawnTasks, subject_of
from swarmd.tasks.gym import basic_arithmetic, bf_optimizer, reasoning_gym
from swarmd.tasks.own_tasks import OwnCurriculum, OwnTasks
from swarmd.tasks.sandbox.client import Verifier
from swarmd.types import Task, TaskRef

__all__ = ["CurriculumTasks", "Task", "TaskRef", "open_tasks", "tasks_of"]

LARGEST_DIVISION = 10**10


class CurriculumTasks(DrawnTasks):
    """Draws from a curriculum, and regenerates any item of it.

    ReasoningGYM's item i under seed s depends only on s + i. Item n of a specialty is
    `create_dataset(subject, seed=0, size=1, **config)[n]`, independent of the process, its hash seed, its
    locale and its Decimal context. About one n in a thousand of basic_arithmetic (sapo-9) names no task: see
    `_neutral_ground`.
    """

    def __init__(self, curriculum: Curriculum, asked: Sequence[str] = ()) -> None:
        super().__init__(curriculum, asked)
        self._datasets: dict[str, Any] = {}

    def task(self, ref: TaskRef) -> Task | None:
        """Return the task that `ref` names, or None.

        Returns None for an unknown specialty, a number outside [0, 2**31), or a task that is too costly.
        """
        if not self.curriculum.names(ref.specialty, ref.n):
            return None
        dataset = self.dataset(ref.specialty)
        try:
            with _neutral_ground():
                entry = dataset[ref.n]
        except ArithmeticError:
            # The failure depends only on the generator and n, so every node fails here and no peer is blamed.
            return None
        return Task(ref, entry["question"], entry)

    def dataset(self, specialty: str) -> Any:
        """Return ReasoningGYM's data set object for this specialty. It includes the scorer."""
        if specialty not in self._datasets:
            self._datasets[specialty] = reasoning_gym.create_dataset(
                subject_of(specialty), seed=0, size=1, **self.curriculum.configs[specialty]
            )
        return self._datasets[specialty]

    def _draw(self, low: int, high: int, rng: random.Random, specialties: Sequence[str]) -> Task:
        specialty = rng.choice(specialties)
        while (task := self.task(TaskRef(specialty, rng.randrange(low, high)))) is None:
            pass
        return task


def open_tasks(
    curriculum: Curriculum, maker: object, asked: Sequence[str] = ()
) -> CurriculumTasks | OwnTasks:
    """Open the tasks of a curriculum.

    maker: generates the questions of own tasks; must be a `Verifier` for them. asked: specialties to draw
        from; all if empty.
    """
    if not isinstance(curriculum, OwnCurriculum):
        return CurriculumTasks(curriculum, asked)
    assert isinstance(maker, Verifier)
    return OwnTasks(curriculum, maker, asked)


@cache
def tasks_of(curriculum_name: str) -> CurriculumTasks:
    """Return the tasks of swarmd's curriculum with this name."""
    return CurriculumTasks(CURRICULA[curriculum_name])


_GENERATING = threading.Lock()
# Without this, a child forked while another thread generates would wait for the lock for ever.
os.register_at_fork(
    before=_GENERATING.acquire, after_in_parent=_GENERATING.release, after_in_child=_GENERATING.release
)
_divisors = basic_arithmetic.find_common_divisors


def _bounded_divisors(a: int, b: int) -> list[int]:
    """Find common divisors as ReasoningGYM does, but raise ArithmeticError if that takes over about 10 ms.

    Without the limit, a peer could name a task number that costs 78 s.
    """
    if math.gcd(a, b) > LARGEST_DIVISION:
        raise ArithmeticError("the generator would count up to this number's root, for minutes")
    return _divisors(a, b)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _neutral_ground() -> Iterator[None]:
    """Fix the process-wide state that generators read, and restore it afterwards.

    ReasoningGYM reads the locale (calendar_arithmetic: strftime), sets the Decimal precision
    (decimal_arithmetic), prints (bf) and may count for minutes (basic_arithmetic). All of these except the
    precision belong to the whole process, so a lock is held.
    """
    traps = [decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow]
    context = decimal.Context(prec=28, rounding=decimal.ROUND_HALF_EVEN, traps=traps)
    with _GENERATING, decimal.localcontext(context):
        language = locale.setlocale(locale.LC_TIME)
        if language != "C":
            locale.setlocale(locale.LC_TIME, "C")
        basic_arithmetic.find_common_divisors = _bounded_divisors
        # Replaces `print` in this module only: redirecting `sys.stdout` would swallow other threads' output.
        bf_optimizer.print = lambda *_, **__: None
        try:
            yield
        finally:
            basic_arithmetic.find_common_divisors = _divisors
            del bf_optimizer.print
            if language != "C":
                locale.setlocale(locale.LC_TIME, language)
