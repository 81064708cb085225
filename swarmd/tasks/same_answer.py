"""Whether two short answers of a mathematical kind say the same (docs/own-tasks.md has the rules).

Pure, linear in the text.

Numbers are compared exactly, as fractions; the rest as text. Nothing is rounded, evaluated or parsed beyond
that.
"""

import re
import unicodedata
from fractions import Fraction

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
