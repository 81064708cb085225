"""An estimate of the energy that the node takes.

Its share of the processor's, and the whole of its CUDA device's while it trains.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil

from swarmd.daemon.guest.asking import Run, busy_seconds, run

READ_EVERY: Final = 10.0  # seconds
LONGEST: Final = 2 * READ_EVERY  # seconds between two readings; after more the machine has slept
_POWER: Final = ("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits")


class EnergyMeter:
    """`read` gives what was taken since the last call.

    folder: where Linux has the processor's counters (RAPL), for root alone on most.
    """

    def __init__(
        self,
        folder: Path = Path("/sys/class/powercap"),
        times: Callable[[], Any] = psutil.cpu_times,
        ask: Run = run,
    ) -> None:
        self._packages = sorted(
            each for each in folder.glob("intel-rapl:*") if _text(each / "name").startswith("package")
        )
        self._times, self._ask = times, ask
        self._joules = {package: _joules(package) for package in self._packages}
        self._busy = busy_seconds(times())
        self._at: float | None = None

    def read(self, now: float, ours: float, on_gpu: bool) -> float | None:
        """Return watt-hours used since the last call; None where nothing can be measured.

        ours: CPU seconds since the last call. on_gpu: whether the node trains on a CUDA device.
        """
        since = None if self._at is None else max(0.0, now - self._at)
        slept, self._at = since is not None and since > LONGEST, now
        device = self._device(min(since, LONGEST)) if on_gpu and since is not None else None
        joules = [found for found in (self._processor(ours, slept), device) if found is not None]
        return sum(joules) / 3600 if joules else None

    def _processor(self, ours: float, slept: bool) -> float | None:
        busy = busy_seconds(self._times())
        share, self._busy = min(1.0, ours / max(busy - self._busy, 1e-9)), busy
        taken = []
        for package in self._packages:
            before, now = self._joules[package], _joules(package)
            self._joules[package] = now
            # A counter below its old value has wrapped, or was reset while the machine slept.
            if before is not None and now is not None and not (slept and now < before):
                # The counter begins anew there
                around = float(_text(package / "max_energy_range_uj") or 0) / 1e6
                taken.append(now - before if now >= before else now - before + around)
        return share * sum(taken) if taken else None

    def _device(self, seconds: float) -> float | None:
        """Return the power that the first device of nvidia-smi draws now, times `seconds`."""
        try:
            return float(self._ask(_POWER).split()[0]) * seconds
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _joules(package: Path) -> float | None:
    text = _text(package / "energy_uj")
    return int(text) / 1e6 if text.isdecimal() else None
