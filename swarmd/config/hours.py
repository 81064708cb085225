"""Hours of the week: "22:00-07:00", "mon-fri 18:00-08:00", "sat,sun". Pure; times are local, zoneless."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class Window:
    """A time window on some days of the week, in minutes of the day.

    A window that ends earlier than it begins ends on the next day.
    """

    days: frozenset[int]  # days on which it begins; 0: Monday
    begin: int
    end: int  # above `begin`; beyond _DAY_MINUTES: on the next day


def window(text: str) -> Window:
    """Parse a time window such as "sat-sun" or "mon-fri 18:00-08:00".

    Raises ValueError with the cause.
    """
    found = re.fullmatch(
        r"\s*(?:([a-z,\- ]*[a-z])\s*)?(?:(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2}))?\s*", text.lower()
    )
    if found is None or not text.strip():
        raise ValueError('write days, hours or both, such as "sat-sun" or "mon-fri 18:00-08:00"')
    days = _days(found[1]) if found[1] else frozenset(range(7))
    if found[2] is None:
        return Window(days, 0, _DAY_MINUTES)
    begin, end = _minute(found[2], found[3]), _minute(found[4], found[5])
    if begin == end:
        raise ValueError("it begins when it ends: leave the hours out for the whole day")
    return Window(days, begin, end if end > begin else end + _DAY_MINUTES)


def is_open(windows: Sequence[Window], now: datetime) -> bool:
    """Return whether `now` is in one of the windows."""
    minute = now.hour * 60 + now.minute
    yesterday = (now.weekday() - 1) % 7
    return any(
        (now.weekday() in w.days and w.begin <= minute < w.end)
        or (yesterday in w.days and minute + _DAY_MINUTES < w.end)
        for w in windows
    )


def next_opening(windows: Sequence[Window], now: datetime) -> datetime:
    """Return the next moment at which one of the windows begins; there has to be at least one."""
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return min(
        start
        for ahead in range(8)
        for w in windows
        if (midnight + timedelta(days=ahead)).weekday() in w.days
        and (start := midnight + timedelta(days=ahead, minutes=w.begin)) > now
    )


def clock_words(then: datetime, now: datetime) -> str:
    """Format a time as "18:00", with the weekday on another day, and with the date from a week ahead on."""
    days = (then.date() - now.date()).days
    return then.strftime("%H:%M" if not days else "%a %H:%M" if days < 7 else "%Y-%m-%d %H:%M")


def _days(text: str) -> frozenset[int]:
    days: set[int] = set()
    for part in re.split(r"[, ]+", text.strip(", ")):
        first, dash, last = part.partition("-")
        for name in (first, last) if dash else (first,):
            if name not in DAYS:
                raise ValueError(f"unknown day {name!r}; days are {', '.join(DAYS)}")
        begin = DAYS.index(first)
        count = (DAYS.index(last) - begin) % 7 if dash else 0
        days |= {(begin + i) % 7 for i in range(count + 1)}
    return frozenset(days)


def _minute(hour: str, minute: str) -> int:
    found = int(hour) * 60 + int(minute)
    if int(minute) > 59 or found > _DAY_MINUTES:
        raise ValueError(f"{hour}:{minute} is not a time of day")
    return found
