"""Measures what the node costs its machine: CPU time, disk writes, and an estimate of the energy.

It counts all the node's processes: the daemon, the trainer, the verifier, workers and p2pd. The energy is the
node's share of the processor's, and the whole of its GPUs' while it trains.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from swarmd.daemon.guest.probes import busy_seconds

# How often to search for new processes: a search reads all of the machine's.
FIND_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Spent:
    cpu_seconds: float
    bytes_written: int | None  # None: the platform does not tell


class ProcessMeter:
    """Counts CPU time and disk writes of this process and its descendants, since the last `read`.

    A process that ends hands its figures on to its parent, so the sum over all that run only ever rises. Only
    the figures of processes whose parent was killed are lost.
    """

    def __init__(self, now: float) -> None:
        self._root = psutil.Process()
        self._processes = [self._root]
        self._found_at = now - FIND_EVERY_S
        self._totals = self._read(now)

    def pids(self) -> Collection[int]:
        """Return the ids of the node's processes, as of the last search."""
        return [process.pid for process in self._processes]

    def read(self, now: float) -> Spent:
        before, self._totals = self._totals, self._read(now)
        written = (
            None if before[1] is None or self._totals[1] is None else max(0, self._totals[1] - before[1])
        )
        return Spent(max(0.0, self._totals[0] - before[0]), written)

    def _read(self, now: float) -> tuple[float, int | None]:
        if not 0 <= now - self._found_at < FIND_EVERY_S:
            self._found_at = now
            self._processes = [self._root, *_descendants(self._root)]
        cpu, written = 0.0, 0
        known = True
        # Children come first: what ends meanwhile is counted at least once.
        for process in reversed(self._processes):
            try:
                times = process.cpu_times()
                cpu += times.user + times.system + times.children_user + times.children_system
                written += process.io_counters().write_bytes if known else 0
            except AttributeError:  # macOS has no io_counters
                known = False
            except psutil.Error:
                continue  # the process has ended
        return cpu, written if known else None


def _descendants(root: psutil.Process) -> list[psutil.Process]:
    try:
        return list(root.children(recursive=True))
    except psutil.Error:
        return []


READ_EVERY_S: Final = 10.0
# After a longer gap between two readings the machine has slept.
MAX_GAP_S: Final = 2 * READ_EVERY_S


class EnergyMeter:
    """Estimates energy; `read` returns what was used since the last call.

    watts: returns the power that the node's GPUs draw now; None where it cannot be told. folder: where Linux
    has the processor's counters (RAPL), mostly for root alone.
    """

    def __init__(
        self,
        watts: Callable[[], float | None],
        folder: Path = Path("/sys/class/powercap"),
        times: Callable[[], Any] = psutil.cpu_times,
    ) -> None:
        self._packages = sorted(
            each for each in folder.glob("intel-rapl:*") if _text(each / "name").startswith("package")
        )
        self._times, self._watts = times, watts
        self._joules = {package: _joules(package) for package in self._packages}
        self._busy = busy_seconds(times())
        self._at: float | None = None

    def read(self, now: float, ours: float, on_gpu: bool) -> float | None:
        """Return watt-hours used since the last call; None where nothing can be measured.

        ours: CPU seconds since the last call. on_gpu: whether the node trains on a CUDA device.
        """
        since = None if self._at is None else max(0.0, now - self._at)
        slept, self._at = since is not None and since > MAX_GAP_S, now
        watts = self._watts() if on_gpu and since is not None else None
        device = None if watts is None or since is None else watts * min(since, MAX_GAP_S)
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
                # The counter begins anew at its range.
                around = float(_text(package / "max_energy_range_uj") or 0) / 1e6
                taken.append(now - before if now >= before else now - before + around)
        return share * sum(taken) if taken else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _joules(package: Path) -> float | None:
    text = _text(package / "energy_uj")
    return int(text) / 1e6 if text.isdecimal() else None
