"""A file of questions and answers as a task plug-in.

The format is JSONL with one {"question": …, "answer": …, "specialty": …} per line (docs/own-tasks.md).
Repeated lines are left out and counted. A tenth of the questions, by a hash of their text, is held out.
Numeric answers are compared exactly, as fractions; all other answers are compared as text. Nothing is
rounded, evaluated or parsed beyond that, and the comparison is linear in the text.
"""

import codecs
import hashlib
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated

import msgspec

from swarmd.tasks.curriculum import HELD_OUT
from swarmd.tasks.sandbox.pipe import MAX_OWN_ANSWER_CHARACTERS, MAX_OWN_QUESTION_CHARACTERS
from swarmd.tasks.sandbox.worker import PluginRefused

HELD_OUT_SHARE = 0.1
SPECIALTY = "questions"  # the specialty of lines that name none
# Maximum number of mistakes that an error message lists.
_MAX_MISTAKES = 5

NAME = re.compile("[a-z0-9][a-z0-9_-]{0,63}")  # of a plug-in, and of a specialty without its level
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_OWN_QUESTION_CHARACTERS)]


class _Line(msgspec.Struct):
    """One line of the file. Unknown keys are ignored, since data sets have other columns."""

    question: _Text = ""
    problem: _Text = ""  # MATH-500's name for `question`
    prompt: _Text = ""  # another name for `question`
    answer: str | int | float | None = None
    final_answer: str | int | float | None = None  # another name for `answer`
    specialty: str = SPECIALTY


class QuestionFile:
    """A plug-in with the interface that `plugin.LoadedPlugin` describes."""

    limits = {"longest_question": MAX_OWN_QUESTION_CHARACTERS, "longest_answer": MAX_OWN_ANSWER_CHARACTERS}  # noqa: RUF012

    def __init__(self, content: bytes, same: Callable[[str, str], float] | None = None) -> None:
        """Parse a file of questions.

        Args:
            content: the file's bytes.
            same: scores a given answer against a right one, from 0 to 1; `same_answer` by default.

        Raises:
            PluginRefused: with the wrong lines.
        """
        self._same = same or same_answer
        lines: dict[str, list[tuple[float, str, str]]] = {}
        parsed, note = _parsed(content)
        self.notes = (note,) if note else ()
        for (specialty, question), answer in parsed.items():
            lines.setdefault(specialty, []).append((_place(question), question, answer))
        # The form and order of the lines do not change the digest, only the questions and answers do.
        self.canonical = msgspec.json.encode(sorted((*key, answer) for key, answer in parsed.items()))
        self.specialties = tuple(sorted(lines))
        self._training: dict[str, Sequence[tuple[str, str]]] = {}
        self._held_out: dict[str, Sequence[tuple[str, str]]] = {}
        for specialty in self.specialties:
            rows = sorted(lines[specialty])
            if len(rows) < 2:
                raise PluginRefused(
                    f"specialty {specialty} has 1 question and needs 2, since one of them is held out. Add"
                    " another, or give this question the specialty of other questions"
                )
            held = min(max(1, sum(place < HELD_OUT_SHARE for place, _, _ in rows)), len(rows) - 1)
            pairs = [(question, answer) for _, question, answer in rows]
            self._held_out[specialty], self._training[specialty] = pairs[:held], pairs[held:]

    def generate(self, specialty: str, seed: int) -> tuple[str, str]:
        rows = (self._held_out if seed >= HELD_OUT else self._training)[specialty]
        return rows[seed % len(rows)]

    def score(self, facts: str, answer: str) -> float:
        return float(self._same(facts, answer))

    def solution(self, facts: str) -> str:
        return facts


def left_out(reasons: Mapping[str, int], total: int, of: str) -> str:
    """Return a sentence that counts the dropped items of a file by reason; "" if none was dropped.

    of: the plural noun for the items, such as "lines".
    """
    why = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
    return why and f"{sum(reasons.values()):,} of {total:,} {of} left out: {why}"


def _parsed(content: bytes) -> tuple[Mapping[tuple[str, str], str], str]:
    """Parse the lines that are not blank.

    Returns the answers by specialty and question, and a sentence about repeated lines.
    """
    decode = msgspec.json.Decoder(_Line).decode
    good: dict[tuple[str, str], str] = {}
    bad: list[str] = []
    first: dict[tuple[str, str], int] = {}
    repeated = 0
    for number, text in enumerate(_utf8(content).splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = decode(text)
            question, answer = line.question or line.problem or line.prompt, _answer(line)
            if not question:
                raise msgspec.ValidationError("it has no `question`")
            if not 0 < len(answer) <= MAX_OWN_ANSWER_CHARACTERS:
                raise msgspec.ValidationError(
                    f"the answer has {len(answer):,} characters (limit: 1 to {MAX_OWN_ANSWER_CHARACTERS:,})"
                )
            if not NAME.fullmatch(line.specialty):
                raise msgspec.ValidationError(
                    f"specialty {line.specialty[:64]!r}: expected at most 64 lower-case letters, digits,"
                    " hyphens and underscores"
                )
            key = line.specialty, question
            if good.setdefault(key, answer) != answer:
                raise msgspec.ValidationError(f"the question of line {first[key]} again, with another answer")
            repeated += first.setdefault(key, number) != number
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            bad.append(f"line {number}: {error}")
    if bad:
        more = f"; and {len(bad) - _MAX_MISTAKES} lines more" if len(bad) > _MAX_MISTAKES else ""
        raise PluginRefused("; ".join(bad[:_MAX_MISTAKES]) + more)
    if not good:
        raise PluginRefused("it has no lines")
    return good, left_out({"repeated": repeated}, len(good) + repeated, "lines")


def _utf8(content: bytes) -> bytes:
    """Return the content as UTF-8 without byte order mark. Some Windows editors write UTF-16."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            return content.decode("utf-16").encode()
        except UnicodeDecodeError as error:
            raise PluginRefused(f"it is damaged UTF-16 text: {error}. Save it as UTF-8") from None
    return content.removeprefix(codecs.BOM_UTF8)


def _answer(line: _Line) -> str:
    """Return the answer of a line. Raises ValidationError if it has none."""
    given = line.final_answer if line.answer is None else line.answer
    if given is None:
        raise msgspec.ValidationError("it has no `answer`")
    return right_answer(given)


def right_answer(given: object) -> str:
    """Return the text after the last #### (as in GSM8K), without a LaTeX box that encloses all of it."""
    text = str(given).rpartition("####")[2].strip()
    inner = text.strip("$. ")
    if not inner.startswith(r"\boxed{") or not inner.endswith("}"):
        return text
    body, depth = inner[len(r"\boxed{") : -1], 0
    for character in body:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            # The box ends before the text does, so it does not enclose the whole text.
            return text
    return body.strip()


def _place(question: str) -> float:
    """Map a question to a number from 0 to 1 by its text.

    So a question stays on the same side of the held-out split when the file grows.
    """
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") / 2**64


_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?)"
_NUMBER = re.compile(rf"([-+]?{_DECIMAL})(?:[eE]([-+]?[0-9]{{1,3}}))?")
_RATIO = re.compile(
    rf"([-+]?)({_DECIMAL})\s*/\s*({_DECIMAL})|([-+]?)\\[dt]?frac\s*{{\s*({_DECIMAL})\s*}}\s*{{\s*({_DECIMAL})\s*}}"
)
_MIXED = re.compile(r"([-+]?)([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")


def same_answer(expected: str, given: str) -> bool:
    """Return whether both are the same number, or the same text up to case, spacing and a final full stop."""
    if (wanted := number(expected)) is not None:
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
