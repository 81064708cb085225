"""Reads from NVML how much other programs use the node's NVIDIA GPUs, and how much power these draw.

NVML reports on the whole machine. A GPU counts as the node's if one of the node's processes has a CUDA
context on it. In a container, NVML reports process ids of the host, so no GPU counts as the node's and every
figure is None.
"""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import Any

log = logging.getLogger(__name__)


def load() -> Any:
    """Load NVML's bindings (nvidia-ml-py). Raises their NVMLError if there is no driver."""
    import pynvml  # 0.2 s of CPU

    pynvml.nvmlInit()
    return pynvml


class NvidiaGpus:
    """Asks NVML about the node's GPUs. A call takes some milliseconds, so make it in a thread.

    pids: returns the ids of the node's processes. load: replaces `load` in tests.
    """

    def __init__(self, pids: Callable[[], Collection[int]], load: Callable[[], Any] = load) -> None:
        self._pids, self._load = pids, load
        # The time of the newest sample of each GPU, in µs. NVML returns only samples after it.
        self._sampled: dict[int, int] = {}

    @cached_property
    def nvml(self) -> Any:
        """The bindings; None if no NVIDIA driver answers."""
        try:
            return self._load()
        except Exception as error:  # NVMLError, a broken driver's OSError, or no package
            log.debug("no NVML: %s", error)
            return None

    def used_by_others(self) -> float | None:
        """Return other programs' share of the GPU that they use most; None if it is unknown."""
        return self._of_each(self._used_by_others, max)

    def watts(self) -> float | None:
        """Return the power in watts that the node's GPUs draw now; None if it is unknown."""
        return self._of_each(self._watts, sum)

    def _watts(self, _index: int, gpu: Any) -> float | None:
        with contextlib.suppress(self.nvml.NVMLError):  # a card without MIG
            if self.nvml.nvmlDeviceGetMigMode(gpu)[0]:
                # The figure would cover all MIG slices, including other programs' slices.
                return None
        return float(self.nvml.nvmlDeviceGetPowerUsage(gpu)) / 1000

    def _of_each(
        self, ask: Callable[[int, Any], float | None], together: Callable[[list[float]], float]
    ) -> float | None:
        if self.nvml is None:
            return None
        try:
            found = [figure for each in self._ours() if (figure := ask(*each)) is not None]
        except self.nvml.NVMLError as error:  # not supported by this GPU or on this platform
            log.debug("NVML: %s", error)
            return None
        return together(found) if found else None

    def tells_use(self) -> bool:
        """Return whether the driver reports use by process: not in WSL or in MIG mode."""
        if self.nvml is None:
            return False
        with contextlib.suppress(self.nvml.NVMLError):  # a card that is lost
            for index, gpu in self._all():
                with contextlib.suppress(self.nvml.NVMLError):
                    self._used_by_others(index, gpu)
                    return True
        return False

    def _ours(self) -> Iterator[tuple[int, Any]]:
        pids = set(self._pids())
        for index, gpu in self._all():
            if any(each.pid in pids for each in self.nvml.nvmlDeviceGetComputeRunningProcesses(gpu)):
                yield index, gpu

    def _all(self) -> Iterator[tuple[int, Any]]:
        for index in range(self.nvml.nvmlDeviceGetCount()):
            yield index, self.nvml.nvmlDeviceGetHandleByIndex(index)

    def _used_by_others(self, index: int, gpu: Any) -> float:
        try:
            samples = self.nvml.nvmlDeviceGetProcessUtilization(gpu, self._sampled.get(index, 0))
        except self.nvml.NVMLError as error:
            # No newer sample: the GPU was idle. The bindings then raise an error, even for NVML_SUCCESS.
            if error.value in (self.nvml.NVML_SUCCESS, self.nvml.NVML_ERROR_NOT_FOUND):
                return 0.0
            raise
        samples.sort(key=lambda sample: sample.timeStamp)
        self._sampled[index] = samples[-1].timeStamp
        newest = {sample.pid: sample.smUtil for sample in samples}
        ours = set(self._pids())
        return float(sum(share for pid, share in newest.items() if pid not in ours)) / 100
