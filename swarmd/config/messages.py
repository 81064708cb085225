"""Error messages for the configuration: the expected value, the value found, and a suggestion."""

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from swarmd.terminal import printable

# Longer values are truncated.
_MAX_QUOTED_CHARACTERS = 120
# By kind of bound: the attribute with the limit, and its words.
_LIMITS = {
    Ge: ("ge", "at least"),
    Gt: ("gt", "more than"),
    Le: ("le", "at most"),
    Lt: ("lt", "less than"),
}


def expected(field: FieldInfo, *, element: bool = False) -> str:
    """Describe the values that a key may have; with `element`, the values of one list item."""
    if field.description:
        return (
            field.description.replace("a list of addresses", "an address").removeprefix("a list of ")
            if element
            else field.description
        )
    if (kind := kind_of(field)) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in _choices(field))
    if kind is bool:
        return "true or false"
    if kind not in (int, float):
        return "a text, not empty" if any(isinstance(bound, MinLen) for bound in _bounds(field)) else "a text"
    bounds = [(bound, _LIMITS[type(bound)]) for bound in _bounds(field) if type(bound) in _LIMITS]
    limits = [f"{words} {getattr(bound, name):,}" for bound, (name, words) in bounds]
    return ("a whole number, " if kind is int else "a number, ") + " and ".join(limits)


def kind_of(field: FieldInfo) -> Any:
    """Return the type of a key's values, apart from None: int, float, str, tuple or Literal."""
    annotation: Any = field.annotation
    while get_origin(annotation) in (Union, UnionType, Annotated):
        annotation = get_args(annotation)[0]
    return get_origin(annotation) or annotation


def _bounds(field: FieldInfo) -> Iterator[Any]:
    yield from field.metadata
    for part in get_args(field.annotation):
        # The parts of an optional value's type.
        for inner in getattr(part, "__metadata__", ()):
            yield from inner.metadata if isinstance(inner, FieldInfo) else (inner,)


def _choices(field: FieldInfo) -> tuple[str, ...]:
    return get_args(field.annotation) if kind_of(field) is Literal else ()


def nearest_choice(field: FieldInfo, found: Any) -> str:
    """Suggest the choice that was probably meant, as the end of a sentence, or ""."""
    near = (
        get_close_matches(found.lower(), _choices(field), n=1, cutoff=0.7) if isinstance(found, str) else []
    )
    return f'; did you mean "{near[0]}"?' if near else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that was probably meant, as the end of a sentence, or "".

    A key in another section is found by its last part.
    """
    known = list(known)
    # Several keys may have the same last part; the first of them counts.
    by_last_part = {key.rpartition(".")[2]: key for key in reversed(known)}
    near = (
        get_close_matches(name, known, n=1, cutoff=0.75)
        or get_close_matches(name.lower(), known, n=1, cutoff=0.75)
        or [key for key in known if key.startswith(f"{name}-") or sorted(key) == sorted(name.lower())]
        or [by_last_part[part] for part in get_close_matches(name.rpartition(".")[2].lower(), by_last_part)]
    )
    return f"; did you mean {near[0]}?" if near else ""


def key_name(key: str) -> str:
    """Make a dotted key safe to print, because a file may contain any characters."""
    return ".".join(
        part if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", part) else shown(part) for part in key.split(".")
    )


def shown(value: Any) -> str:
    """Quote a value for an error message: short, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a section"
    text = (
        repr(list(value) if isinstance(value, tuple) else value)
        if isinstance(value, str | int | float | list | tuple)
        else str(value)
    )
    return printable(
        text if len(text) <= _MAX_QUOTED_CHARACTERS else text[: _MAX_QUOTED_CHARACTERS - 1] + "…"
    )
