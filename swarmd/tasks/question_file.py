"""A file of questions and answers as a task plug-in.

It is JSONL, {"question": …, "answer": …, "specialty": …} a line (docs/own-tasks.md). A tenth of the
questions, by a hash of their text, is held out. An answer of a mathematical kind is compared exactly, as a
fraction, the rest as text: nothing is rounded, evaluated or parsed beyond that. The comparison is linear in
the text.
"""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Annotated

import msgspec

from swarmd.tasks.curriculum import HELD_OUT
from swarmd.tasks.sandbox.pipe import MAX_OWN_ANSWER_CHARACTERS, MAX_OWN_QUESTION_CHARACTERS
from swarmd.tasks.sandbox.worker import PluginRefused

HELD_OUT_SHARE = 0.1
SPECIALTY = "questions"  # the specialty of lines that name none
# Mistakes that are listed.
_MAX_MISTAKES = 5

_Name = Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9_-]{0,63}$")]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_OWN_QUESTION_CHARACTERS)]


class _Line(msgspec.Struct):
    """One line of the file. Other keys are ignored: data sets have columns of their own."""

    answer: str | int | float
    question: _Text = ""
    problem: _Text = ""  # the same, as MATH-500 has it
    specialty: _Name = SPECIALTY


class QuestionFile:
    """A plug-in, as `plugin.LoadedPlugin` has it."""

    limits = {"longest_question": MAX_OWN_QUESTION_CHARACTERS, "longest_answer": MAX_OWN_ANSWER_CHARACTERS}  # noqa: RUF012

    def __init__(self, content: bytes, same: Callable[[str, str], float] | None = None) -> None:
        """Parse a file of questions.

        same: whether, or how far, a given answer is a right one; by default `same_answer`. Raises
        PluginRefused with the lines that are wrong.
        """
        self._same = same or same_answer
        lines: dict[str, list[tuple[float, str, str]]] = {}
        for line in _parsed(content):
            row = _place(line.question), line.question, _answer(line)
            lines.setdefault(line.specialty, []).append(row)
        self.specialties = tuple(sorted(lines))
        self._training: dict[str, Sequence[tuple[str, str]]] = {}
        self._held_out: dict[str, Sequence[tuple[str, str]]] = {}
        for specialty in self.specialties:
            rows = sorted(lines[specialty])
            if len(rows) < 2:
                raise PluginRefused(
                    f"specialty {specialty} has 1 question; it needs 2, as one of each specialty is held out."
                    " Add another, or give it the specialty of others"
                )
            held = max(1, sum(place < HELD_OUT_SHARE for place, _, _ in rows))
            held = min(held, len(rows) - 1)
            pairs = [(question, answer) for _, question, answer in rows]
            self._held_out[specialty], self._training[specialty] = pairs[:held], pairs[held:]

    def generate(self, specialty: str, seed: int) -> tuple[str, str]:
        rows = (self._held_out if seed >= HELD_OUT else self._training)[specialty]
        return rows[seed % len(rows)]

    def score(self, facts: str, answer: str) -> float:
        return float(self._same(facts, answer))


def _parsed(content: bytes) -> Sequence[_Line]:
    """Parse the lines that are not blank."""
    decode = msgspec.json.Decoder(_Line).decode
    good: list[_Line] = []
    bad: list[str] = []
    seen: dict[tuple[str, str], int] = {}
    for number, text in enumerate(content.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = decode(text)
            line.question = line.question or line.problem
            if not line.question:
                raise msgspec.ValidationError("it has no `question`")
            if not 0 < len(_answer(line)) <= MAX_OWN_ANSWER_CHARACTERS:
                raise msgspec.ValidationError(
                    f"the answer has {len(_answer(line))} characters; it may have 1 to"
                    f" {MAX_OWN_ANSWER_CHARACTERS}"
                )
            if (first := seen.setdefault((line.specialty, line.question), number)) != number:
                raise msgspec.ValidationError(f"the question of line {first} again")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            bad.append(f"line {number}: {error}")
            continue
        good.append(line)
    if bad:
        more = f"; and {len(bad) - _MAX_MISTAKES} lines more" if len(bad) > _MAX_MISTAKES else ""
        raise PluginRefused("; ".join(bad[:_MAX_MISTAKES]) + more)
    if not good:
        raise PluginRefused("it has no lines")
    return good


def _answer(line: _Line) -> str:
    """Return the answer behind the last ####, as in GSM8K; without one, the whole text."""
    return str(line.answer).rpartition("####")[2].strip()


def _place(question: str) -> float:
    """Map a question to a place from 0 to 1 by its text.

    So it stays on its side of the held-out split when others are added to the file.
    """
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") / 2**64


_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?)"
_NUMBER = re.compile(rf"([-+]?{_DECIMAL})(?:[eE]([-+]?[0-9]{{1,3}}))?")
_RATIO = re.compile(
    rf"([-+]?)({_DECIMAL})\s*/\s*({_DECIMAL})|([-+]?)\\[dt]?frac\s*{{\s*({_DECIMAL})\s*}}\s*{{\s*({_DECIMAL})\s*}}"
)
_MIXED = re.compile(r"([-+]?)([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")


def same_answer(expected: str, given: str) -> bool:
    """Return whether both are the same number or text, but for case, spacing and a full stop at the end."""
    wanted = number(expected)
    if wanted is not None:
        return number(given) == wanted
    return _plain(given) == _plain(expected)


def number(text: str) -> Fraction | None:
    """Return the value of a number, fraction or mixed number; None for anything else."""
    text = text.replace("−", "-").strip().strip("$").strip()
    if found := _NUMBER.fullmatch(text):
        return Fraction(found[1].replace(",", "")) * Fraction(10) ** int(found[2] or 0)
    if found := _MIXED.fullmatch(text):
        sign, whole, top, bottom = found.groups()
    elif found := _RATIO.fullmatch(text):
        sign, top, bottom = (part or "" for part in (found.groups()[:3] if found[2] else found.groups()[3:]))
        whole = "0"
    else:
        return None
    divisor = Fraction(bottom.replace(",", ""))
    if not divisor:
        return None
    value = Fraction(whole) + Fraction(top.replace(",", "")) / divisor
    return -value if sign == "-" else value


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).casefold().split()).removesuffix(".").strip()
