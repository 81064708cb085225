"""Curricula: named sets of ReasoningGYM configurations, each with two digests.

Peers that ask the same questions (`questions`) meet and share, however each of them scores: rewards are a
node's own (SAPO's rho^n; `own_reward`). The judge and its receipts go by `digest`, which is of the
curriculum's scoring too; `scoring` is of the node's.
"""

import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from swarmd.errors import ConfigError
from swarmd.tasks import answers
from swarmd.types import Task, TaskRef

# n below this is for training, from HELD_OUT on for evaluation.
TRAINING_TASKS = 900_000_000
HELD_OUT = 1_000_000_000
HELD_OUT_END = 2**31
# So many of 256 texts are held out.
HELD_TEXTS = 16
# The version of which tasks exist (source.py).
TASKS_VERSION = 1
# The version of which answers are right (grading.py, strict.py, and reasoning-gym's scorers).
SCORING_VERSION = 1
# Questions with right answers in the asked form. None is held out: no generator words its questions so.
EXAMPLES = (
    ("Calculate 2.5 + 5.5.", "<answer>8</answer>"),
    (
        "Which weekday comes 2 days after Monday? Give the weekday name in full.",
        "<answer>Wednesday</answer>",
    ),
)
# CPU time of an own reward for an answer.
OWN_REWARD_S = 1.0


class OwnReward(NamedTuple):
    """A node's own scoring, in place of its curriculum's (docs/own-tasks.md)."""

    file: str
    digest: str  # of the file's bytes


@dataclass(frozen=True)
class Curriculum:
    name: str
    configs: Mapping[str, Mapping[str, Any]]  # specialty -> ReasoningGYM configuration
    strict: bool = False  # refuses wrong answers that ReasoningGYM accepts (strict.py)
    # Specialties with enough texts to hold some of them out. They are in no digest.
    held_by_text: frozenset[str] = frozenset()
    # Offers a second of all nodes together, for rounds of seconds or more. Not in the digest.
    offers_a_second: float = 0.2
    own_reward: OwnReward | None = None
    # Digest of a sample of the questions that `configs` make (tests/swarmd/tasks/test_source.py).
    sample: str = ""
    # What `model.examples = "on"` shows a model before each question. In no digest.
    examples: tuple[tuple[str, str], ...] = EXAMPLES

    # What runs the process that scores, behind `python -m`.
    module: ClassVar[str] = "swarmd.tasks.sandbox.verifier"

    @property
    def command(self) -> Sequence[str]:
        """The module of the process that scores, and its arguments."""
        return (self.module, self.name, *(self.own_reward or ()))

    @property
    def patience(self) -> float:
        """Seconds that each answer may take there beyond what any does."""
        return OWN_REWARD_S if self.own_reward else 0.0

    @property
    def specialties(self) -> tuple[str, ...]:
        return tuple(sorted(self.configs))

    def names(self, specialty: str, n: int) -> bool:
        """Return whether (specialty, n) is in range: the first check on a received reference."""
        return specialty in self.configs and type(n) is int and 0 <= n < HELD_OUT_END

    def trains_on(self, ref: TaskRef) -> bool:
        """Return whether this is a training task. Held-out tasks are for the judge only."""
        return ref.specialty in self.configs and 0 <= ref.n < TRAINING_TASKS

    def holds_out(self, task: Task) -> bool:
        """Return whether no node trains on this text, whatever its number.

        Held out is one text of sixteen, by its SHA-256, in specialties that have enough texts.
        """
        return (
            task.ref.specialty in self.held_by_text
            and hashlib.sha256(task.question.encode()).digest()[0] < HELD_TEXTS
        )

    def asked(self, wanted: Sequence[str]) -> Sequence[str]:
        """Return the specialties that a node asks itself: those wanted, or all if none are named.

        Raises ConfigError for one that the curriculum lacks.
        """
        if unknown := sorted(set(wanted) - set(self.specialties)):
            raise ConfigError(
                f"tasks.specialties: {', '.join(unknown)} is not in {self.name}, which has"
                f" {', '.join(self.specialties)}"
            )
        return tuple(sorted(set(wanted))) or self.specialties

    def read(self, specialty: str, text: str) -> str | answers.GradeReason:
        """Return the answer of a completion, checked, or why it cannot be scored."""
        return answers.read(specialty, text)

    def tagged(self, specialty: str, text: str) -> str:
        """Return the text with <answer> tags around it, if they are due and missing."""
        missing = self.read(specialty, text) is answers.GradeReason.NO_ANSWER
        return f"<answer>{text}</answer>" if missing else text

    def answer_end(self, text: str) -> int | None:
        """Return the end of the part of a completion that its reward is for.

        None: the reward is for the whole text, or there is no answer.
        """
        return answers.answer_end(text)

    @cached_property
    def questions(self) -> str:
        """16 hex digits of (configurations, TASKS_VERSION, the sample of the questions).

        They are part of the swarm's topic: swarms with other digits never meet. Versions of reasoning-gym
        that make the same questions do.
        """
        configs = json.dumps({k: dict(v) for k, v in self.configs.items()}, sort_keys=True)
        return _sixteen(f"{configs} {TASKS_VERSION} {self.sample}")

    @cached_property
    def digest(self) -> str:
        """16 hex digits of (questions, SCORING_VERSION, whether strict): what is asked, and what is right."""
        return _sixteen(f"{self.questions} {SCORING_VERSION}{' strict' * self.strict}")

    @property
    def scoring(self) -> str:
        """The digest of what this node asks and of how it scores, its own reward included."""
        return _sixteen(f"{self.digest} {self.own_reward.digest}") if self.own_reward else self.digest

    def asks_as(self, digest: str) -> bool:
        """Return whether a curriculum of this digest asks the same questions, however it scores."""
        return digest == self.digest or any(
            digest == of.digest and of.questions == self.questions for of in CURRICULA.values()
        )


