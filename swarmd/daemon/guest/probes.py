"""What the platform tells of battery, load, GPU, network, heat and the user; None where it cannot tell.

What is asked of the platform is an argument, so that tests answer in its place. How long ago the user touched
keyboard or mouse is told by any of these; the shortest of all answers counts.

    X11                  the screen saver extension
    GNOME on Wayland     Mutter, over D-Bus
    Linux                interrupts of built-in keyboards and touch pads; reads from terminals (also over SSH)
    macOS                IOHIDSystem, by `ioreg`

Other Wayland desktops tell nobody. A USB keyboard's interrupts cannot be told from a USB disk's, so they are
not counted.
"""

import contextlib
import ctypes
import ctypes.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from swarmd.config.config import WhenConfig
from swarmd.daemon.guest.conditions import MachineFacts
from swarmd.daemon.guest.meters import NvidiaGpus, all_seconds, busy_seconds

# Names in /proc/interrupts: PS/2, and touch pads on I2C.
INPUT_LINES: Final = ("i8042", "i2c_hid", "i2c-hid", "ELAN", "SYNA", "MSFT000")
_MUTTER = (
    "busctl",
    "--user",
    "call",
    "org.gnome.Mutter.IdleMonitor",
    "/org/gnome/Mutter/IdleMonitor/Core",
    "org.gnome.Mutter.IdleMonitor",
    "GetIdletime",
)
_IOREG = ("ioreg", "-c", "IOHIDSystem", "-d", "4")

Source = Callable[[float], float | None]  # now -> idle seconds


def idle_probe(
    run: Callable[[Sequence[str]], str],
    platform: str = sys.platform,
    environment: Mapping[str, str] = os.environ,
) -> Source:
    """Join this platform's sources of idle time into one, which returns None where none of them can tell."""
    sources: list[Source] = []
    if platform == "darwin":
        sources = [lambda _: io_registry(run)]
    elif platform == "linux":
        sources = [Interrupts(), terminals]
        if environment.get("XDG_SESSION_TYPE") == "wayland":
            # With the terminals alone a user of the desktop would seem away.
            sources = [lambda _: mutter(run), Interrupts()]
        elif environment.get("DISPLAY"):
            sources += [ScreenSaver()]

    def shortest(now: float) -> float | None:
        return min((idle for source in sources if (idle := source(now)) is not None), default=None)

    return shortest


def mutter(run: Callable[[Sequence[str]], str]) -> float | None:
    try:
        kind, _, milliseconds = run(_MUTTER).strip().partition(" ")
        return int(milliseconds) / 1000 if kind == "t" else None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def io_registry(run: Callable[[Sequence[str]], str]) -> float | None:
    try:
        found = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', run(_IOREG))
    except (OSError, subprocess.SubprocessError):
        return None
    return int(found[1]) / 1e9 if found else None


def terminals(
    _now: float, folder: Path = Path("/dev"), clock: Callable[[], float] = time.time
) -> float | None:
    """Return the seconds since the last read of a terminal.

    A terminal's time of access is its last read, to about eight seconds.
    """
    read = []
    for terminal in _devices(folder):
        with contextlib.suppress(OSError):
            read.append(terminal.stat().st_atime)
    return max(0.0, clock() - max(read)) if read else None


def _devices(folder: Path) -> Iterable[Path]:
    with contextlib.suppress(OSError):
        yield from (each for each in (folder / "pts").iterdir() if each.name.isdigit())
    yield from folder.glob("tty[1-9]")


class Interrupts:
    """Measures idle time since the interrupt counts of the input devices last changed.

    It is unknown until they have changed once.
    """

    def __init__(self, file: Path = Path("/proc/interrupts")) -> None:
        self._file = file
        self._count: int | None = None
        self._changed_at: float | None = None

    def __call__(self, now: float) -> float | None:
        try:
            lines = self._file.read_text().splitlines()
        except OSError:
            return None
        inputs = [line for line in lines if any(name in line for name in INPUT_LINES)]
        if not inputs:
            return None
        count = sum(
            int(number)
            for line in inputs
            for number in re.findall(r"(?<=\s)\d+(?=\s)", line.partition(":")[2])
        )
        if self._count is not None and count != self._count:
            self._changed_at = now
        self._count = count
        return None if self._changed_at is None else max(0.0, now - self._changed_at)


