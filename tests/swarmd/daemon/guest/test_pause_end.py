"""When a pause ends, as `swarmd pause --for` and `--until` say it."""

from datetime import datetime

import pytest

from swarmd.cli.status import pause_end
from swarmd.errors import SwarmdError

NOW = datetime(2026, 11, 23, 12, 30).timestamp()


@pytest.mark.parametrize(
    "text, seconds", [("2h", 7200), ("1h30m", 5400), ("45M", 2700), ("90s", 90), ("1d2h", 93_600)]
)
def test_a_pause_for_a_length_ends_then(text: str, seconds: float) -> None:
    assert pause_end(text, None, NOW) == NOW + seconds


@pytest.mark.parametrize(
    "text, then",
    [("18:00", "2026-11-23 18:00"), ("8:00", "2026-11-24 08:00"), ("2026-11-25T08:15", "2026-11-25 08:15")],
)
def test_a_pause_until_a_time_ends_then(text: str, then: str) -> None:
    assert pause_end(None, text, NOW) == datetime.fromisoformat(then).timestamp()


def test_a_pause_without_length_or_time_has_no_end() -> None:
    assert pause_end(None, None, NOW) is None


@pytest.mark.parametrize(
    "for_, until, message",
    [
        ("2h", "18:00", "Give one of them"), ("", None, "no length"), ("soon", None, "no length"),
        ("0h", None, "no length"),
        ("2", None, "no length"),
        (None, "25:00", "no time"), (None, "tomorrow", "no time"), (None, "2026-11-01", "has passed"),
        (None, "12:61", "no time"),
    ],
)  # fmt: skip
def test_malformed_lengths_and_times_are_named(for_: str | None, until: str | None, message: str) -> None:
    with pytest.raises(SwarmdError, match=message):
        pause_end(for_, until, NOW)
