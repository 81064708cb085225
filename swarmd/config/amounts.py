"""Amounts with a unit in settings: "25 %", "200 kB/s", "20 GB". Pure.

Each parser, and each check, raises ValueError with the cause.
"""

import re
from collections.abc import Callable
from typing import Final

UNITS: Final = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
# At lower rates, connections break before any useful data has arrived.
MIN_BYTES_PER_S: Final = 10_000


def percent(text: str) -> float:
    """Parse a share above 0 and at most 1: "25 %" -> 0.25.

    Raises ValueError.
    """
    number, unit = _split(text)
    if unit != "%":
        raise ValueError(
            f'the unit is missing: write "{number:g} %"'
            if not unit
            else f"unknown unit {unit!r}; it is a share, in %"
        )
    if not 0 < number <= 100:
        raise ValueError("a share is more than 0 % and at most 100 %")
    return number / 100


def size(text: str) -> int:
    """Parse a size above 0 in bytes: "20 GB".

    Raises ValueError.
    """
    number, unit = _split(text)
    if unit not in UNITS:
        near = next((known for known in UNITS if known.lower() == unit.lower()), None)
        hint = f'; did you mean "{near}"?' if near else ""
        raise ValueError(
            f"unknown unit {unit!r}; known are {', '.join(UNITS)}{hint}"
            if unit
            else "the unit is missing, such as GB"
        )
    if number * UNITS[unit] < 1:
        raise ValueError("an amount is at least 1 byte")
    return int(number * UNITS[unit])


def rate(text: str) -> int:
    """Parse a rate in bytes a second: "200 kB/s".

    Raises ValueError.
    """
    number, slash, second = text.rpartition("/")
    if not slash or second.strip() != "s":
        raise ValueError('a rate ends in "/s"')
    if (found := size(number)) < MIN_BYTES_PER_S:
        raise ValueError("a rate is at least 10 kB/s, as slower connections break")
    return found


def _split(text: str) -> tuple[float, str]:
    if (found := re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(\S{0,20})\s*", text)) is None:
        raise ValueError("write a number and its unit")
    return float(found[1]), found[2]


def checked(parse: Callable[[str], object], *, empty: bool = False) -> Callable[[str], str]:
    """Return a validator that returns a text unchanged if `parse` accepts it; with `empty`, "" too."""

    def check(text: str) -> str:
        if text or not empty:
            parse(text)
        return text

    return check
