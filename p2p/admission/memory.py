"""Keeps the replay log and the reputation over restarts, in two files of the state folder."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import trio

from p2p import durable
from p2p.admission.replay_log import ReplayLog
from p2p.admission.replays import Memory, Trace
from p2p.admission.reputation import Reputation

SEEN = "seen"
REPUTATION = "reputation"
# The file of a full `Reputation` has a quarter of this.
MAX_FILE_BYTES = 8 * 1024 * 1024
_CRC_BYTES = 4
# How often to check whether something is due.
CHECK_EVERY_S = 10.0
# Changes of scores since the last save may be lost in a crash.
SAVE_EVERY_S = 120.0

log = logging.getLogger(__name__)


class AdmissionMemory:
    """The two files of one member.

    folder: None keeps nothing over restarts; frames sent before now are then old.
    """

    def __init__(self, folder: Path | None, clock: Callable[[], float]) -> None:
        self.reputation = Reputation()
        self._clock = clock
        self._seen = ReplayLog(folder / SEEN, clock) if folder is not None else None
        self._path = folder / REPUTATION if folder is not None else None
        self._saved_at = clock()
        self.memory = self._seen.load() if self._seen is not None else Memory(start=int(clock() * 1000))
        if self._path is not None:
            load_reputation(self._path, self.reputation, clock())

    def note(self, trace: Trace) -> None:
        """Note an admitted frame."""
        if self._seen is not None:
            self._seen.note(trace)

    async def save_regularly(self, memory: Callable[[], Memory]) -> None:
        """Save what is due until cancelled, in a thread, as the disk may be slow."""
        while True:
            await trio.sleep(CHECK_EVERY_S)
            if self._seen is not None and self._seen.due:
                self._seen.begin()
                await trio.to_thread.run_sync(self._seen.save, memory())
            if self._path is not None and not 0 <= self._clock() - self._saved_at < SAVE_EVERY_S:
                self._saved_at = self._clock()
                await trio.to_thread.run_sync(save_reputation, self._path, self.reputation.dump())

    def close(self, memory: Memory) -> None:
        """Save for the last time, as the member stops."""
        if self._seen is not None:
            self._seen.save(memory, closed=True)
        if self._path is not None:
            save_reputation(self._path, self.reputation.dump())


def load_reputation(path: Path, reputation: Reputation, now: float) -> None:
    """Load the scores. A damaged file is set aside, and all begin anew: hostile peers are found again."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES)
        if int.from_bytes(data[:_CRC_BYTES], "big") != crc32(data[_CRC_BYTES:]):
            raise ValueError("not what was written")  # noqa: TRY301
        reputation.load(data[_CRC_BYTES:], now)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):  # the folder is not writable: `save` says so
            aside = durable.set_aside(path)
            log.warning(
                "%s was damaged (%s) and is now %s; all scores of peers begin anew", path, error, aside
            )


def save_reputation(path: Path, data: bytes) -> None:
    try:
        durable.replace(path, crc32(data).to_bytes(_CRC_BYTES, "big") + data)
    except OSError as error:
        log.warning(
            "cannot write %s: %s; after a restart all scores of peers begin anew", path, error.strerror
        )