class _Info(ctypes.Structure):
    _fields_ = [
        ("window", ctypes.c_ulong),
        ("state", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("til_or_since", ctypes.c_ulong),
        ("idle", ctypes.c_ulong),
        ("eventMask", ctypes.c_ulong),
    ]  # XScreenSaverInfo


class ScreenSaver:
    """X11's screen saver extension, by its C library.

    Connects for each question: libX11 ends the process when a connection breaks.
    """

    def __init__(self) -> None:
        names = [ctypes.util.find_library(name) for name in ("X11", "Xss")]
        self._libraries = None if None in names else _loaded(*names)

    def __call__(self, _now: float) -> float | None:
        if self._libraries is None:
            return None
        x, saver = self._libraries
        display = x.XOpenDisplay(None)
        if not display:
            return None
        info = _Info()
        told = saver.XScreenSaverQueryInfo(display, x.XDefaultRootWindow(display), ctypes.byref(info))
        x.XCloseDisplay(display)
        return info.idle / 1000 if told else None


def _loaded(*names: str | None) -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    try:
        x, saver = (ctypes.CDLL(name) for name in names)
        x.XOpenDisplay.restype, x.XOpenDisplay.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        x.XDefaultRootWindow.restype, x.XDefaultRootWindow.argtypes = ctypes.c_ulong, [ctypes.c_void_p]
        x.XCloseDisplay.argtypes = [ctypes.c_void_p]
        saver.XScreenSaverQueryInfo.argtypes = [ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return x, saver


COMMAND_TIMEOUT_S: Final = 2.0
# Returns a command's standard output; raises OSError or subprocess.SubprocessError.
Run = Callable[[Sequence[str]], str]


def run(command: Sequence[str]) -> str:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=True,
        stdin=subprocess.DEVNULL,
    ).stdout


# How often a question is asked that starts a program.
SLOW_EVERY_S: Final = 10.0
# psutil's names of sensors, the best first.
PROCESSOR: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "acpitz")
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
        # This is Linux without /sys/class/power_supply, as in some containers, or the battery was taken out.
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def temperature(sensors: Callable[[], Any]) -> float | None:
    """Return the temperature of the processor's hottest sensor, in °C."""
    found = sensors()
    name = next((name for name in PROCESSOR if found.get(name)), None)
    return max(float(each.current) for each in found[name]) if name else None


def metered(run: Run = run) -> bool | None:
    """Return whether NetworkManager calls the default route metered; None if it cannot tell.

    Its numbers: 1 yes, 2 no, 3 and 4 its guesses of yes and no, 0 unknown.
    """
    try:
        kind, _, number = run(_METERED).strip().partition(" ")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"1": True, "2": False, "3": True, "4": False}.get(number) if kind == "u" else None


@dataclass(slots=True)
class LoadProbe:
    """Measures the share of all cores that other programs used since the last call."""

    times: Callable[[], Any] = psutil.cpu_times
    _before: tuple[float, float] | None = None  # busy seconds, and all

    def __call__(self, ours: float) -> float | None:
        """Return the share of the CPU that others used since the last call; None the first time.

        ours: CPU seconds that the node itself took since the last call.
        """
        times = self.times()
        busy, total = busy_seconds(times), all_seconds(times)
        before, self._before = self._before, (busy, total)
        if before is None or total <= before[1]:
            return None
        return max(0.0, busy - before[0] - ours) / (total - before[1])


class Probes:
    """Asks for what the settings need, and for nothing else.

    `measure` may take some milliseconds: call it in a thread.
    """

    def __init__(self, when: WhenConfig, gpus: NvidiaGpus, run: Run = run) -> None:
        self._when, self._gpus, self._run = when, gpus, run
        self._load = LoadProbe()
        self._idle = idle_probe(run) if when.user else None
        self._sensors = getattr(psutil, "sensors_temperatures", None)  # Linux and FreeBSD
        self._slow_at: float | None = None
        self._metered: bool | None = None

    def measure(self, now: float, ours: float) -> MachineFacts:
        """Measure the facts that conditions depend on.

        now: seconds. ours: CPU seconds that the node took since the last call.
        """
        when = self._when
        if when.metered != "share" and (self._slow_at is None or not 0 <= now - self._slow_at < SLOW_EVERY_S):
            self._slow_at, self._metered = now, metered(self._run)
        return MachineFacts(
            on_battery=on_battery() if when.battery == "pause" else None,
            idle=self._idle(now) if self._idle else None,
            load=self._load(ours) if when.load else None,
            gpu=self._gpus.used_by_others() if when.gpu else None,
            metered=self._metered,
            temperature=temperature(self._sensors) if when.temperature and self._sensors else None,
        )

    def unknown(self, facts: MachineFacts) -> Iterable[str]:
        """Yield the settings that have no effect on this machine, with the reason."""
        when = self._when
        if when.user and facts.idle is None:
            yield (
                "when.user has no effect: the time since the last key or move cannot be told here"
                " (docs/guest.md)"
            )
        if when.gpu and self._gpus.nvml is None:
            yield "when.gpu has no effect: no NVIDIA driver answers here"
        if when.metered == "pause" and facts.metered is None:
            yield (
                "when.metered has no effect: NetworkManager does not tell here whether the network is metered"
            )
        if when.temperature and facts.temperature is None:
            yield "when.temperature has no effect: no sensor of the processor can be read here"
