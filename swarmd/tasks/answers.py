"""Extracts the answer from a completion, and checks its length and characters.

Pure, linear in the text, loads no ReasoningGYM. All of this runs before any text of another peer reaches a
scorer.
"""

import math
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple


class GradeReason(Enum):
    """Why a completion got its reward. The value is what an operator reads."""

    CORRECT = "correct"
    PARTLY = "partly right"  # own tasks alone: a reward between 0 and 1
    WRONG = "wrong"
    NO_ANSWER = "no answer"  # there is no <answer>…</answer>
    TOO_LONG = "too long"  # the completion, or its answer
    UNSAFE = "unsafe characters"
    TIMEOUT = "timeout"  # scoring took too long; the scoring process was killed
    CRASHED = "crashed"  # the scoring process died
    SKIPPED = "skipped"  # two answers of this rollout killed a scoring process; the rest is not tried
    NO_TASK = "no such task"  # the curriculum has no such task
    FAULT = "fault of the task plug-in"  # the plug-in raised, or gave no number from 0 to 1


# An answer is right, and its reward 1, if the score reaches this.
PASS_SCORE = 0.999
# Rewards are multiples of 1/REWARD_STEPS: sums and comparisons agree on every machine.
REWARD_STEPS = 10_000


class ScoredAnswer(NamedTuple):
    """What a verifier gave a completion."""

    reason: GradeReason
    reward: float  # from 0 to 1

    @classmethod
    def of(cls, found: GradeReason | float) -> "ScoredAnswer":
        """Return the score of a scorer's number from 0 to 1, or of a reason without a number."""
        if isinstance(found, GradeReason):
            return cls(found, float(found is GradeReason.CORRECT))
        if found >= PASS_SCORE:
            return cls(GradeReason.CORRECT, 1.0)
        reward = round(found * REWARD_STEPS) / REWARD_STEPS
        return cls(GradeReason.PARTLY if reward else GradeReason.WRONG, reward)


def added(*rewards: float) -> float:
    """Add rewards, with no more digits than they have."""
    return round(math.fsum(rewards), 4)


def pass_at(k: int, answers: int, right: int) -> float:
    """Return the chance that at least one of k answers is right, drawn from these without replacement.

    This is the unbiased estimator of pass@k (arXiv 2107.03374, section 2.1). Needs k answers.
    """
    if not 1 <= k <= answers or not 0 <= right <= answers:
        raise ValueError(f"pass@{k} of {right} right ones of {answers}")
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


# The longest completion a node may be configured to sample is 32,768 tokens.
MAX_COMPLETION_CHARACTERS = 131_072

# Characters. The comments say how long the longest honest answer to about 4,000 tasks was. A logic task has
# many right answers.
MAX_ANSWER_CHARACTERS: Mapping[str, int] = MappingProxyType(
    {
        "base_conversion": 64,  # 10
        "basic_arithmetic": 64,  # 20
        "arc_1d": 128,  # 59
        "bf": 64,  # 5
        "propositional_logic": 256,  # 85: all premises joined
        "fraction_simplification": 128,  # 18
        "decimal_arithmetic": 64,  # 18
        "calendar_arithmetic": 64,  # 9
        "binary_matrix": 256,  # 199
    }
)

_OPEN, _CLOSE = "<answer>", "</answer>"
# Printable ASCII, line feed, and the five connectives logic answers are written with.
_SAFE = re.compile(r"[\n\x20-\x7e∧∨¬→↔]*")
# Unprintable to Python, and ordinary: any space, and the joiners of Persian, Hindi and emoji.
_HARMLESS = re.compile("[\\s\u200c\u200d]+")


def extract(text: str) -> str | None:
    """Return the text in the last <answer>…</answer>, stripped; None if there is no such pair.

    Equal to ReasoningGYM's `extract_answer` on every text: pairs are matched from the left, each opening tag
    with the next closing one, so an opening tag inside an answer is part of it. ReasoningGYM's lazy regex is
    worse than quadratic in unclosed tags; this is linear.
    """
    given = [answer for answer, _ in _pairs(text)]
    return given[-1] if given else None


def answer_end(text: str) -> int | None:
    """Return the end of the first place where the final answer is given: text cut there earns the same.

    Returns None without an answer.
    """
    answer, first = None, dict[str, int]()
    for answer, end in _pairs(text):
        first.setdefault(answer, end)
    return None if answer is None else first[answer]


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    """Yield the stripped text of each pair, and the position of the pair's end."""
    position = 0
    while (start := text.find(_OPEN, position)) >= 0 and (end := text.find(_CLOSE, start + len(_OPEN))) >= 0:
        position = end + len(_CLOSE)
        yield text[start + len(_OPEN) : end].strip(), position


def refusal(subject: str, answer: str) -> GradeReason | None:
    """Return why this answer may not be scored, or None if it may.

    Raises KeyError for a subject that is not ours.
    """
    if len(answer) > MAX_ANSWER_CHARACTERS[subject]:
        return GradeReason.TOO_LONG
    return None if _SAFE.fullmatch(answer) else GradeReason.UNSAFE


def read(subject: str, text: str) -> str | GradeReason:
    """Return the answer of a completion, checked, or why it cannot be scored.

    A completion that was cut off after a whole answer counts.
    """
    answer = _answer(text)
    return answer if isinstance(answer, GradeReason) else refusal(subject, answer) or answer


def read_own(text: str, longest: int, *, whole: bool = False) -> str | GradeReason:
    """Read an answer to a task of the operator's own curriculum, which may be in any language.

    longest: characters that an answer may have. whole: whether the text itself is the answer.
    """
    answer = text if whole else _answer(text)
    if isinstance(answer, str) and len(answer) > longest:
        return GradeReason.TOO_LONG
    # It holds control or format characters, or lone surrogates.
    if isinstance(answer, str) and not _HARMLESS.sub("", answer).isprintable():
        return GradeReason.UNSAFE
    return answer


def _answer(text: str) -> str | GradeReason:
    if len(text) > MAX_COMPLETION_CHARACTERS:
        return GradeReason.TOO_LONG
    answer = extract(text)
    return GradeReason.NO_ANSWER if answer is None else answer
