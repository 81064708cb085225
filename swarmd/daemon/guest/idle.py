"""How long ago the user touched keyboard or mouse, by whatever tells it here.

The shortest of all answers counts.

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
from pathlib import Path
from typing import Final

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
    return lambda now: min((idle for source in sources if (idle := source(now)) is not None), default=None)


def mutter(run: Callable[[Sequence[str]], str]) -> float | None:
    try:
        kind, _, milliseconds = run(_MUTTER).strip().partition(" ")
        return int(milliseconds) / 1000 if kind == "t" else None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def io_registry(run: Callable[[Sequence[str]], str]) -> float | None:
    try:
        found = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', run(("ioreg", "-c", "IOHIDSystem", "-d", "4")))
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
    now = clock()
    # A read that is still to come was before the clock was set back.
    return min((now - at for at in read if at <= now), default=None)


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
        if self._changed_at is None:
            return None
        # The clock may have been set back.
        self._changed_at = min(self._changed_at, now)
        return now - self._changed_at


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
