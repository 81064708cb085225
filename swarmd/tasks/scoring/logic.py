"""Decide propositional logic by truth tables, in time linear in the text. Pure.

A formula over k variables is an integer of 2**k bits: bit i is the formula's value under assignment i.
Operators bind as in ReasoningGYM's parser: ¬, then ∧, ∨, →, ↔; the last four are left-associative.

Malformed formulas are rejected. ReasoningGYM's parser takes any unknown text for another variable, so
`premise ∨ junk` would count as entailed. It also tries every assignment, so twenty junk names cost it 10 s,
and a plain `P∧P∧P…` of 255 characters 0.2 s.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
# Precedence and function of each binary operator; `table` cuts off excess bits.
_BINARY: Mapping[str, tuple[int, Callable[[int, int], int]]] = {
    "↔": (1, lambda a, b: ~(a ^ b)),
    "→": (2, lambda a, b: ~a | b),
    "∨": (3, lambda a, b: a | b),
    "∧": (4, lambda a, b: a & b),
}


def proves(premises: Sequence[str], conclusion: str, variables: Sequence[str]) -> bool:
    """Return whether the conclusion follows from the premises and is not trivial.

    A single variable and a tautology are trivial.
    """
    said = table(conclusion, variables)
    if said is None or not set(conclusion) & {"¬", *_BINARY} or said == always_true(variables):
        return False
    return not all_of(premises, variables) & ~said


def all_of(premises: Sequence[str], variables: Sequence[str]) -> int:
    """Return the truth table of all premises together."""
    given = table(" ∧ ".join(f"({premise})" for premise in premises), variables)
    assert given is not None, "ReasoningGYM writes well-formed premises"
    return given


def table(formula: str, variables: Sequence[str]) -> int | None:
    """Return a formula's truth table; None if it is malformed or has an unknown variable."""
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
    """Return the value of an expression; None if it is malformed.

    Args:
        signs: operands, operators and parentheses.
        operand: returns the value of an operand; None for any other sign.
        binary: precedence (from 1 on) and function of each binary operator. All are left-associative.
        unary: function of each prefix operator. These bind tighter than all of `binary`.
    """
    values: list[T] = []
    # Operators and opening parentheses without a complete right side: precedence, operand count, function.
    waiting: list[tuple[float, int, Callable[..., Any]]] = []

    def apply(at_least: float) -> None:
        """Apply pending operators of at least this precedence, back to the last opening parenthesis."""
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
