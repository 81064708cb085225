"""Extract the answer from a completion and check its length and characters.

This module is pure, takes time linear in the text, and does not load ReasoningGYM. Text from another peer
passes all of these checks before a scorer sees it.
"""

import math
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Annotated, NamedTuple

import msgspec


class GradeReason(Enum):
    """The reason for a completion's reward. Operators read the value."""

    CORRECT = "correct"
    PARTLY = "partly right"  # a reward between 0 and 1; only own tasks give it
    WRONG = "wrong"
    NO_ANSWER = "no answer"  # the completion has no <answer>…</answer>
    TOO_LONG = "too long"  # the completion or its answer is too long
    UNSAFE = "unsafe characters"
    TIMEOUT = "timeout"  # scoring took too long; the scoring process was killed
    CRASHED = "crashed"  # the scoring process died twice
    SKIPPED = "skipped"  # this rollout's answers already killed two workers, so this answer was not scored
    NO_TASK = "no such task"  # the curriculum has no such task
    FAULT = "fault of the task plug-in"  # the plug-in raised, or did not return a number from 0 to 1


# An answer is right, with reward 1, if its score is at least this.
PASS_SCORE = 0.999
# Rewards are multiples of 1/REWARD_STEPS, so that sums and comparisons agree on every machine.
REWARD_STEPS = 10_000


class ScoredAnswer(NamedTuple):
    """A verifier's result for one completion."""

    reason: GradeReason
    reward: Annotated[float, msgspec.Meta(ge=0, le=1)]
    # An environment's replies to the completion's texts; the last text has none if it ended the episode.
    observations: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: GradeReason | float) -> "ScoredAnswer":
        """Convert a scorer's result: a number from 0 to 1, or a reason without a number."""
        if isinstance(found, GradeReason):
            return cls(found, float(found is GradeReason.CORRECT))
        if found >= PASS_SCORE:
            return cls(GradeReason.CORRECT, 1.0)
        reward = round(found * REWARD_STEPS) / REWARD_STEPS
        return cls(GradeReason.PARTLY if reward else GradeReason.WRONG, reward)


def added(*rewards: float) -> float:
    """Add rewards, rounded to the four decimals that a reward has."""
    return round(math.fsum(rewards), 4)


def pass_at(k: int, answers: int, right: int) -> float:
    """Return the chance that at least one of k answers, drawn without replacement, is right.

    `right` of the `answers` are right. This is the unbiased estimator of pass@k (arXiv 2107.03374, section
    2.1). Raises ValueError if there are fewer than k answers.
    """
    if not 1 <= k <= answers or not 0 <= right <= answers:
        raise ValueError(f"pass@{k} of {right} right ones of {answers}")
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


# A node can be configured to sample at most 32,768 tokens per completion.
MAX_COMPLETION_CHARACTERS = 131_072

# Limits in characters. The comment on each line gives the longest honest answer to about 4,000 tasks. A logic
# task has many right answers.
MAX_ANSWER_CHARACTERS: Mapping[str, int] = MappingProxyType(
    {
        "base_conversion": 64,  # 10
        "basic_arithmetic": 64,  # 20
        "arc_1d": 128,  # 59
        "bf": 64,  # 5
        "propositional_logic": 256,  # 85: the conjunction of all premises
        "fraction_simplification": 128,  # 18
        "decimal_arithmetic": 64,  # 18
        "calendar_arithmetic": 64,  # 9
        "binary_matrix": 256,  # 199
    }
)

_OPEN, _CLOSE = "<answer>", "</answer>"
# Printable ASCII, line feed, and the five connectives of logic answers.
_SAFE = re.compile(r"[\n\x20-\x7e∧∨¬→↔]*")
# Python calls these characters unprintable, but texts use them: spaces, and joiners (Persian, Hindi, emoji).
_HARMLESS = re.compile("[\\s\u200c\u200d]+")


def extract(text: str) -> str | None:
    """Return the text in the last <answer>…</answer>, stripped; None if there is no such pair.

    Returns the same as ReasoningGYM's `extract_answer` for every text: tags are paired from the left, each
    opening tag with the next closing tag, so an opening tag inside an answer is part of the answer.
    ReasoningGYM's lazy regex takes worse than quadratic time on unclosed tags; this function is linear.
    """
    given = [answer for answer, _ in _pairs(text)]
    return given[-1] if given else None


def answer_end(text: str) -> int | None:
    """Return the position after which the completion can be cut without changing its reward.

    The position is the end of the first pair of tags that holds the final answer. Returns None if the text
    has no answer.
    """
    answer, first = None, dict[str, int]()
    for answer, end in _pairs(text):
        first.setdefault(answer, end)
    return None if answer is None else first[answer]


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    """Yield the stripped text of each pair of tags, and the position where the pair ends."""
    position = 0
    while (start := text.find(_OPEN, position)) >= 0 and (end := text.find(_CLOSE, start + len(_OPEN))) >= 0:
        position = end + len(_CLOSE)
        yield text[start + len(_OPEN) : end].strip(), position


def refusal(subject: str, answer: str) -> GradeReason | None:
    """Return the reason why this answer may not be scored, or None if it may be scored.

    Raises KeyError for a subject of no swarmd curriculum.
    """
    if len(answer) > MAX_ANSWER_CHARACTERS[subject]:
        return GradeReason.TOO_LONG
    return None if _SAFE.fullmatch(answer) else GradeReason.UNSAFE


def read(subject: str, text: str) -> str | GradeReason:
    """Return the checked answer of a completion, or the reason why it cannot be scored.

    The answer of a truncated completion counts if its closing tag is there.
    """
    answer = _answer(text)
    return answer if isinstance(answer, GradeReason) else refusal(subject, answer) or answer


def read_own(text: str, longest: int, *, whole: bool = False) -> str | GradeReason:
    """Read an answer to a task of an own curriculum, in any language.

    Args:
        text: the completion.
        longest: the most characters that an answer may have.
        whole: whether the whole completion is the answer.
    """
    answer = text if whole else _answer(text)
    if isinstance(answer, str) and len(answer) > longest:
        return GradeReason.TOO_LONG
    # The answer holds control characters, format characters or lone surrogates.
    if isinstance(answer, str) and not _HARMLESS.sub("", answer).isprintable():
        return GradeReason.UNSAFE
    return answer


def _answer(text: str) -> str | GradeReason:
    if len(text) > MAX_COMPLETION_CHARACTERS:
        return GradeReason.TOO_LONG
    answer = extract(text)
    return GradeReason.NO_ANSWER if answer is None else answer
