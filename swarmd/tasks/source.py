"""Task references to tasks, identically everywhere; and drawing new ones."""

import contextlib
import io
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import reasoning_gym

from swarmd.tasks.curriculum import HELD_OUT, HELD_OUT_END, TRAINING_TASKS, Curriculum
from swarmd.types import Task, TaskRef


class CurriculumTasks:
    """Draws from a curriculum, and regenerates any item of it. ReasoningGYM's item i of seed s depends on s + i alone."""

    def __init__(self, curriculum: Curriculum) -> None:
        self.curriculum = curriculum
        self._datasets: dict[str, Any] = {}

    def draw(self, count: int, rng: random.Random) -> Sequence[Task]:
        """`count` training tasks, specialty uniform with replacement (SAPO section 5)."""
        return [self._regenerate(TaskRef(rng.choice(self.curriculum.specialties), rng.randrange(TRAINING_TASKS))) for _ in range(count)]

    def draw_held_out(self, count: int, rng: random.Random) -> Sequence[Task]:
        """Tasks that no node trains on: what the judge asks."""
        specialties = self.curriculum.specialties
        return [self._regenerate(TaskRef(rng.choice(specialties), rng.randrange(HELD_OUT, HELD_OUT_END))) for _ in range(count)]

    def task(self, ref: TaskRef) -> Task | None:
        """The task, or None where the reference names none: an unknown specialty, or n outside [0, 2**31)."""
        if ref.specialty not in self.curriculum.configs or not 0 <= ref.n < HELD_OUT_END:
            return None
        return self._regenerate(ref)

    def dataset(self, specialty: str) -> Any:
        """ReasoningGYM's own data set object for this specialty, with its scorer."""
        if specialty not in self._datasets:
            config = {k: tuple(v) if k == "operators" else v for k, v in self.curriculum.configs[specialty].items()}
            self._datasets[specialty] = reasoning_gym.create_dataset(specialty, seed=0, size=1, **config)
        return self._datasets[specialty]

    def _regenerate(self, ref: TaskRef) -> Task:
        with contextlib.redirect_stdout(io.StringIO()):  # bf's generator prints while it runs its program
            entry = self.dataset(ref.specialty)[ref.n]
        return Task(ref, entry["question"], entry)


@lru_cache(maxsize=4)
def tasks_of(curriculum_name: str) -> CurriculumTasks:
    from swarmd.tasks.curriculum import curriculum

    return CurriculumTasks(curriculum(curriculum_name))
