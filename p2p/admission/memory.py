"""Keeps the replay log and the reputation over restarts, in two files of the state folder."""

from collections.abc import Callable
from pathlib import Path

from p2p.admission import reputation_file
from p2p.admission.inbox import Memory, Trace
from p2p.admission.replay_log import ReplayLog
from p2p.admission.reputation import Reputation

SEEN = "seen"
REPUTATION = "reputation"
SAVE_EVERY = 120.0  # seconds; scores since then may be lost in a crash


class AdmissionMemory:
    """folder: None keeps nothing over restarts; frames sent before now are then stale."""

    def __init__(self, folder: Path | None, clock: Callable[[], float]) -> None:
        self.reputation = Reputation()
        self._clock = clock
        self._seen = ReplayLog(folder / SEEN, clock) if folder is not None else None
        self._path = folder / REPUTATION if folder is not None else None
        self._saved_at = clock()
        self.memory = self._seen.load() if self._seen is not None else Memory(horizon=int(clock() * 1000))
        if self._path is not None:
            reputation_file.load(self._path, self.reputation, clock())

    def note(self, trace: Trace) -> None:
        """A frame is admitted."""
        if self._seen is not None:
            self._seen.note(trace)

    def save_where_due(self, memory: Callable[[], Memory], now: float) -> None:
        if self._seen is not None and self._seen.due:
            self._seen.save(memory())
        if self._path is not None and not 0 <= now - self._saved_at < SAVE_EVERY:
            self._saved_at = now
            reputation_file.save(self._path, self.reputation)

    def close(self, memory: Memory) -> None:
        """The member stops."""
        if self._seen is not None:
            self._seen.save(memory, closed=True)
        if self._path is not None:
            reputation_file.save(self._path, self.reputation)
