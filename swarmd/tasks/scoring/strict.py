"""Grading rules of the strict curricula, for cases in which ReasoningGYM accepts wrong answers. Pure.

ReasoningGYM accepts decimals that are off by one in the last place, any conclusion that follows, even a very
weak one, and any text after a LaTeX fraction (docs/papers.md).
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation, localcontext
from fractions import Fraction

from swarmd.tasks.scoring.logic import all_of, always_true, evaluated, table

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d{1,3})?")
_FRACTION = re.compile(r"(\d+)\s*/\s*(\d+)|\\d?frac\s*{\s*(\d+)\s*}\s*{\s*(\d+)\s*}")
# Precedence and function of each operator.
_OPERATIONS: Mapping[str, tuple[int, Callable[[Fraction, Fraction], Fraction]]] = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "*": (2, operator.mul),
    "/": (2, operator.truediv),
}


def is_decimal(answer: str, expression: str, precision: int, generated: str) -> bool:
    """Return whether the answer is the expression's value rounded half up, or equals the generator's answer.

    precision: the number of significant digits. The generator rounds after each operation, so for one
        question in ten its answer is a few units of the last digit off.
    """
    if not _NUMBER.fullmatch(answer):
        return False
    exact = _value(expression)
    with localcontext(Context(prec=precision, rounding=ROUND_HALF_UP, traps=[InvalidOperation])):
        rounded = Decimal(exact.numerator) / Decimal(exact.denominator)
    return Decimal(answer) in (rounded, Decimal(generated))


def says_all(premises: Sequence[str], conclusion: str, variables: Sequence[str]) -> bool:
    """Return whether the conclusion is equivalent to all premises together, and not trivial."""
    return table(conclusion, variables) == all_of(premises, variables) != always_true(variables)


def is_fraction(answer: str, numerator: int, denominator: int) -> bool:
    """Return whether the answer is exactly this fraction, written as a/b or in LaTeX."""
    found = _FRACTION.fullmatch(answer.strip("$ \n"))
    return found is not None and [int(n) for n in found.groups() if n] == [numerator, denominator]


def _value(expression: str) -> Fraction:
    """Evaluate an expression that a generator wrote: numbers, signs, the four operations, parentheses.

    The scoring process refuses Python's own parser (sandbox/containment.py).
    """
    signs = re.findall(r"[\d.]+|[-+*/()]", expression)
    numbers = {sign: Fraction(sign) for sign in signs if sign not in "+-*/()"}
    value: Fraction | None = evaluated(signs, numbers.get, _OPERATIONS, {"-": lambda number: -number})
    assert value is not None, "ReasoningGYM writes well-formed expressions"
    return value
