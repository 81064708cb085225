"""CPU time and disk writes of all processes of the node.

The daemon, the trainer, the verifier, workers and p2pd.
"""

import os
from dataclasses import dataclass
from typing import Final

import psutil

FIND_EVERY: Final = 5.0  # seconds between two searches for new processes: a search reads all of the machine's


@dataclass(frozen=True, slots=True)
class Spent:
    cpu_seconds: float
    bytes_written: int | None  # None: the platform does not tell


class ProcessMeter:
    """`read` gives what was spent since the last call.

    A process that ends hands its figures on to its parent, so the sum over all that run only ever rises. What
    is lost is that of processes whose parent was killed.
    """

    def __init__(self, now: float, pid: int | None = None) -> None:
        """Meter a process with all its descendants.

        pid: of the process; None for this one.
        """
        self._root = psutil.Process(pid or os.getpid())
        self._processes = [self._root]
        self._found_at = now - FIND_EVERY
        self._totals = self._read(now)

    def read(self, now: float) -> Spent:
        before, self._totals = self._totals, self._read(now)
        written = (
            None if before[1] is None or self._totals[1] is None else max(0, self._totals[1] - before[1])
        )
        return Spent(max(0.0, self._totals[0] - before[0]), written)

    def _read(self, now: float) -> tuple[float, int | None]:
        if not 0 <= now - self._found_at < FIND_EVERY:
            self._found_at = now
            self._processes = [self._root, *_descendants(self._root)]
        cpu, written = 0.0, 0
        known = True
        # Children first: what ends meanwhile is counted once at least
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
