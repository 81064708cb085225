"""Probes for battery, load and metered network. They return None if the platform cannot tell.

Functions that query the platform are arguments, so that tests can replace them. `nvidia` probes the GPUs.
"""

import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import psutil

from swarmd.config.config import WhenConfig
from swarmd.daemon.guest.conditions import MachineFacts
from swarmd.daemon.guest.nvidia import NvidiaGpus

# Other programs crowd the node out if, over this many measurements (about 5 s each), all cores are at least
# BUSY_SHARE busy and the node gets less than CROWDED_CORES of a core.
CROWDED_LOOKS: Final = 12
BUSY_SHARE: Final = 0.95
CROWDED_CORES: Final = 0.5
# Runs a command and returns its standard output; raises OSError or subprocess.SubprocessError.
Run = Callable[[Sequence[str]], str]


def run(command: Sequence[str]) -> str:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=2.0,
        check=True,
        stdin=subprocess.DEVNULL,
    ).stdout


# Seconds between two probes that start a program.
SLOW_EVERY_S: Final = 10.0
_METERED = (
    "busctl",
    "get-property",
    "org.freedesktop.NetworkManager",
    "/org/freedesktop/NetworkManager",
    "org.freedesktop.NetworkManager",
    "Metered",
)


def on_battery(sensors: Callable[[], Any] = psutil.sensors_battery) -> bool | None:
    """Return whether the machine runs on battery; None without a battery, or if its state is unknown."""
    try:
        battery = sensors()
    except OSError:
        # Linux without /sys/class/power_supply, as in some containers, or the battery was removed.
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def metered(run: Run = run) -> bool | None:
    """Return whether NetworkManager calls the default route metered; None if it cannot tell.

    NetworkManager's values: 1 yes, 2 no, 3 guessed yes, 4 guessed no, 0 unknown.
    """
    try:
        kind, _, number = run(_METERED).strip().partition(" ")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"1": True, "2": False, "3": True, "4": False}.get(number) if kind == "u" else None


@dataclass(slots=True)
class LoadProbe:
    """Measures the share of all cores that other programs used since the last call.

    own: the node's share in the same time.
    """

    times: Callable[[], Any] = psutil.cpu_times
    own: float = 0.0
    _before: tuple[float, float] | None = None  # busy seconds and all seconds at the last call

    def __call__(self, ours: float) -> float | None:
        """Return the share of the CPU that other programs used since the last call; None the first time.

        ours: CPU seconds that the node itself used since the last call.
        """
        times = self.times()
        # User time already contains guest time, so guest time is not added again.
        total = float(sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))
        busy = total - float(times.idle + getattr(times, "iowait", 0.0))
        before, self._before = self._before, (busy, total)
        if before is None or total <= before[1]:
            return None
        self.own = ours / (total - before[1])
        # Rounding may give slightly more than 1.
        return min(1.0, max(0.0, busy - before[0] - ours) / (total - before[1]))


class Probes:
    """Measures what the settings need, and nothing else.

    `measure` may take some milliseconds: call it in a thread.
    """

    def __init__(self, when: WhenConfig, gpus: NvidiaGpus, run: Run = run) -> None:
        self._when, self._gpus, self._run = when, gpus, run
        self._load = LoadProbe()
        self._loaded: float | None = None  # the last result of `_load`
        # CPU shares of other programs and of the node, over the last minute.
        self._shares = deque[tuple[float, float]](maxlen=CROWDED_LOOKS)
        self._slow_at: float | None = None
        self._metered: bool | None = None

    def measure(self, now: float, ours: float | None) -> MachineFacts:
        """Measure the facts that the pause conditions depend on.

        Args:
            now: seconds.
            ours: the node's CPU seconds since the last call with a number. None if they are not completely
                known; the load of the last call is returned then.
        """
        when = self._when
        if ours is not None and (load := self._load(ours)) is not None:
            self._loaded = load
            self._shares.append((load, self._load.own))
        if when.metered != "share" and (self._slow_at is None or not 0 <= now - self._slow_at < SLOW_EVERY_S):
            self._slow_at, self._metered = now, metered(self._run)
        return MachineFacts(
            on_battery=on_battery() if when.battery == "pause" else None,
            load=self._loaded,
            left=self._left(),
            gpu=self._gpus.used_by_others() if when.gpu else None,
            metered=self._metered,
        )

    def _left(self) -> float | None:
        """Return how much of one core the node got in the last minute; None unless all cores were busy."""
        if len(self._shares) < CROWDED_LOOKS:
            return None
        others, own = (fmean(shares) for shares in zip(*self._shares, strict=True))
        left = own * (psutil.cpu_count() or 1)
        return left if others + own >= BUSY_SHARE and left < CROWDED_CORES else None

    def unknown(self, facts: MachineFacts) -> Sequence[str]:
        """Return the settings that have no effect on this machine, with the reason."""
        when = self._when
        told = (
            (
                when.gpu and not self._gpus.tells_use(),
                "when.gpu has no effect: no NVIDIA driver tells here who uses the GPU (docs/guest.md)",
            ),
            (
                when.metered == "pause" and facts.metered is None,
                "when.metered has no effect: NetworkManager does not tell here whether the network is"
                " metered",
            ),
        )
        return [words for applies, words in told if applies]