def _sixteen(document: str) -> str:
    return hashlib.sha256(document.encode()).hexdigest()[:16]


def _freeze(configs: dict[str, dict[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    return MappingProxyType({name: MappingProxyType(config) for name, config in configs.items()})


# SAPO section 4: nine specialties at ReasoningGYM's defaults. base_conversion's default minimum of 0 has the
# empty answer.
SAPO_9 = Curriculum(
    "sapo-9",
    _freeze(
        {
            "base_conversion": {"min_value": 1},
            "basic_arithmetic": {},
            "arc_1d": {},
            "bf": {},
            "propositional_logic": {},
            "fraction_simplification": {},
            "decimal_arithmetic": {},
            "calendar_arithmetic": {},
            "binary_matrix": {},
        }
    ),
    held_by_text=frozenset(
        (
            "base_conversion",
            "basic_arithmetic",
            "arc_1d",
            "bf",
            "propositional_logic",
            "fraction_simplification",
            "decimal_arithmetic",
            "calendar_arithmetic",
            "binary_matrix",
        )
    ),
    sample="cd6b686df54caa9c",
)

# The same nine, easy enough for a model of 860 thousand parameters to learn in minutes.
TINY_9 = Curriculum(
    "tiny-9",
    _freeze(
        {
            "base_conversion": {"min_base": 2, "max_base": 4, "min_value": 1, "max_value": 15},
            "basic_arithmetic": {
                "min_terms": 2,
                "max_terms": 2,
                "min_digits": 1,
                "max_digits": 1,
                "operators": ("+", "-"),
                "allow_parentheses": False,
                "allow_negation": False,
            },
            "arc_1d": {"min_size": 8, "max_size": 8, "num_train": 2},
            "bf": {"difficulty": 1},
            "propositional_logic": {
                "min_vars": 2,
                "max_vars": 3,
                "min_statements": 2,
                "max_statements": 2,
                "min_complexity": 1,
                "max_complexity": 2,
            },
            "fraction_simplification": {
                "min_value": 1,
                "max_value": 9,
                "min_factor": 2,
                "max_factor": 4,
                "styles": ("plain",),
            },
            "decimal_arithmetic": {
                "min_num_decimal_places": 1,
                "max_num_decimal_places": 1,
                "min_terms": 2,
                "max_terms": 2,
                "precision": 4,
            },
            "calendar_arithmetic": {"tasks": ("weekday_offset",), "offset_upper_bound": 5},
            "binary_matrix": {"min_n": 3, "max_n": 3, "p_zero": 0.3},
        }
    ),
    sample="49d7931d4d3ffd7e",
    # Other specialties have a few hundred texts at most.
    held_by_text=frozenset(("arc_1d", "bf", "calendar_arithmetic", "decimal_arithmetic")),
    offers_a_second=20.0,  # rounds take a fraction of a second, on one machine or network
)

SAPO_9_STRICT = replace(SAPO_9, name="sapo-9-strict", strict=True)
TINY_9_STRICT = replace(TINY_9, name="tiny-9-strict", strict=True)

CURRICULA: Mapping[str, Curriculum] = {c.name: c for c in (SAPO_9, TINY_9, SAPO_9_STRICT, TINY_9_STRICT)}


class DrawnTasks(ABC):
    """Draws tasks of a curriculum, and makes those that a reference names."""

    def __init__(self, curriculum: Curriculum, asked: Sequence[str] = ()) -> None:
        """Open a curriculum.

        asked: the specialties that `draw` asks of; none for all. A reference may name any task of the
            curriculum.

        Raises ConfigError for a specialty that the curriculum lacks.
        """
        self.curriculum, self._asked = curriculum, curriculum.asked(asked)

    def draw(self, count: int, rng: random.Random) -> Sequence[Task]:
        """Draw `count` training tasks, specialty uniform with replacement (SAPO section 5)."""
        return [self._unless_held_out(self._draw(0, TRAINING_TASKS, rng, self._asked)) for _ in range(count)]

    def trains_on(self, task: Task) -> bool:
        """Return whether a node may train on it: neither its number nor its text is held out."""
        return self.curriculum.trains_on(task.ref) and not self.curriculum.holds_out(task)

    def _unless_held_out(self, task: Task) -> Task:
        """Return the task, or the next one by number whose text is not held out."""
        n = task.ref.n
        while self.curriculum.holds_out(task):
            n = (n + 1) % TRAINING_TASKS
            task = self.task(TaskRef(task.ref.specialty, n)) or task
        return task

    @abstractmethod
    def task(self, ref: TaskRef) -> Task | None:
        """Return the task that this reference names."""

    def draw_held_out(self, count: int, rng: random.Random) -> Sequence[Task]:
        """Draw tasks of numbers that no node trains on; their texts may recur in training.

        The judge's are drawn by held_out.py.
        """
        return [self._draw(HELD_OUT, HELD_OUT_END, rng, self.curriculum.specialties) for _ in range(count)]

    @abstractmethod
    def _draw(self, low: int, high: int, rng: random.Random, specialties: Sequence[str]) -> Task: ...
