"""Use data sets of the Hugging Face hub as own tasks.

The node downloads one file of one commit. A contained process reads its rows as a file of questions
(question_file.py) and compares answers by math-verify, which knows LaTeX, sets, intervals and equations.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from swarmd.config.hub_access import fault_of
from swarmd.errors import ConfigError, command_for
from swarmd.tasks.question_file import left_out, right_answer
from swarmd.tasks.sandbox.pipe import MAX_OWN_ANSWER_CHARACTERS, MAX_OWN_QUESTION_CHARACTERS
from swarmd.tasks.sandbox.worker import PluginRefused

QUESTIONS, ANSWERS = ("question", "problem", "prompt"), ("answer", "final_answer")
INSTALL = f"is not installed: run `{command_for('math')}`"
_NUMBER = re.compile(r"[0-9]+|[0-9]*\.[0-9]+|[0-9]+\.")
# A word that is not the name of a LaTeX command. math-verify would read it as a product of its letters.
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
# Compared at the start, so that the contained process imports and compiles everything that it will need.
_WARM = (
    ("x+1", "1+x"), ("(1,2]", "[1,2)"), (r"\{1,2\}", "1,2"), (r"\sqrt{8}", "x=2"), ("x<1", r"10\%"),
    (r"\frac{1}{2}", r"\pi"), ("2^{10}", "abcde"), (r"\begin{pmatrix}1&2\end{pmatrix}", "x^2+y^2"),
)  # fmt: skip


def fetched(name: str) -> Path:
    """Return the file that `hf:OWNER/NAME@COMMIT/PATH` names, from the hub's cache if it is there.

    Raises ConfigError.
    """
    repo, _, rest = name.removeprefix("hf:").partition("@")
    commit, _, file = rest.partition("/")
    try:
        from huggingface_hub import constants, hf_hub_download

        # Downloads by Xet stall for ever on some connections (swarmd/policy/models/files/download.py).
        constants.HF_HUB_DISABLE_XET = True
        return Path(hf_hub_download(repo, file, repo_type="dataset", revision=commit))
    except Exception as error:  # the hub's libraries raise many kinds: replies, disk, environment
        otherwise = "see that the data set has this commit and file, or copy its cache here (HF_HOME)"
        raise ConfigError(str(fault_of(name, error, otherwise))) from None


def lines(parquet: bytes) -> tuple[bytes, str]:
    """Convert the rows of a Parquet file to the lines of a question file.

    Drops rows without text, rows over a limit, and repeated questions: the node's operator cannot fix them.

    Returns:
        the lines, and a sentence about the dropped rows.

    Raises:
        PluginRefused: if no row is left, or the file has no suitable columns.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise PluginRefused(f"it is a Parquet file, and pyarrow {INSTALL}") from None
    try:
        file = ParquetFile(pyarrow.BufferReader(parquet))
        asked, right = _column(file.schema_arrow, QUESTIONS), _column(file.schema_arrow, ANSWERS)
        rows = file.read([asked, right], use_threads=False).to_pylist()
    except pyarrow.ArrowException as error:
        raise PluginRefused(f"it is no Parquet file: {error}") from None
    kept: dict[str, str] = {}
    dropped = Counter[str]()
    for row in rows:
        question, answer = row[asked], _text(row[right])
        if why := _fault(question, answer):
            dropped[why] += 1
        elif question in kept:
            dropped["repeated"] += 1
        else:
            kept[question] = answer
    said = left_out(dropped, len(rows), "rows")
    if not kept:
        raise PluginRefused(said or "it has no rows")
    return b"\n".join(msgspec.json.encode({"question": q, "answer": a}) for q, a in kept.items()), said


def _column(schema: Any, names: Sequence[str]) -> str:
    """Return the first of these columns that holds text or numbers. Raises PluginRefused if there is none."""
    there = [name for name in names if name in schema.names]
    if plain := [name for name in there if _kind(schema.field(name).type) == ""]:
        return plain[0]
    if there:
        raise PluginRefused(
            f"its column {there[0]} holds {_kind(schema.field(there[0]).type)}, not text. Name a data set"
            f" whose {' or '.join(names)} is text"
        )
    raise PluginRefused(
        f"it has no {'questions' if names is QUESTIONS else 'answers'} (a column {' or '.join(names)}). Its"
        f" columns are {', '.join(schema.names)}. Name a data set with questions and answers"
    )


def _kind(column: Any) -> str:
    """Name the type of a column that holds neither text nor numbers; return "" for text and numbers."""
    from pyarrow import types

    if types.is_dictionary(column):
        return _kind(column.value_type)
    if types.is_list(column) or types.is_large_list(column) or types.is_fixed_size_list(column):
        messages = types.is_struct(column.value_type) and column.value_type.get_field_index("role") >= 0
        return "lists of messages" if messages else "lists"
    plain = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    numbers = (types.is_integer, types.is_floating, types.is_decimal)
    return "" if any(check(column) for check in (*plain, *numbers)) else str(column)


def _text(answer: Any) -> str:
    """Return an answer as text; "" for a missing one. pandas writes a missing number as NaN."""
    missing = answer is None or (isinstance(answer, float | Decimal) and not math.isfinite(answer))
    return "" if missing else right_answer(answer)


def _fault(question: Any, answer: str) -> str:
    """Return the reason for dropping a row; "" if the row is kept."""
    if not isinstance(question, str) or not question:
        return "without a question"
    if not answer:
        return "without an answer"
    if len(question) > MAX_OWN_QUESTION_CHARACTERS:
        return f"with a question of over {MAX_OWN_QUESTION_CHARACTERS:,} characters"
    over = len(answer) > MAX_OWN_ANSWER_CHARACTERS
    return f"with an answer of over {MAX_OWN_ANSWER_CHARACTERS:,} characters" if over else ""


def mathematics(usual: Callable[[str, str], bool]) -> Callable[[str, str], bool]:
    """Return a comparison of a right and a given answer: `usual` first, then math-verify's.

    sympy would evaluate strings as Python, so its `parse_expr` is replaced by a parser of numbers. Raises
    PluginRefused if math-verify is not installed.
    """
    try:
        from math_verify import LatexExtractionConfig, parse, verify
        from sympy.parsing import sympy_parser
    except ModuleNotFoundError:
        raise PluginRefused(f"its answers are compared by math-verify, which {INSTALL}") from None
    sympy_parser.parse_expr = _number
    only = [LatexExtractionConfig()]

    def same(expected: str, given: str) -> bool:
        if usual(expected, given) or _WORD.search(expected):
            return usual(expected, given)
        # math-verify's timeouts are off: the worker's limit on CPU time bounds this call.
        right, answer = (
            parse(f"${text.strip().strip('$')}$", extraction_config=only, parsing_timeout=None)
            for text in (expected, given)
        )
        return bool(verify(right, answer, timeout_seconds=None))

    for pair in _WARM:
        same(*pair)
    return same


def _number(text: str, *_: object, **__: object) -> Any:
    """Parse a number. Replaces sympy's `parse_expr`, which evaluates its text as Python."""
    import sympy

    if not _NUMBER.fullmatch(text.strip()):
        raise ValueError("no number")
    return sympy.Integer(text) if text.strip().isdecimal() else sympy.Float(text)
