"""Keeps over restarts what admission must not forget, in a file of the state folder."""

import logging
from collections.abc import Callable
from pathlib import Path

from p2p.errors import StateUnwritable
from p2p.sequence import NumberFile

SEEN = "seen"
# What is admitted in this time one write to disk covers. After a crash the node is deaf for so long at most.
PROMISE_S = 20.0

log = logging.getLogger(__name__)


class SeenFile:
    """What one member keeps over restarts: when its last run heard frames.

    folder: None keeps nothing. not_before: seconds since the epoch; frames sent earlier are old, as the last
    run may have admitted them. The file holds a time after which no admitted frame was sent. It is at most
    PROMISE_S later than the moment it was written, by our clock, as no frame is admitted from further ahead.
    One that cannot be read is set aside.
    """

    def __init__(self, folder: Path | None, clock: Callable[[], float]) -> None:
        self._clock, self._newest, self._promised = clock, 0, 0
        self._seen = NumberFile(folder / SEEN) if folder is not None else None
        self.not_before = max(int(clock() * 1000), self._seen.value + 1 if self._seen else 0) / 1000

    def note(self, sent_at: int) -> None:
        """Note when an admitted frame was sent, in ms. It may be used when this returns."""
        self._newest = max(self._newest, sent_at)
        if sent_at > self._promised:
            self._promise(max(int((self._clock() + PROMISE_S) * 1000), sent_at))

    def close(self) -> None:
        """Save for the last time, as the member stops."""
        if self._newest:
            self._promise(self._newest)

    def _promise(self, until: int) -> None:
        self._promised = until
        try:
            if self._seen is not None:
                # Not synced: beside a checkpoint that is written, all connections would wait for the disk. A
                # machine that lost its power is back later than any admitted frame says it was sent.
                self._seen.write(until, synced=False)
        except StateUnwritable as error:
            log.warning("%s. After a crash a frame of the last seconds may be admitted twice", error)
