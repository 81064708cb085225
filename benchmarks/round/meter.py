"""Measures time and peak memory.

The module uses the standard library only, unless CUDA is used, because it is imported in the peers'
environments.
"""

import resource
import sys
import time
from typing import Any


class Meter:
    """Measures time and memory.

    On the CPU: CPU seconds of all threads of this process, and its largest resident set so far. Waiting for a
    turn takes no CPU seconds. On CUDA: wall seconds, the device's work included, and the most memory that
    torch has allocated on the device since the last `begin`.
    """

    def __init__(self, device: str) -> None:
        """Measure a device: "cpu" or "cuda"."""
        self._cuda: Any = None
        if device == "cuda":
            import torch

            self._cuda = torch.cuda

    def now(self) -> float:
        if self._cuda is None:
            return time.process_time()
        self._cuda.synchronize()
        return time.perf_counter()

    def begin(self) -> float:
        """Return `now`, and reset the peak memory if the device allows that."""
        if self._cuda is not None:
            self._cuda.reset_peak_memory_stats()
        return self.now()

    def peak_mib(self) -> float:
        if self._cuda is not None:
            return float(self._cuda.max_memory_allocated()) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
            1024 if sys.platform != "darwin" else 1024**2
        )
