"""From a completion's text to an answer fit to be marked, or the reason why it is none. Pure, linear in the text, loads no ReasoningGYM.

Everything here runs before a byte of a stranger's text reaches a scorer: lengths first, then characters.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class GradeReason(Enum):
    """Why a completion got its reward. The value is what an operator reads."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no answer"  # no <answer>…</answer> in it
    TOO_LONG = "too long"  # the completion, or its answer
    UNSAFE = "unsafe characters"
    TIMEOUT = "timeout"  # marking it took too long; the process that did was killed
    CRASHED = "crashed"  # the process that marked it died
    SKIPPED = "skipped"  # two others of this rollout cost a process; the rest is not tried
    NO_TASK = "no such task"  # the reference names none in this curriculum


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one completion earned, and why."""

    reason: GradeReason

    @property
    def reward(self) -> float:
        """1.0 where the answer is right, else 0.0."""
        return 1.0 if self.reason is GradeReason.CORRECT else 0.0


LONGEST_COMPLETION = 131_072  # characters; the longest completion a node may be configured to sample is 32,768 tokens

# Characters. Behind each: the longest honest answer of some 4,000 items. Of a logic question whatever is entailed is an answer.
LONGEST_ANSWER: Mapping[str, int] = MappingProxyType(
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
_SAFE = re.compile(r"[\n\x20-\x7e∧∨¬→↔]*")  # printable ASCII, line feed, and the five connectives logic answers are written with


def extract(text: str) -> str | None:
    """What stands in the last <answer>…</answer>, without white space around it; None where there is no such pair.

    Equal to ReasoningGYM's `extract_answer` on every text: pairs are taken from the left, each opening tag with the next closing one, so an
    opening tag within an answer belongs to the answer. Its lazy regex takes super-quadratic time over unclosed tags; this is linear.
    """
    given = [answer for answer, _ in _pairs(text)]
    return given[-1] if given else None


def answer_end(text: str) -> int | None:
    """Where the answer that counts is first given: a text that stopped there would earn the same. None where there is none."""
    answer, first = None, dict[str, int]()
    for answer, end in _pairs(text):
        first.setdefault(answer, end)
    return None if answer is None else first[answer]


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    """What stands in each pair, without white space around it, and where the pair ends."""
    position = 0
    while (start := text.find(_OPEN, position)) >= 0 and (end := text.find(_CLOSE, start + len(_OPEN))) >= 0:
        position = end + len(_CLOSE)
        yield text[start + len(_OPEN) : end].strip(), position


def refusal(specialty: str, answer: str) -> GradeReason | None:
    """Why this answer may not be marked; None where it may. A specialty without a length limit is not one of ours: KeyError."""
    if len(answer) > LONGEST_ANSWER[specialty]:
        return GradeReason.TOO_LONG
    return None if _SAFE.fullmatch(answer) else GradeReason.UNSAFE


def read(specialty: str, text: str) -> str | GradeReason:
    """The answer a completion gives, fit to be marked, or why there is none.

    Whether the completion ended by itself does not matter: one that was cut after a complete <answer>…</answer> has answered.
    """
    if len(text) > LONGEST_COMPLETION:
        return GradeReason.TOO_LONG
    answer = extract(text)
    if answer is None:
        return GradeReason.NO_ANSWER
    return refusal(specialty, answer) or answer
