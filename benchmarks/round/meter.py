"""Measures time and peak memory.

It uses the standard library only, unless CUDA is used: the peers' environments import it.
"""

import resource
import sys
import time
from typing import Any


class Meter:
    """Measures time and memory.

    On the CPU: CPU seconds of this process, all threads, and its largest resident set so far. Waiting for a
    turn costs nothing. On CUDA: wall seconds, the device's work included, and the most that torch has held
    there since the last `begin`.
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
        """Return `now`; peak memory counts from here on if the device allows it."""
        if self._cuda is not None:
            self._cuda.reset_peak_memory_stats()
        return self.now()

    def peak_mib(self) -> float:
        if self._cuda is not None:
            return float(self._cuda.max_memory_allocated()) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
            1024 if sys.platform != "darwin" else 1024**2
        )
