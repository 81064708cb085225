"""Measures the node's CPU time and disk writes.

All of the node's processes count: the daemon, the trainer, the verifier, workers and p2pd.
"""

import contextlib
from collections.abc import Collection
from typing import Final

import psutil

from swarmd.state.status import Usage

# Seconds between two searches for new processes: a search lists all processes of the machine.
FIND_EVERY_S: Final = 5.0


class ProcessMeter:
    """Counts CPU time and disk writes of this process and its descendants, since the last `read`.

    A process that ends adds its CPU time to its parent's, so the sum over all running processes only rises.
    Only the figures of processes whose parent was killed are lost.

    found_at: time of the last search for new processes. Only the `read` at that time is complete; the usage
        of a process that starts between two searches is counted at the next search.
    """

    def __init__(self, now: float) -> None:
        self._root = psutil.Process()
        self._processes = [self._root]
        self.found_at = now - FIND_EVERY_S
        self._totals = self._read(now)

    def pids(self) -> Collection[int]:
        """Return the ids of the node's processes, as of the last search."""
        return [process.pid for process in self._processes]

    def read(self, now: float) -> Usage:
        before, self._totals = self._totals, self._read(now)
        written = (
            None if before[1] is None or self._totals[1] is None else max(0, self._totals[1] - before[1])
        )
        return Usage(max(0.0, self._totals[0] - before[0]), bytes_written=written)

    def _read(self, now: float) -> tuple[float, int | None]:
        if not 0 <= now - self.found_at < FIND_EVERY_S:
            self.found_at = now
            with contextlib.suppress(psutil.Error):
                self._processes = [self._root, *self._root.children(recursive=True)]
        cpu, written, known = 0.0, 0, True
        # Read children before parents: a process that ends meanwhile is then counted at least once.
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
