"""Measures a tiny model's skill: pass@1, the share of mixed groups, and the reward of guessing."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from swarmd.policy.inference.decode import Sampling, decode
from swarmd.policy.models.chat import Chat
from swarmd.tasks.answers import GradeReason
from swarmd.tasks.curriculum import TRAINING_TASKS
from swarmd.tasks.scoring.grading import grade, solution
from swarmd.tasks.source import CurriculumTasks
from swarmd.types import Task, TaskRef

MAX_NEW_TOKENS = 16
_CACHE_TOKENS = 50_000  # tokens in the cache of keys and values at a time: 100 MB in float32


@dataclass(frozen=True, slots=True)
class Skill:
    """Measured skill in one specialty, or the mean of several. All values are between 0 and 1."""

    pass_at_1: float  # sampled at temperature 1
    mixed: float  # share of groups with right and wrong answers, from which GRPO can learn
    greedy: float


@dataclass(frozen=True, slots=True)
class Chance:
    """The reward of answers that ignore the question."""

    constant: float  # of the answer that is right most often
    random: float  # of the right answer to another question, drawn at random


def mean(skills: Mapping[str, Skill]) -> Skill:
    values = list(skills.values())
    return Skill(
        fmean(s.pass_at_1 for s in values), fmean(s.mixed for s in values), fmean(s.greedy for s in values)
    )


def measure(
    model: Any, tokenizer: Any, source: CurriculumTasks, numbers: Sequence[int], completions: int, seed: int
) -> dict[str, Skill]:
    """Return the model's skill on the items `numbers` of each specialty, with `completions` samples each."""
    chat = Chat(tokenizer, system_prompt="")
    sampled = Sampling(MAX_NEW_TOKENS, model.config.max_position_embeddings, chat.ends, temperature=1.0)
    generator = torch.Generator().manual_seed(seed)

    def rewards(tasks: Sequence[Task], copies: int, sampling: Sampling) -> list[list[float]]:
        groups = decode(
            model, [chat.prompt(t.question) for t in tasks], copies, sampling, generator, _CACHE_TOKENS
        )
        return [
            [_reward(source, t, chat.read(s.ids, s.ended).text) for s in g]
            for t, g in zip(tasks, groups, strict=True)
        ]

    skills = {}
    for specialty in source.curriculum.specialties:
        tasks = _tasks(source, specialty, numbers)
        groups = rewards(tasks, completions, sampled)
        greedy = rewards(tasks, 1, replace(sampled, temperature=0.0))
        skills[specialty] = Skill(
            fmean(r for group in groups for r in group),
            fmean(len(set(group)) > 1 for group in groups),
            fmean(r for group in greedy for r in group),
        )
    return skills


def chance(source: CurriculumTasks, numbers: Sequence[int], seed: int) -> dict[str, Chance]:
    """Return the reward of guessing on the items `numbers`, per specialty.

    The guesses are right answers to 1,000 items of the training range.
    """
    rng = random.Random(f"{seed}/chance")
    levels = {}
    for specialty in source.curriculum.specialties:
        others = _tasks(source, specialty, [rng.randrange(TRAINING_TASKS) for _ in range(1000)])
        answers = Counter(solution(source, t) for t in others)
        tasks = _tasks(source, specialty, numbers)
        frequent = [answer for answer, _ in answers.most_common(20)]
        best = max(frequent, key=lambda answer: _earned(source, others[:300], answer))
        drawn = rng.choices(list(answers), list(answers.values()), k=len(tasks) * 5)
        guesses = [_reward(source, t, f"<answer>{a}</answer>") for t, a in zip(tasks * 5, drawn, strict=True)]
        levels[specialty] = Chance(_earned(source, tasks, best), fmean(guesses))
    return levels


def _tasks(source: CurriculumTasks, specialty: str, numbers: Sequence[int]) -> list[Task]:
    tasks = [source.task(TaskRef(specialty, n)) for n in numbers]
    return [t for t in tasks if t is not None]


def _earned(source: CurriculumTasks, tasks: Sequence[Task], answer: str) -> float:
    return fmean(_reward(source, t, f"<answer>{answer}</answer>") for t in tasks)


def grade_text(tasks: CurriculumTasks, task: Task, text: str) -> GradeReason:
    """Grade a complete text in this process, without the contained verifier."""
    answer = tasks.curriculum.read(task.ref.specialty, text)
    return grade(tasks, task, answer) if isinstance(answer, str) else answer


def _reward(source: CurriculumTasks, task: Task, text: str) -> float:
    return float(grade_text(source, task, text) is GradeReason.CORRECT)
