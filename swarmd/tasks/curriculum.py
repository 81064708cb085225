"""Curricula: named sets of ReasoningGYM configurations, each with two digests.

Peers with equal `questions` digests share rollouts even if they score differently: each node computes its own
rewards (SAPO's rho^n; `own_reward`). The judge and its receipts use `digest`, which also covers the
curriculum's scoring. `scoring` covers the node's own reward as well.
"""

import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from swarmd.errors import ConfigError
from swarmd.tasks import answers
from swarmd.types import TURN, Completion, Observe, Scored, Task, TaskRef

# Tasks with n below TRAINING_TASKS are for training, from HELD_OUT on for evaluation.
TRAINING_TASKS = 900_000_000
HELD_OUT = 1_000_000_000
HELD_OUT_END = 2**31
# A text is held out if the first byte of its SHA-256 is below this number, of 256 possible values.
HELD_TEXTS = 16
# Version of the set of tasks (source.py).
TASKS_VERSION = 1
# Version of the scoring: scoring/ and reasoning-gym's scorers decide which answers are right.
SCORING_VERSION = 1
# Questions with right answers in the required form. None is held out: no generator words questions like this.
EXAMPLES = (
    ("Calculate 2.5 + 5.5.", "<answer>8</answer>"),
    (
        "Which weekday comes 2 days after Monday? Give the weekday name in full.",
        "<answer>Wednesday</answer>",
    ),
)
# CPU seconds that an own reward may take for one answer.
OWN_REWARD_S = 1.0


class OwnReward(NamedTuple):
    """A node's own scoring, which replaces its curriculum's (docs/own-tasks.md)."""

    file: str
    digest: str  # of the file's bytes


@dataclass(frozen=True)
class Curriculum:
    name: str
    # Specialty -> ReasoningGYM configuration. `arc_1d.2` is the data set arc_1d at level 2; only this module
    # splits the name of a specialty into its parts.
    configs: Mapping[str, Mapping[str, Any]]
    strict: bool = False  # refuses wrong answers that ReasoningGYM accepts (scoring/strict.py)
    # Specialties with enough texts to hold out some of them. No digest covers this field.
    held_by_text: frozenset[str] = frozenset()
    # Target for the offers per second of all nodes together. The default suits rounds of seconds or more. No
    # digest covers this field.
    offers_a_second: float = 0.2
    own_reward: OwnReward | None = None
    # Digest of a sample of the questions that `configs` generate (tests/swarmd/tasks/test_source.py).
    sample: str = ""
    # Shown to a model before each question if `model.examples = "on"`. No digest covers this field.
    examples: tuple[tuple[str, str], ...] = EXAMPLES

    # The scoring process is `python -m` with this module.
    module: ClassVar[str] = "swarmd.tasks.sandbox.verifier"

    @property
    def command(self) -> Sequence[str]:
        """The module of the scoring process, and its arguments."""
        return (self.module, self.name, *(self.own_reward or ()))

    @property
    def turns(self) -> int:
        """Maximum number of a model's texts in an answer; 1, except for environments (docs/own-tasks.md)."""
        return 1

    @property
    def patience(self) -> float:
        """Seconds by which the client's timeout grows with each answer."""
        return OWN_REWARD_S if self.own_reward else 0.0

    @property
    def specialties(self) -> tuple[str, ...]:
        return tuple(sorted(self.configs))

    def names(self, specialty: str, n: int) -> bool:
        """Return whether (specialty, n) is in range. This is the first check of a received reference."""
        return specialty in self.configs and type(n) is int and 0 <= n < HELD_OUT_END

    def trains_on(self, ref: TaskRef) -> bool:
        """Return whether this is a training task. Held-out tasks are for the judge only."""
        return ref.specialty in self.configs and 0 <= ref.n < TRAINING_TASKS

    def holds_out(self, task: Task) -> bool:
        """Return whether no node trains on this text, whatever its number is.

        One of sixteen texts is held out, by its SHA-256, in specialties that have enough texts.
        """
        return (
            task.ref.specialty in self.held_by_text
            and hashlib.sha256(task.question.encode()).digest()[0] < HELD_TEXTS
        )

    def asked(self, wanted: Sequence[str]) -> Sequence[str]:
        """Return the specialties that a node asks: the wanted ones, or all if `wanted` is empty.

        A subject's name selects all its levels. Raises ConfigError for a name that the curriculum lacks.
        """
        subjects = {subject_of(specialty): None for specialty in self.specialties}
        if unknown := sorted(set(wanted) - {*subjects, *self.specialties}):
            raise ConfigError(
                f"tasks.specialties: {', '.join(unknown)} is not in {self.name}. Choose from"
                f" {', '.join(subjects)}."
            )
        return tuple(s for s in self.specialties if not wanted or {s, subject_of(s)} & set(wanted))

    def read(self, specialty: str, text: str) -> str | answers.GradeReason:
        """Return the checked answer of a completion, or the reason why it cannot be scored."""
        return answers.read(subject_of(specialty), text)

    def in_form(
        self,
        specialty: str,
        completions: Sequence[Completion],
        rewards: Sequence[float],  # noqa: ARG002
        observations: Sequence[Sequence[str]] = (),  # noqa: ARG002
    ) -> Sequence[bool]:
        """Return which completions have the required form; an environment sees it in its replies."""
        return [self.read(specialty, c.text) is not answers.GradeReason.NO_ANSWER for c in completions]

    def tagged(self, specialty: str, text: str) -> str:
        """Return the text, with <answer> tags around it if they are required and missing."""
        missing = self.read(specialty, text) is answers.GradeReason.NO_ANSWER
        return f"<answer>{text}</answer>" if missing else text

    def completion(self, text: str, ended: bool) -> Completion:
        """Return a completion that was written as one text, with TURN between the texts of several turns."""
        *earlier, last = text.split(TURN) if self.turns > 1 else (text,)
        return Completion(last, ended, tuple(earlier))

    def answer_end(self, text: str) -> int | None:
        """Return the position at which the part of a completion that decides its reward ends.

        Returns None if the whole text decides it, or if there is no answer.
        """
        return answers.answer_end(text)

    @cached_property
    def questions(self) -> str:
        """16 hex digits of (configurations, TASKS_VERSION, the sample of the questions).

        This digest is part of the swarm's topic, so swarms with different digests never meet. Swarms with
        different versions of reasoning-gym meet if both versions generate the same questions.
        """
        configs = json.dumps({k: dict(v) for k, v in self.configs.items()}, sort_keys=True)
        return _sixteen(f"{configs} {TASKS_VERSION} {self.sample}")

    @cached_property
    def digest(self) -> str:
        """16 hex digits of (questions, SCORING_VERSION, strict). Covers the questions and the scoring."""
        return _sixteen(f"{self.questions} {SCORING_VERSION}{' strict' * self.strict}")

    @property
    def scoring(self) -> str:
        """The digest of this node's questions and scoring, its own reward included."""
        return _sixteen(f"{self.digest} {self.own_reward.digest}") if self.own_reward else self.digest

    def asks_as(self, digest: str) -> bool:
        """Return whether a curriculum with this digest asks the same questions, maybe scored otherwise."""
        return digest == self.digest or any(
            digest == of.digest and of.questions == self.questions for of in CURRICULA.values()
        )


