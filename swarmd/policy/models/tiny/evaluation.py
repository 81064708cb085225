"""What a tiny model can do: pass@1, the share of mixed groups, and what guessing would earn."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from swarmd.policy.models.tiny.corpus import honest_answer
from swarmd.policy.models.tiny.tokenizer import ASSISTANT, USER
from swarmd.tasks.source import CurriculumTasks
from swarmd.types import Task, TaskRef

MAX_NEW_TOKENS = 16
RewardOf = Callable[[Task, str], float]  # (task, text of a completion) -> 0.0 or 1.0


@dataclass(frozen=True, slots=True)
class Skill:
    """Of one specialty, or the mean of several. All between 0 and 1."""

    pass_at_1: float  # sampled at temperature 1
    mixed: float  # groups of `completions` in which some are right and some wrong: those GRPO learns from
    greedy: float


@dataclass(frozen=True, slots=True)
class Chance:
    """What one earns who does not read the question."""

    constant: float  # always giving the one answer that is right most often
    random: float  # giving the honest answer to another question, drawn at random


def mean(skills: Mapping[str, Skill]) -> Skill:
    values = list(skills.values())
    return Skill(fmean(s.pass_at_1 for s in values), fmean(s.mixed for s in values), fmean(s.greedy for s in values))


def measure(
    model: Any, tokenizer: Any, source: CurriculumTasks, reward: RewardOf, numbers: Sequence[int], completions: int, seed: int
) -> dict[str, Skill]:
    """The model's skill on items `numbers` of every specialty, `completions` samples each."""
    torch.manual_seed(seed)
    skills = {}
    for specialty in source.curriculum.specialties:
        tasks = _tasks(source, specialty, numbers)
        sampled = _answers(model, tokenizer, tasks, completions)
        rewards = [[reward(t, text) for text in texts] for t, texts in zip(tasks, sampled, strict=True)]
        greedy = [reward(t, texts[0]) for t, texts in zip(tasks, _answers(model, tokenizer, tasks, 0), strict=True)]
        skills[specialty] = Skill(
            fmean(r for group in rewards for r in group), fmean(len(set(group)) > 1 for group in rewards), fmean(greedy)
        )
    return skills


def chance(source: CurriculumTasks, reward: RewardOf, numbers: Sequence[int], seed: int) -> dict[str, Chance]:
    """Guessing's reward on the same items, per specialty. Candidates are the 20 most frequent honest answers to 1,000 others."""
    rng = random.Random(f"{seed}/chance")
    levels = {}
    for specialty in source.curriculum.specialties:
        others = _tasks(source, specialty, [rng.randrange(900_000_000) for _ in range(1000)])
        answers = Counter(map(honest_answer, others))
        tasks = _tasks(source, specialty, numbers)
        constant = max(fmean(reward(t, f"<answer>{a}</answer>") for t in tasks) for a, _ in answers.most_common(20))
        drawn = rng.choices(list(answers), list(answers.values()), k=len(tasks) * 5)
        guesses = [reward(t, f"<answer>{a}</answer>") for t, a in zip(tasks * 5, drawn, strict=True)]
        levels[specialty] = Chance(constant, fmean(guesses))
    return levels


def _tasks(source: CurriculumTasks, specialty: str, numbers: Sequence[int]) -> list[Task]:
    tasks = [source.task(TaskRef(specialty, n)) for n in numbers]
    return [t for t in tasks if t is not None]


@torch.no_grad()
def _answers(model: Any, tokenizer: Any, tasks: Sequence[Task], completions: int) -> list[list[str]]:
    """`completions` samples at temperature 1 per task, or one greedy answer where `completions` is 0."""
    prompts = tokenizer([USER + t.question + ASSISTANT for t in tasks], add_special_tokens=False, padding=True, return_tensors="pt")
    how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if completions:
        how = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "num_return_sequences": completions}
    ids = model.generate(
        input_ids=prompts["input_ids"], attention_mask=prompts["attention_mask"], max_new_tokens=MAX_NEW_TOKENS, **how
    )[:, prompts["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    group = max(completions, 1)
    return [texts[start : start + group] for start in range(0, len(texts), group)]
