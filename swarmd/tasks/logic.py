"""Propositional logic with truth tables, in time linear in the text. Pure.

ReasoningGYM tries every assignment.

A formula over k variables is an integer of 2**k bits, bit i its value under assignment i. Operators bind as
in ReasoningGYM's parser: ¬, then ∧, ∨, →, ↔, each of the four grouping to the left. Unlike it we refuse what
is no formula: it takes any unknown text for one more variable, so that `premise ∨ junk` is entailed and
twenty junk names cost 10 s; and 255 characters of plain `P∧P∧P…` cost it 0.2 s.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
# How tightly each operator of two operands binds, and what it does; `table` cuts off excess bits.
_BINARY: Mapping[str, tuple[int, Callable[[int, int], int]]] = {
    "↔": (1, lambda a, b: ~(a ^ b)),
    "→": (2, lambda a, b: ~a | b),
    "∨": (3, lambda a, b: a | b),
    "∧": (4, lambda a, b: a & b),
}


def proves(premises: Sequence[str], conclusion: str, variables: Sequence[str]) -> bool:
    """Return whether the conclusion follows from the premises and is not trivial.

    A lone variable and a tautology are trivial.
    """
    said = table(conclusion, variables)
    if said is None or not set(conclusion) & {"¬", *_BINARY} or said == always_true(variables):
        return False
    given = always_true(variables)
    for premise in premises:
        known = table(premise, variables)
        assert known is not None, "ReasoningGYM writes well-formed premises"
        given &= known
    return not given & ~said


def table(formula: str, variables: Sequence[str]) -> int | None:
    """Return the truth table of a formula; None if it is no formula over these single-letter variables.

    Bit a of the table is the value under assignment a.
    """
    columns = {name: _column(i, len(variables)) for i, name in enumerate(variables)}
    signs = (sign for sign in formula if sign not in " \n")
    value = evaluated(signs, columns.get, _BINARY, {"¬": lambda a: ~a})
    return None if value is None else value & always_true(variables)


def evaluated(
    signs: Iterable[str],
    operand: Callable[[str], T | None],
    binary: Mapping[str, tuple[int, Callable[[T, T], T]]],
    unary: Mapping[str, Callable[[T], T]],
) -> T | None:
    """Return the value of an expression; None if it is none.

    Args:
        signs: operands, operators and parentheses.
        operand: returns the value of an operand; None for any other sign.
        binary: how tightly each operator binds, from 1 on, and what it does. It groups to the left.
        unary: what each operator in front of an operand does. It binds tighter than all of `binary`.
    """
    values: list[T] = []
    # Operators and opening parentheses whose right side is not complete: how tightly, of how many operands.
    waiting: list[tuple[float, int, Callable[..., Any]]] = []

    def apply(at_least: float) -> None:
        """Apply waiting operators that bind so tightly, back to the last opening parenthesis."""
        while waiting and waiting[-1][0] >= at_least:
            _, count, function = waiting.pop()
            values[-count:] = [function(*values[-count:])]

    operand_next = True
    for sign in signs:
        if operand_next and sign in unary:
            waiting.append((math.inf, 1, unary[sign]))
        elif operand_next and sign == "(":
            waiting.append((0, 0, operand))
        elif operand_next and (value := operand(sign)) is not None:
            values.append(value)
            operand_next = False
        elif not operand_next and sign in binary:
            binds, function = binary[sign]
            apply(binds)
            waiting.append((binds, 2, function))
            operand_next = True
        elif not operand_next and sign == ")":
            apply(1)
            if not waiting:
                return None
            waiting.pop()
        else:
            return None
    if operand_next:
        return None
    apply(1)
    return None if waiting else values[0]


def _column(i: int, variables: int) -> int:
    """Return the truth table of variable i: bit a is bit i of a."""
    return sum(1 << a for a in range(2**variables) if a >> i & 1)


def always_true(variables: Sequence[str]) -> int:
    """Return the truth table of a tautology."""
    return int((1 << 2 ** len(variables)) - 1)