def _sixteen(document: str) -> str:
    return hashlib.sha256(document.encode()).hexdigest()[:16]


def subject_of(specialty: str) -> str:
    """Return the subject of a specialty, which is the name of its ReasoningGYM data set."""
    return specialty.partition(".")[0]


def level_of(specialty: str) -> int:
    """Return the level of a specialty, counted from 1; 0 if its subject has no levels."""
    return int(specialty.partition(".")[2] or 0)


# SAPO section 4: nine specialties with ReasoningGYM's defaults. The one exception is the minimum of
# base_conversion: at its default of 0, the right answer can be empty.
_SAPO: Mapping[str, Mapping[str, Any]] = {
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

# The same nine subjects, so easy that a model of 860,000 parameters learns them in minutes.
_TINY: Mapping[str, Mapping[str, Any]] = {
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

# ladder-9: the levels of each subject. Level 1 is tiny-9's, or easier if a pretrained model of 135 million
# parameters answers nothing of tiny-9 right (docs/experiments.md). Level 4 is sapo-9's.
_LADDER: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "base_conversion": (
        # Most of these numbers have one digit, which is the same in both bases.
        {"min_base": 6, "max_base": 10, "min_value": 1, "max_value": 9},
        _TINY["base_conversion"],
        {"min_base": 2, "max_base": 10, "min_value": 1, "max_value": 127},
        _SAPO["base_conversion"],
        {"min_base": 2, "max_base": 36, "min_value": 1_000, "max_value": 10_000},
    ),
    "basic_arithmetic": (
        _TINY["basic_arithmetic"],
        {
            "min_terms": 2,
            "max_terms": 3,
            "max_digits": 2,
            "operators": ("+", "-"),
            "allow_parentheses": False,
            "allow_negation": False,
        },
        {"min_terms": 2, "max_terms": 4, "max_digits": 2, "operators": ("+", "-", "*")},
        _SAPO["basic_arithmetic"],
        {"min_terms": 5, "max_terms": 8, "min_digits": 3, "max_digits": 5},
    ),
    "arc_1d": (
        _TINY["arc_1d"],
        {"min_size": 8, "max_size": 10},
        {"min_size": 10, "max_size": 16},
        _SAPO["arc_1d"],
        {"min_size": 20, "max_size": 40, "num_train": 2},
    ),
    # The default difficulty is 1. Questions of difficulty 2 or 3 have 1,200 characters and take up to 0.6 s.
    "bf": (_TINY["bf"],),
    "propositional_logic": (
        # Each premise has an operator, so a premise that is no tautology is itself a right answer.
        {
            "min_vars": 2,
            "max_vars": 2,
            "min_statements": 2,
            "max_statements": 2,
            "min_complexity": 2,
            "max_complexity": 2,
        },
        _TINY["propositional_logic"],
        {"min_vars": 2, "max_vars": 4, "min_statements": 2, "max_statements": 3, "max_complexity": 3},
        _SAPO["propositional_logic"],
        {"min_vars": 4, "max_vars": 6, "min_statements": 4, "max_statements": 6, "min_complexity": 2},
    ),
    "fraction_simplification": (
        _TINY["fraction_simplification"],
        {"max_value": 30, "min_factor": 2, "max_factor": 10, "styles": ("plain",)},
        {"max_value": 100, "min_factor": 2, "max_factor": 20, "styles": ("plain", "latex_inline")},
        _SAPO["fraction_simplification"],
        {"min_value": 100, "max_value": 10_000, "min_factor": 10, "max_factor": 1_000},
    ),
    "decimal_arithmetic": (
        {"min_num_decimal_places": 0, "max_num_decimal_places": 0, "max_terms": 2, "precision": 4},
        _TINY["decimal_arithmetic"],
        {"min_num_decimal_places": 2, "max_num_decimal_places": 2, "max_terms": 4, "precision": 8},
        _SAPO["decimal_arithmetic"],
        {"min_num_decimal_places": 4, "max_num_decimal_places": 6, "min_terms": 5, "max_terms": 10},
    ),
    "calendar_arithmetic": (
        _TINY["calendar_arithmetic"],
        {"tasks": ("weekday_offset",), "offset_upper_bound": 14},
        {"tasks": ("weekday_offset", "weekday_of_date"), "offset_upper_bound": 30},
        _SAPO["calendar_arithmetic"],
        {"offset_upper_bound": 365, "leap_year_range": 2_000},
    ),
    "binary_matrix": (
        {"min_n": 2, "max_n": 3, "p_zero": 0.5},
        _TINY["binary_matrix"],
        {"min_n": 3, "max_n": 6},
        _SAPO["binary_matrix"],
        {"min_n": 8, "max_n": 10, "p_zero": 0.1},
    ),
}

SAPO_9 = Curriculum("sapo-9", _SAPO, held_by_text=frozenset(_SAPO), sample="cd6b686df54caa9c")
TINY_9 = Curriculum(
    "tiny-9",
    _TINY,
    sample="49d7931d4d3ffd7e",
    # The other specialties have a few hundred texts at most.
    held_by_text=frozenset(("arc_1d", "bf", "calendar_arithmetic", "decimal_arithmetic")),
    offers_a_second=20.0,  # rounds take a fraction of a second, on one machine or one local network
)
_LADDER_CONFIGS = {
    f"{subject}.{level}": config
    for subject, levels in _LADDER.items()
    for level, config in enumerate(levels, 1)
}
LADDER_9 = Curriculum(
    "ladder-9",
    _LADDER_CONFIGS,
    sample="d8e1a4769c40e683",
    # The specialties subtracted here have fewer than 2,000 texts.
    held_by_text=frozenset(_LADDER_CONFIGS)
    - {
        *(f"{subject}.1" for subject in _TINY if subject not in ("arc_1d", "bf", "calendar_arithmetic")),
        *(f"{subject}.2" for subject in ("base_conversion", "binary_matrix", "propositional_logic")),
    },
)

CURRICULA: Mapping[str, Curriculum] = {
    each.name: each
    for one in (LADDER_9, SAPO_9, TINY_9)
    for each in (one, replace(one, name=f"{one.name}-strict", strict=True))
}


class Staircase:
    """Chooses the level of each subject by the node's own success. Pure.

    A group whose answers are all right moves its subject up one level, and a group without a right answer
    moves it down one. A mixed group, the only kind that teaches something, leaves the level unchanged. So the
    level stays where most groups are mixed, without a constant to tune (docs/experiments.md has the measured
    effect). A group of a level other than the present one is ignored. So several groups of one round move a
    subject one level at most, and late groups from parallel generators do not move it.
    """

    def __init__(self, specialties: Iterable[str]) -> None:
        """Start each subject at the lowest of its levels in `specialties`."""
        self._steps: dict[str, list[str]] = {}
        for specialty in sorted(specialties, key=lambda name: (subject_of(name), level_of(name))):
            self._steps.setdefault(subject_of(specialty), []).append(specialty)
        self._now = {subject: steps[0] for subject, steps in self._steps.items()}

    @property
    def asked(self) -> Sequence[str]:
        """The specialty at the present level of each subject, sorted by subject."""
        return list(self._now.values())

    @property
    def levels(self) -> Mapping[str, int]:
        """The present level of each subject that has levels."""
        return {subject: level for subject, now in self._now.items() if (level := level_of(now))}

    def saw(self, local: Iterable[Scored]) -> None:
        """Move the levels by this node's own groups, in their order."""
        for scored in local:
            specialty, rewards = scored.ref.specialty, set(scored.rewards)
            if len(rewards) == 1 and specialty == self._now.get(subject := subject_of(specialty)):
                steps = self._steps[subject]
                at = steps.index(specialty) + (1 if rewards == {1.0} else -1)
                self._now[subject] = steps[min(max(at, 0), len(steps) - 1)]

    def restore(self, levels: Mapping[str, int]) -> None:
        """Continue from a checkpoint's levels. Ignores levels that this node does not ask."""
        for subject, level in levels.items():
            if (specialty := f"{subject}.{level}") in self._steps.get(subject, ()):
                self._now[subject] = specialty


class DrawnTasks(ABC):
    """Draws tasks of a curriculum, and regenerates the task that a reference names."""

    def __init__(self, curriculum: Curriculum, asked: Sequence[str] = ()) -> None:
        """Open a curriculum.

        asked: the specialties that `draw` chooses from; empty for all. A reference may name any task of the
            curriculum.

        Raises ConfigError for a specialty that the curriculum lacks.
        """
        self.curriculum, self._asked = curriculum, curriculum.asked(asked)
        self.staircase = Staircase(self._asked)

    def draw(self, count: int, rng: random.Random, *, all_levels: bool = False) -> Sequence[Task]:
        """Draw `count` training tasks, with subjects uniform and with replacement (SAPO section 5).

        Each task is of its subject's present level, or of any level if `all_levels` is set.
        """
        asked = self._asked if all_levels else self.staircase.asked
        return [self._unless_held_out(self._draw(0, TRAINING_TASKS, rng, asked)) for _ in range(count)]

    def trains_on(self, task: Task) -> bool:
        """Return whether a node may train on this task: neither its number nor its text is held out."""
        return self.curriculum.trains_on(task.ref) and not self.curriculum.holds_out(task)

    def _unless_held_out(self, task: Task) -> Task:
        """Return the task, or the next task by number whose text is not held out."""
        n = task.ref.n
        while self.curriculum.holds_out(task):
            n = (n + 1) % TRAINING_TASKS
            task = self.task(TaskRef(task.ref.specialty, n)) or task
        return task

    def play(
        self, items: Sequence[tuple[TaskRef, Sequence[Completion]]]
    ) -> Sequence[tuple[tuple[str, ...], ...]]:
        """Return an environment's replies to the texts of each completion; () if tasks have one turn."""
        return [()] * len(items)

    def observer(self, refs: Sequence[TaskRef]) -> Observe | None:  # noqa: ARG002
        """Return the function that replies to texts about these tasks; None if tasks have one turn."""
        return None

    @abstractmethod
    def task(self, ref: TaskRef) -> Task | None:
        """Return the task that this reference names, or None."""

    def draw_held_out(self, count: int, rng: random.Random) -> Sequence[Task]:
        """Draw tasks with numbers that no node trains on; their texts may recur in training.

        The judge draws its questions by held_out.py instead.
        """
        return [self._draw(HELD_OUT, HELD_OUT_END, rng, self.curriculum.specialties) for _ in range(count)]

    @abstractmethod
    def _draw(self, low: int, high: int, rng: random.Random, specialties: Sequence[str]) -> Task: ...
