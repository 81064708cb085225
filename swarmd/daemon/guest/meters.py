"""Measures what the node costs its machine: CPU time, disk writes, and an estimate of the energy.

It counts all the node's processes: the daemon, the trainer, the verifier, workers and p2pd. The energy is the
node's share of the processor's, and the whole of its GPUs' while it trains.

NVML tells of the whole machine's NVIDIA GPUs. A GPU is the node's where one of its processes has a CUDA
context there. In a container NVML's process ids are those outside, so that no GPU is the node's and nothing
is told.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import psutil

# How often to search for new processes: a search reads all of the machine's.
FIND_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Spent:
    cpu_seconds: float
    bytes_written: int | None  # None: the platform does not tell


class ProcessMeter:
    """Counts CPU time and disk writes; `read` returns what was spent since the last call.

    A process that ends hands its figures on to its parent, so the sum over all that run only ever rises. Only
    the figures of processes whose parent was killed are lost.
    """

    def __init__(self, now: float, pid: int | None = None) -> None:
        """Meter a process with all its descendants.

        pid: of the process; None for this one.
        """
        self._root = psutil.Process(pid or os.getpid())
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


def all_seconds(times: Any) -> float:
    """Add up psutil's times of all cores, in seconds.

    User time contains guest time already, so that is not added again.
    """
    return float(sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))


def busy_seconds(times: Any) -> float:
    return all_seconds(times) - float(times.idle + getattr(times, "iowait", 0.0))


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


log = logging.getLogger(__name__)


def load() -> Any:
    """Load NVML's bindings (nvidia-ml-py). Raises their NVMLError where there is no driver."""
    import pynvml  # 0.2 s of CPU

    pynvml.nvmlInit()
    return pynvml


class NvidiaGpus:
    """Asks NVML about the node's GPUs. A call takes some milliseconds: make it in a thread.

    pids: returns the ids of the node's processes. load: replaces `load` in tests.
    """

    def __init__(self, pids: Callable[[], Collection[int]], load: Callable[[], Any] = load) -> None:
        self._pids, self._load = pids, load
        # The time of the newest sample of each GPU, in µs: NVML returns those after it.
        self._sampled: dict[int, int] = {}

    @cached_property
    def nvml(self) -> Any:
        """The bindings; None where no NVIDIA driver answers."""
        try:
            return self._load()
        except Exception as error:  # NVMLError, a broken driver's OSError, or no package
            log.debug("no NVML: %s", error)
            return None

    def used_by_others(self) -> float | None:
        """Return what others take of the GPU that they use most, as a share; None where it cannot be told."""
        return self._of_each(self._used_by_others, max)

    def watts(self) -> float | None:
        """Return the power that the node's GPUs draw now; None where it cannot be told."""
        return self._of_each(lambda _, gpu: float(self.nvml.nvmlDeviceGetPowerUsage(gpu)) / 1000, sum)

    def _of_each(
        self, ask: Callable[[int, Any], float], together: Callable[[list[float]], float]
    ) -> float | None:
        if self.nvml is None:
            return None
        try:
            found = [ask(index, gpu) for index, gpu in self._ours()]
        except self.nvml.NVMLError as error:  # not supported by this GPU or on this platform
            log.debug("NVML: %s", error)
            return None
        return together(found) if found else None

    def _ours(self) -> Iterator[tuple[int, Any]]:
        pids = set(self._pids())
        for index in range(self.nvml.nvmlDeviceGetCount()):
            gpu = self.nvml.nvmlDeviceGetHandleByIndex(index)
            if any(each.pid in pids for each in self.nvml.nvmlDeviceGetComputeRunningProcesses(gpu)):
                yield index, gpu

    def _used_by_others(self, index: int, gpu: Any) -> float:
        try:
            samples = self.nvml.nvmlDeviceGetProcessUtilization(gpu, self._sampled.get(index, 0))
        except self.nvml.NVMLError as error:
            # Nothing used it since. The bindings raise even NVML's success where there is no sample.
            if error.value in (self.nvml.NVML_SUCCESS, self.nvml.NVML_ERROR_NOT_FOUND):
                return 0.0
            raise
        samples.sort(key=lambda sample: sample.timeStamp)
        self._sampled[index] = samples[-1].timeStamp
        newest = {sample.pid: sample.smUtil for sample in samples}
        ours = set(self._pids())
        return float(sum(share for pid, share in newest.items() if pid not in ours)) / 100
