"""Propositional logic with truth tables, in time linear in the text. Pure.

ReasoningGYM tries every assignment.

A formula over k variables is an integer of 2**k bits, bit i its value under assignment i. Operators bind as
in ReasoningGYM's parser: ¬, then ∧, ∨, →, ↔, each of the four grouping to the left. Unlike it we refuse what
is no formula: it takes any unknown text for one more variable, so that `premise ∨ junk` is entailed and
twenty junk names cost 10 s; and 255 characters of plain `P∧P∧P…` cost it 0.2 s.
"""

from collections.abc import Callable, Mapping, Sequence

# How tightly each operator binds, and what it does; `table` cuts off excess bits.
_BINARY: Mapping[str, tuple[int, Callable[[int, int], int]]] = {
    "↔": (1, lambda a, b: ~(a ^ b)),
    "→": (2, lambda a, b: ~a | b),
    "∨": (3, lambda a, b: a | b),
    "∧": (4, lambda a, b: a & b),
}
_BINDS = {"(": 0, "¬": 5} | {sign: binds for sign, (binds, _) in _BINARY.items()}


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
    values: list[int] = []
    waiting: list[str] = []  # operators and opening parentheses whose right side is not complete
    columns = {name: _column(i, len(variables)) for i, name in enumerate(variables)}
    operand_next = True
    for sign in formula:
        if sign in " \n":
            continue
        if operand_next and sign in columns:
            values.append(columns[sign])
            operand_next = False
        elif operand_next and sign in "¬(":
            waiting.append(sign)
        elif not operand_next and sign in _BINARY:
            _apply(values, waiting, _BINDS[sign])
            waiting.append(sign)
            operand_next = True
        elif not operand_next and sign == ")":
            _apply(values, waiting, 1)
            if not waiting:
                return None
            waiting.pop()
        else:
            return None
    if operand_next:
        return None
    _apply(values, waiting, 1)
    return None if waiting else values[0] & always_true(variables)


def _apply(values: list[int], waiting: list[str], at_least: int) -> None:
    """Apply waiting operators that bind at least this tightly, back to the last opening parenthesis."""
    while waiting and _BINDS[waiting[-1]] >= at_least:
        sign, right = waiting.pop(), values.pop()
        values.append(~right if sign == "¬" else _BINARY[sign][1](values.pop(), right))


def _column(i: int, variables: int) -> int:
    """Return the truth table of variable i: bit a is bit i of a."""
    return sum(1 << a for a in range(2**variables) if a >> i & 1)


def always_true(variables: Sequence[str]) -> int:
    """Return the truth table of a tautology."""
    return int((1 << 2 ** len(variables)) - 1)
