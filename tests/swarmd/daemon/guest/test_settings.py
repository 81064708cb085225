"""Settings of the guest: amounts with units, hours of the week, and contradicting limits."""

from datetime import datetime
from pathlib import Path

import pytest

from swarmd.config import amounts
from swarmd.config.hours import is_open, next_opening, window
from swarmd.config.sources import resolve
from swarmd.errors import ConfigError


@pytest.mark.parametrize(
    "read, text, value",
    [
        (amounts.percent, "25 %", 0.25), (amounts.percent, "0.5%", 0.005),
        (amounts.size, "20 GB", 20 * 10**9),
        (amounts.size, "1.5MiB", 1572864),
        (amounts.rate, "200 kB/s", 200_000), (amounts.rate, "1MB / s", 10**6),
    ],
)  # fmt: skip
def test_amounts_with_units_are_parsed(read: object, text: str, value: float) -> None:
    assert read(text) == value  # type: ignore[operator]


WRONG = {
    'limits.cpu = "25"': "limits.cpu: .*the unit is missing",
    'limits.cpu = "25 cores"': "limits.cpu: .*unknown unit 'cores'",
    'limits.cpu = "0 %"': "limits.cpu: .*more than 0 %",
    'limits.cpu = "101 %"': "limits.cpu: .*at most 100 %",
    'limits.up = "5 furlongs/s"': "limits.up: .*unknown unit 'furlongs'",
    'limits.up = "5 MB"': 'limits.up: .*ends in "/s"',
    'limits.down = "5 kB/s"': "limits.down: .*at least 10 kB/s",
    'limits.month = "20 gb"': 'limits.month: .*did you mean "GB"',
    'limits.state = "many"': "limits.state: .*a number and its unit",
    'limits.month = "0 GB"': "limits.month: .*at least 1 byte",
    'when.hours = ["8-9"]': r"when.hours\[0\]: .*days, hours or both",
    'when.hours = ["fun 8:00-9:00"]': r"when.hours\[0\]: .*unknown day 'fun'",
    'when.hours = ["sat", "08:00-08:00"]': r"when.hours\[1\]: .*begins when it ends",
    'when.hours = ["24:30-03:00"]': "not a time of day",
    'when.load = "50 GB"': "when.load: .*unknown unit 'GB'",
    'when.battery = "maybe"': "when.battery: expected one of",
    'limits.up = "1 MB/s"\nswarm.engine = "hivemind"': "limits.up: .*swarm.engine",
    'limits.gpu_memory = "20 %"\ngenerate.engine = "vllm"': "limits.gpu_memory: .*generate.engine_memory",
}


@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=[pytest.mark.p2pd] * ("hivemind" in text)) for text in WRONG]
)
def test_the_message_about_a_wrong_setting_names_it_and_its_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=WRONG[text]) as found:
        resolve(file, {}, {})
    assert str(file) in str(found.value) and len(str(found.value).splitlines()) == 1


def test_guest_settings_are_read_from_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('limits.cpu = "25 %"\nwhen.hours = ["mon-fri 18:00-08:00", "sat-sun"]\n')
    assert resolve(file, {}, {}).config.when.hours == ("mon-fri 18:00-08:00", "sat-sun")
    hours = "mon-fri  18:00-08:00, sat 12:00-14:00 20:00-22:00"
    config = resolve(file, {"SWARMD_LIMITS_CPU": "50%", "SWARMD_WHEN_HOURS": hours}, {}).config
    assert config.limits.cpu == "50%" and [window(text).days for text in config.when.hours] == [
        frozenset(range(5)),
        {5},
        frozenset(range(7)),
    ]


NIGHT, WEEKEND = window("mon-fri 18:00-08:00"), window("sat-sun")


@pytest.mark.parametrize(
    "moment, open_then, next_one",
    [
        ("2026-11-23 07:59", False, "2026-11-23 18:00"),  # a Monday; Sunday night is not allowed
        ("2026-11-23 12:00", False, "2026-11-23 18:00"),
        ("2026-11-23 18:00", True, None),
        ("2026-11-24 07:59", True, None),
        ("2026-11-24 08:00", False, "2026-11-24 18:00"),
        ("2026-11-28 07:00", True, None),  # Friday night and Saturday are allowed
        ("2026-11-29 23:59", True, None),
    ],
)
def test_the_node_may_run_only_in_the_allowed_hours_of_the_week(
    moment: str, open_then: bool, next_one: str | None
) -> None:
    now, windows = datetime.fromisoformat(moment), [NIGHT, WEEKEND]
    assert is_open(windows, now) is open_then
    if next_one:
        assert next_opening(windows, now) == datetime.fromisoformat(next_one)


def test_a_range_of_days_may_wrap_around_the_week() -> None:
    assert (
        window("sat-mon").days == {5, 6, 0}
        and window("Mon,wed 1:00-2:00").days == {0, 2}
        and window("22:00-07:00").days == set(range(7))
    )
