"""Probes of the platform: battery, load, metered network.

The platform's answers are simulated.
"""

import os
import subprocess
from collections import namedtuple
from collections.abc import Sequence
from functools import partial
from itertools import count

import pytest

from swarmd.config.config import WhenConfig
from swarmd.daemon.guest.conditions import MachineFacts
from swarmd.daemon.guest.nvidia import NvidiaGpus
from swarmd.daemon.guest.probes import CROWDED_LOOKS, LoadProbe, Probes, metered, on_battery, run

Battery = namedtuple("Battery", "percent secsleft power_plugged")
Times = namedtuple("Times", "user nice system idle iowait guest guest_nice")
NO_GPUS = NvidiaGpus(list, lambda: None)


def missing(_command: Sequence[str]) -> str:
    raise FileNotFoundError(2, "No such file or directory")


def hangs(command: Sequence[str]) -> str:
    raise subprocess.TimeoutExpired(command, 2.0)


def test_battery_power_is_recognised() -> None:
    assert on_battery(lambda: None) is None and on_battery(lambda: Battery(50, 100, None)) is None
    assert (
        on_battery(lambda: Battery(50, 100, False)) is True
        and on_battery(lambda: Battery(50, -2, True)) is False
    )
    # psutil raises FileNotFoundError if Linux has no /sys/class/power_supply.
    assert on_battery(partial(os.listdir, "/nowhere")) is None


@pytest.mark.parametrize(
    "answer, found",
    [("u 1\n", True), ("u 3\n", True), ("u 2\n", False), ("u 4\n", False), ("u 0\n", None), ("", None)],
)
def test_a_metered_network_is_recognised(answer: str, found: bool | None) -> None:
    assert metered(lambda _: answer) is found and metered(missing) is None and metered(hangs) is None


def test_the_load_of_other_programs_excludes_the_nodes_own() -> None:
    """Of four cores in ten seconds, 22 core-seconds were busy, 12 of them by this node."""
    answers = iter(
        [Times(100, 0, 10, 500, 5, 0, 0), Times(118, 0, 14, 515, 8, 0, 0), Times(118, 0, 14, 515, 8, 0, 0)]
    )
    probe = LoadProbe(lambda: next(answers))
    assert probe(3.0) is None and probe(12.0) == pytest.approx(10 / 40)
    assert probe(1.0) is None  # no time has passed


def test_the_load_of_other_programs_never_exceeds_100_percent() -> None:
    """Otherwise a busy machine with `when.load = "100 %"` would be paused for ever."""
    answers = iter(
        [
            Times(54982.3, 610.84, 9937.91, 27811.71, 0, 0, 0),
            Times(54984.42, 614.99, 9940.61, 27811.71, 0, 0, 0),
        ]
    )
    probe = LoadProbe(lambda: next(answers))
    assert probe(0.0) is None
    found = probe(0.0)  # in Python 3.11 the sum exceeds the total
    assert found is not None and found <= 1.0 and found == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("others", "ours", "left"), [(9.7, 0.3, 0.06), (5.0, 5.0, None), (3.0, 0.3, None), (9.7, 0.0, 0.0)]
)
def test_the_smallest_free_share_of_a_core_is_reported(
    monkeypatch: pytest.MonkeyPatch, others: float, ours: float, left: float | None
) -> None:
    """Two cores are measured each 5 s for a minute."""
    monkeypatch.setattr("psutil.cpu_count", lambda: 2)
    probes, look = Probes(WhenConfig(battery="train", metered="share"), NO_GPUS, run), count()
    busy = others + ours
    probes._load = LoadProbe(lambda: Times((n := next(look)) * busy, 0, 0, n * (10 - busy), 0, 0, 0))
    told = [probes.measure(float(n), ours).left for n in range(CROWDED_LOOKS + 1)]
    assert told[:-1] == [None] * CROWDED_LOOKS and told[-1] == (left if left is None else pytest.approx(left))


def test_only_needed_probes_run_and_a_setting_without_effect_is_reported() -> None:
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> str:
        asked.append(command)
        return "u 1"

    quiet = Probes(WhenConfig(battery="train", metered="share"), NO_GPUS, run)
    assert quiet.measure(0.0, 0.0) == MachineFacts() and not asked and not list(quiet.unknown(MachineFacts()))
    probes = Probes(WhenConfig(metered="pause", gpu="30 %"), NO_GPUS, run)
    assert [probes.measure(now, 0.0).metered for now in (0.0, 1.0, 9.0)] == [True] * 3
    # This probe starts a program, so it runs only every ten seconds.
    assert len([command for command in asked if "Metered" in command]) == 1
    assert [note.partition(" ")[0] for note in probes.unknown(MachineFacts())] == [
        "when.gpu",
        "when.metered",
    ]
