"""The trial at the first start: a few questions, asked in each prompt style that the settings allow.

A model that never writes the required answer form earns no reward. Example turns or an opening often help
(`swarmd.policy.models.chat`). `tried` asks until a style works or the time is over; `chosen` selects the
style to train with, and `settled` stores it in the state folder.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from swarmd.config.config import NodeConfig
from swarmd.errors import NoModel
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.chat import Examples
from swarmd.policy.models.tiny import WEIGHTS as TINY
from swarmd.protocols import Reward
from swarmd.state.folder import write_atomically
from swarmd.tasks.curriculum import Curriculum, DrawnTasks
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import open_tasks
from swarmd.types import Generation

# Seconds for the trial of all styles together.
SECONDS: Final = 60.0
# Maximum number of questions per style, and minimum number before the trial may end because a style works.
QUESTIONS, LEAST_QUESTIONS = 9, 4
# Minimum tokens of an answer on a slow model: the required form with a short result takes about ten.
LEAST_TOKENS: Final = 16
FILE: Final = "prompts.json"


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """A prompt style: example turns before the question, and text with which each answer begins."""

    examples: Examples = ()
    opening: str = ""

    def __str__(self) -> str:
        parts = ("with examples" * bool(self.examples), f"opened by {self.opening}" * bool(self.opening))
        return ", ".join(filter(None, parts)) or "without examples"


@dataclass(slots=True)
class StyleFigures:
    """Figures of the answers in one prompt style."""

    groups: int = 0
    mixed: int = 0  # groups with right and wrong answers, which have a gradient
    answers: int = 0
    in_form: int = 0
    right: int = 0
    cut: int = 0
    tokens: int = 0

    @property
    def works(self) -> bool:
        """Whether the required form appears often enough to learn from.

        A group without such an answer teaches nothing, because all its rewards are 0. So a style works if it
        has at least one such answer per group on average.
        """
        return self.in_form >= self.groups > 0

    def add(
        self,
        asked: Generation,
        rewards: Sequence[float],
        in_form: Sequence[bool],
    ) -> None:
        self.groups += 1
        self.mixed += len({*rewards}) > 1
        self.answers += len(rewards)
        self.in_form += sum(in_form)
        self.right += sum(reward > 0 for reward in rewards)
        self.cut += sum(not c.ended for c in asked.completions)
        self.tokens += sum(map(len, asked.tokens.ids))


def styles_of(config: NodeConfig, curriculum: Curriculum) -> list[PromptStyle]:
    """Return the prompt styles that the settings allow, the plainest first.

    The models of this package were trained without examples, so "auto" means off for them.
    """
    model, tries = config.model, config.model.name not in TINY
    words: Mapping[str, Sequence[Examples]] = {
        "auto": [(), curriculum.examples if tries else ()],
        "off": [()],
        "on": [curriculum.examples],
    }
    tag = curriculum.tagged(curriculum.specialties[0], "").removesuffix("</answer>") if tries else ""
    openings = ["", tag] if model.opening == "auto" else [model.opening]
    shown = words[model.examples] if isinstance(model.examples, str) else [model.examples]
    return list(dict.fromkeys(PromptStyle(examples, opening) for opening in openings for examples in shown))


def tried(
    policy: LanguagePolicy,
    config: NodeConfig,
    tasks: DrawnTasks,
    reward: Reward,
    seed: int,
    clock: Callable[[], float] = time.monotonic,
    *,
    whole: bool = False,
) -> Mapping[PromptStyle, StyleFigures]:
    """Ask questions in the allowed styles, until one works or SECONDS are over.

    Each question is asked in one style after another, up to and including the first style that works so far.
    The trial uses separate random numbers, so training is the same as without it.

    Args:
        tasks: opened for the trial, so that they begin at the easiest level.
        clock: seconds.
        whole: ask all questions in all styles, while there is time.
    """
    asked = dict[PromptStyle, LanguagePolicy]()
    for style in styles_of(config, tasks.curriculum):
        with suppress(NoModel):
            asked[style] = policy.showing(style.examples, style.opening)
    found = dict[PromptStyle, StyleFigures]()
    questions = tasks.draw(QUESTIONS, random.Random(f"{seed} trial"))
    # Warm up: the first answer of a process takes far longer than later ones, which the plan is based on.
    next(iter(asked.values())).generate([questions[0].question], 1, [1], seed=seed)
    # In an environment, a call comes before the answer, and its reply counts too.
    least = LEAST_TOKENS if tasks.curriculum.turns == 1 else 3 * LEAST_TOKENS
    completions, end, took, most = config.round.completions, clock() + SECONDS, 0.0, least
    for number, task in enumerate(questions, 1):
        began = clock()
        for style, shown in asked.items():
            begun = clock()
            if took and begun + took > end:
                return found
            observe = tasks.observer([task.ref])
            (answers,) = shown.generate([task.question], completions, [most], observe=observe, seed=seed)
            item = task.ref, answers.completions
            (rewards,), (seen,) = reward([item]), tasks.play([item])
            in_form = tasks.curriculum.in_form(task.ref.specialty, answers.completions, rewards, seen)
            found.setdefault(style, StyleFigures()).add(answers, rewards, in_form)
            took = clock() - begun
            if found[style].works and not whole:
                break
        if number >= LEAST_QUESTIONS and not whole and any(seen.works for seen in found.values()):
            break
        # Allow as many tokens as the remaining time permits, if the next questions take as long per token as
        # this one.
        share = (end - clock()) / max(LEAST_QUESTIONS - number, 1) / 2
        most = max(least, int(most * share / max(clock() - began, 1e-6)))
    return found


def chosen(found: Mapping[PromptStyle, StyleFigures]) -> PromptStyle:
    """Return the first style that works; else the one with most right answers, then most in the form."""
    first = next((style for style, seen in found.items() if seen.works), None)
    return first or max(found, key=lambda style: (found[style].right, found[style].in_form))


def sentences(found: Mapping[PromptStyle, StyleFigures]) -> list[str]:
    """Describe the figures and the choice, and a remedy if no style works."""
    told = (f"{style} {x.in_form} of {x.answers}, {x.right} right" for style, x in found.items())
    groups = max(seen.groups for seen in found.values())
    slow = f" (a slow model: {groups} of {QUESTIONS} questions)" * (groups < LEAST_QUESTIONS)
    said = [f"answers in the asked form: {'; '.join(told)}{slow}: training {chosen(found)}"]
    if not any(seen.works for seen in found.values()):
        said.append(
            "this model writes the required form too rarely to learn, in every prompt style: choose another"
            " instruct model (`swarmd models`), or set model.examples to turns that show the form"
        )
    return said


@dataclass(frozen=True, slots=True)
class _Kept:
    model: str
    curriculum: str  # digest
    style: PromptStyle
    schema: int = 1


def settled(
    config: NodeConfig,
    curriculum: Curriculum,
    folder: Path,
    find: Callable[[], Mapping[PromptStyle, StyleFigures]],
) -> tuple[PromptStyle, list[str]]:
    """Return the prompt style that the settings fix, or that the state folder stores, or that a trial finds.

    It comes with notes for the operator. find: runs a trial. Raises CannotRecord.
    """
    styles, path = styles_of(config, curriculum), folder / FILE
    if len(styles) == 1:
        return styles[0], []
    # A damaged file is ignored, and the trial is repeated.
    with suppress(OSError, ValueError, RecursionError):
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
        if kept == _Kept(config.model.name, curriculum.digest, kept.style) and kept.style in styles:
            return kept.style, []
    found = find()
    style = chosen(found)
    if len(found) == 1 and not found[style].works:
        # There was no time for another style, so the next start tries again.
        return style, sentences(found)
    write_atomically(path, asdict(_Kept(config.model.name, curriculum.digest, style)))
    return style, sentences(found)


def examined(config: NodeConfig) -> Mapping[PromptStyle, StyleFigures]:
    """Open the configured model, and ask all questions in all styles, while there is time.

    Returns no figures for a model of this package, which has only one style.
    """
    model, curriculum = config.model, curriculum_of(config)
    examples = "auto" if isinstance(model.examples, str) else model.examples
    config = config.model_copy(
        update={"model": model.model_copy(update={"examples": examples, "opening": "auto"})}
    )
    if len(styles_of(config, curriculum)) == 1:
        return {}
    with Verifier(curriculum) as verifier, closing(LanguagePolicy.open(config, seed=0)) as policy:
        tasks = open_tasks(curriculum, verifier, config.tasks.specialties)
        return tried(policy, config, tasks, verifier, 0, whole=True)


def table(found: Mapping[PromptStyle, StyleFigures]) -> list[str]:
    """Format the figures as a table, one style a line."""
    rows = [("ASKED", "IN FORM", "RIGHT", "MIXED GROUPS", "TOKENS", "CUT")]
    for style, x in found.items():
        in_form, right, cut = (f"{100 * n / x.answers:.0f} %" for n in (x.in_form, x.right, x.cut))
        rows.append(
            (str(style), in_form, right, f"{x.mixed} of {x.groups}", f"{x.tokens / x.answers:.1f}", cut)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def by_style(found: Mapping[PromptStyle, StyleFigures]) -> list[dict[str, Any]]:
    """Return the figures as JSON data."""
    return [{**asdict(style), **asdict(seen), "works": seen.works} for style, seen in found.items()]
