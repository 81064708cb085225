"""Grading rules of the strict curricula, where ReasoningGYM accepts wrong answers (docs/papers.md). Pure.

ReasoningGYM pays for decimals that are off by one in the last decimal place, for any conclusion that follows,
however little it says, and for any text behind a LaTeX fraction.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation, localcontext
from fractions import Fraction

from swarmd.tasks.logic import always_true, evaluated, table

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d{1,3})?")
_FRACTION = re.compile(r"(\d+)\s*/\s*(\d+)|\\d?frac\s*{\s*(\d+)\s*}\s*{\s*(\d+)\s*}")
# How tightly each operator binds, and what it does.
_OPERATIONS: Mapping[str, tuple[int, Callable[[Fraction, Fraction], Fraction]]] = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "*": (2, operator.mul),
    "/": (2, operator.truediv),
}


def is_decimal(answer: str, expression: str, precision: int, generated: str) -> bool:
    """Return whether it is the expression's value, rounded half up to so many digits, or the generator's.

    The digits are significant ones. The generator rounds after each operation, so that its answer is a few
    units of the last digit off for one question in ten.
    """
    if not _NUMBER.fullmatch(answer):
        return False
    exact = _value(expression)
    with localcontext(Context(prec=precision, rounding=ROUND_HALF_UP, traps=[InvalidOperation])):
        rounded = Decimal(exact.numerator) / Decimal(exact.denominator)
    return Decimal(answer) in (rounded, Decimal(generated))


def says_all(premises: Sequence[str], conclusion: str, variables: Sequence[str]) -> bool:
    """Return whether the conclusion is equivalent to all premises together, and not trivial."""
    said, given = table(conclusion, variables), always_true(variables)
    for premise in premises:
        given &= table(premise, variables) or 0
    return said == given != always_true(variables)


def is_fraction(answer: str, numerator: int, denominator: int) -> bool:
    """Return whether it is this fraction and nothing besides, as a/b or in LaTeX."""
    found = _FRACTION.fullmatch(answer.strip("$ \n"))
    return found is not None and [int(n) for n in found.groups() if n] == [numerator, denominator]


def _value(expression: str) -> Fraction:
    """Evaluate an expression that a generator wrote: numbers, signs, the four operations, parentheses.

    Python's own parser is shut out of the process that marks (sandbox/containment.py).
    """
    signs = re.findall(r"[\d.]+|[-+*/()]", expression)
    numbers = {sign: Fraction(sign) for sign in signs if sign not in "+-*/()"}
    value: Fraction | None = evaluated(signs, numbers.get, _OPERATIONS, {"-": lambda number: -number})
    assert value is not None, "ReasoningGYM writes well-formed expressions"
    return value
