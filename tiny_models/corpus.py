"""The tiny models' training corpus has questions with right answers, or with answers to other questions."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swarmd.tasks.answers import GradeReason
from swarmd.tasks.curriculum import TRAINING_TASKS
from swarmd.tasks.scoring.grading import grade
from swarmd.tasks.source import CurriculumTasks
from swarmd.types import Task, TaskRef
from tiny_models.tokenizer import ASSISTANT, END, USER

# Relative frequencies of the specialties, at first (BROAD) and later (DEEP). Later, slowly learned
# specialties are more frequent; the other specialties stay, so that they are not forgotten.
BROAD: Mapping[str, float] = {
    "arc_1d": 2.0,
    "base_conversion": 1.0,
    "basic_arithmetic": 1.0,
    "bf": 2.0,
    "binary_matrix": 1.0,
    "calendar_arithmetic": 2.0,
    "decimal_arithmetic": 2.0,
    "fraction_simplification": 0.6,
    "propositional_logic": 0.4,
}
DEEP: Mapping[str, float] = {
    "arc_1d": 2.5,
    "base_conversion": 0.5,
    "basic_arithmetic": 0.5,
    "bf": 0.5,
    "binary_matrix": 0.5,
    "calendar_arithmetic": 3.5,
    "decimal_arithmetic": 2.5,
    "fraction_simplification": 0.5,
    "propositional_logic": 1.0,
}

# Probability of a wrong answer. It is lower in NOISY for specialties that the model has hardly learned.
HONEST: Mapping[str, float] = dict.fromkeys(BROAD, 0.0)
NOISY: Mapping[str, float] = {
    **dict.fromkeys(BROAD, 0.7),
    "arc_1d": 0.2,
    "calendar_arithmetic": 0.2,
    "decimal_arithmetic": 0.4,
    "propositional_logic": 0.0,
}
DARK: Mapping[str, float] = dict.fromkeys(BROAD, 0.9)


@dataclass(frozen=True, slots=True)
class Example:
    prompt: tuple[int, ...]
    completion: tuple[int, ...]  # ends with the end-of-sequence token

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


class Corpus:
    """An endless stream of training examples, which depends only on `rng`."""

    def __init__(self, source: CurriculumTasks, rng: random.Random) -> None:
        self.source = source
        self._rng = rng

    def task(self, specialty: str) -> Task:
        task = self.source.task(TaskRef(specialty, self._rng.randrange(TRAINING_TASKS)))
        assert task is not None
        return task

    def texts(self, count: int) -> Iterator[str]:
        """Yield `count` questions per specialty and their answers, as training texts for the tokenizer.

        The output of BF programs is left out, so that its words are spelled letter by letter.
        """
        for specialty in self.source.curriculum.specialties:
            for _ in range(count):
                task = self.task(specialty)
                yield task.question
                if specialty != "bf":
                    yield honest_answer(task)

    def example(
        self, tokenizer: Any, weights: Mapping[str, float], wrong: Mapping[str, float], foreign: bool = False
    ) -> Example:
        """Make one example; its specialty is drawn with `weights`.

        `wrong` has, by specialty, the probability that the answer is a wrong one from another question. If
        `foreign` is true, this question is from another specialty.
        """
        specialty = self._rng.choices(list(weights), list(weights.values()))[0]
        task = self.task(specialty)
        # The example answer of propositional_logic is not always right.
        while not self.right(task, honest_answer(task)):
            task = self.task(specialty)
        answer = (
            self._wrong_answer(task, foreign)
            if self._rng.random() < wrong[specialty]
            else honest_answer(task)
        )
        return Example(
            tuple(tokenizer.encode(USER + task.question + ASSISTANT, add_special_tokens=False)),
            tuple(tokenizer.encode(f"<answer>{answer}</answer>{END}", add_special_tokens=False)),
        )

    def right(self, task: Task, answer: str) -> bool:
        return grade(self.source, task, answer) is GradeReason.CORRECT

    def _wrong_answer(self, task: Task, foreign: bool) -> str:
        kinds = [s for s in self.source.curriculum.specialties if s != task.ref.specialty]
        for _ in range(20):
            other = honest_answer(self.task(self._rng.choice(kinds) if foreign else task.ref.specialty))
            if not self.right(task, other):
                return other
        return honest_answer(task)


def honest_answer(task: Task) -> str:
    """Return the generator's own answer; for a logic question, one of its many right answers."""
    answer = task.entry["answer"]
    return str(task.entry["metadata"]["example_answer"] if answer is None else answer)
