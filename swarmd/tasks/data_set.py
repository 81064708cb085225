"""Data sets of the hub as own tasks: the file of one commit, its rows, and answers compared as mathematics.

The node fetches the file. A contained process reads it as a file of questions (question_file.py), and
compares answers by math-verify, which knows LaTeX, sets, intervals and equations.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from swarmd.errors import ConfigError, command_for
from swarmd.tasks.sandbox.pipe import MAX_OWN_ANSWER_CHARACTERS, MAX_OWN_QUESTION_CHARACTERS
from swarmd.tasks.sandbox.worker import PluginRefused

QUESTIONS, ANSWERS = ("question", "problem", "prompt"), ("answer", "final_answer")
INSTALL = f"is not installed: run `{command_for('math')}`"
_NUMBER = re.compile(r"[0-9]+|[0-9]*\.[0-9]+|[0-9]+\.")
# A word, but for the name of a LaTeX command: math-verify takes it for a product of its letters.
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
# What is compared at the start, so that a contained process has nothing left to import or compile.
_WARM = [("x+1", "1+x"), ("(1,2]", "[1,2)"), (r"\{1,2\}", "1,2"), (r"\sqrt{8}", "x=2"), ("x<1", r"10\%")]
_WARM += [(r"\frac{1}{2}", r"\pi"), ("2^{10}", "abcde"), (r"\begin{pmatrix}1&2\end{pmatrix}", "x^2+y^2")]


def fetched(name: str) -> Path:
    """Return the file that `hf:OWNER/NAME@COMMIT/PATH` names, from the hub's cache where it is there.

    Raises ConfigError.
    """
    from httpx2 import HTTPError
    from huggingface_hub import constants, hf_hub_download

    # It stalls for ever on some connections (swarmd/policy/models/download.py).
    constants.HF_HUB_DISABLE_XET = True
    repo, _, rest = name.removeprefix("hf:").partition("@")
    commit, _, file = rest.partition("/")
    try:
        return Path(hf_hub_download(repo, file, repo_type="dataset", revision=commit))
    except (OSError, ValueError, HTTPError) as error:
        # Of the hub's errors each is one of the first two; a download that is cut off is the last.
        raise ConfigError(
            f"{name}: {' '.join(str(error).split())[:300].rstrip('.')}. See that the data set has this commit"
            " and file, and that the hub can be reached, or copy its cache here (HF_HOME)."
        ) from None


def lines(parquet: bytes) -> bytes:
    """Return the rows of a Parquet file as lines of a question file.

    Rows without text, or over a limit, and repeated questions are left out: nobody can mend them. Raises
    PluginRefused where there are no answers.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise PluginRefused(f"it is a Parquet file, and pyarrow {INSTALL}") from None
    try:
        file = ParquetFile(pyarrow.BufferReader(parquet))
        columns = file.schema_arrow.names
        asked, right = (next((c for c in names if c in columns), None) for names in (QUESTIONS, ANSWERS))
        if asked is None or right is None:
            raise PluginRefused(
                f"it has no {'questions' if asked is None else 'answers'} (a column"
                f" {' or '.join(QUESTIONS if asked is None else ANSWERS)}), but {', '.join(columns)}. Name a"
                " data set with questions and answers"
            )
        rows = file.read([asked, right], use_threads=False).to_pylist()
    except pyarrow.ArrowException as error:
        raise PluginRefused(f"it is no Parquet file: {error}") from None
    kept = {row[asked]: row[right] for row in reversed(rows) if _usable(row[asked], row[right])}
    return b"\n".join(msgspec.json.encode({"question": q, "answer": a}) for q, a in kept.items())


def _usable(question: Any, answer: Any) -> bool:
    right = answer.rpartition("####")[2].strip() if isinstance(answer, str) else str(answer)
    return (
        isinstance(question, str)
        and isinstance(answer, str | int | float)
        and 0 < len(question) <= MAX_OWN_QUESTION_CHARACTERS
        and 0 < len(right) <= MAX_OWN_ANSWER_CHARACTERS
    )


def mathematics(usual: Callable[[str, str], bool]) -> Callable[[str, str], bool]:
    """Return a comparison of a right answer and a given one: `usual`, or else math-verify's.

    sympy would evaluate strings as Python; here it makes numbers of them, and nothing else. Raises
    PluginRefused where math-verify is not installed.
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
        # The worker's limit on CPU time is the only one.
        right, answer = (
            parse(f"${text.strip().strip('$')}$", extraction_config=only, parsing_timeout=None)
            for text in (expected, given)
        )
        return bool(verify(right, answer, timeout_seconds=None))

    for pair in _WARM:
        same(*pair)
    return same


def _number(text: str, *_: object, **__: object) -> Any:
    """Replace sympy's `parse_expr`, which evaluates its text as Python."""
    import sympy

    if not _NUMBER.fullmatch(text.strip()):
        raise ValueError("no number")
    return sympy.Integer(text) if text.strip().isdecimal() else sympy.Float(text)
