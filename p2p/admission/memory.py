"""Keeps over restarts what admission must not forget, in two files of the state folder."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from p2p import durable
from p2p.admission.reputation import Reputation
from p2p.errors import StateUnwritable
from p2p.sequence import NumberFile

SEEN = "seen"
REPUTATION = "reputation"
# The file of a full `Reputation` has a quarter of this.
MAX_FILE_BYTES = 8 * 1024 * 1024
# What is admitted in this time one write to disk covers. After a crash the node is deaf for so long at most.
PROMISE_S = 20.0
# Changes of scores since the last save may be lost in a crash.
SAVE_EVERY_S = 120.0

log = logging.getLogger(__name__)


class AdmissionMemory:
    """What one member keeps over restarts: the scores of peers, and when its last run heard frames.

    folder: None keeps nothing. not_before: seconds since the epoch; frames sent earlier are old. They may
    have been admitted by the last run: on disk is a promise that it admitted none that was sent later, and
    that is at most PROMISE_S after the moment it was made, by our clock, whatever times the frames say.
    """

    def __init__(self, folder: Path | None, clock: Callable[[], float]) -> None:
        """Read the files. What cannot be read is set aside."""
        self.reputation = Reputation()
        self._clock, self._newest, self._promised = clock, 0, 0
        self._seen = NumberFile(folder / SEEN) if folder is not None else None
        self._path = folder / REPUTATION if folder is not None else None
        self.not_before = max(int(clock() * 1000), self._seen.value + 1 if self._seen else 0) / 1000
        if self._path is not None:
            load = partial(self.reputation.load, now=clock())
            durable.load(self._path, load, "all scores of peers begin anew", MAX_FILE_BYTES)

    def note(self, sent_at: int) -> None:
        """Note when an admitted frame was sent, in ms. It may be used when this returns."""
        self._newest = max(self._newest, sent_at)
        if sent_at > self._promised:
            self._promise(max(int((self._clock() + PROMISE_S) * 1000), sent_at))

    async def save_regularly(self) -> None:
        """Save the scores until cancelled, in a thread, as the disk may be slow."""
        while True:
            await trio.sleep(SAVE_EVERY_S)
            await trio.to_thread.run_sync(self._save, self.reputation.dump())

    def close(self) -> None:
        """Save for the last time, as the member stops."""
        if self._newest:
            self._promise(self._newest)
        self._save(self.reputation.dump())

    def _promise(self, until: int) -> None:
        self._promised = until
        try:
            if self._seen is not None:
                # Not synced: beside a checkpoint that is written, all connections would wait for the disk. A
                # machine that lost its power is back later than any admitted frame says it was sent.
                self._seen.write(until, synced=False)
        except StateUnwritable as error:
            log.warning("%s. After a crash a frame of the last seconds may be admitted twice", error)

    def _save(self, scores: bytes) -> None:
        if self._path is None:
            return
        try:
            durable.replace(self._path, scores)
        except OSError as error:
            log.warning(
                "cannot write %s: %s; after a restart all scores of peers begin anew",
                self._path,
                error.strerror,
            )
