"""The durations that `swarmd pause --for` accepts."""

import pytest

from swarmd.cli.status import duration_s
from swarmd.errors import SwarmdError


@pytest.mark.parametrize(
    "text, seconds", [("2h", 7200), ("1h30m", 5400), ("45M", 2700), ("90s", 90), ("1d2h", 93_600)]
)
def test_a_duration_is_converted_to_seconds(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0h", "2", "18:00"])
def test_a_malformed_duration_gives_a_message(text: str) -> None:
    with pytest.raises(SwarmdError, match="no length"):
        duration_s(text)
