"""Saves the time up to which frames may have been admitted, so that a restart admits no replays."""

import logging
from collections.abc import Callable
from pathlib import Path

from p2p.errors import StateUnwritable
from p2p.sequence import NumberFile

SEEN = "seen"
# One write covers the frames of this many seconds. After a crash the node refuses all frames for this long at
# most.
PROMISE_S = 20.0

log = logging.getLogger(__name__)


class SeenFile:
    """A file with a time (ms) that is no earlier than any admitted frame's time of sending.

    That time is at most PROMISE_S ahead of our clock at the time of writing. A damaged file is set aside.

    Args:
        folder: the state folder; None to keep nothing.
        clock: returns seconds since the epoch.

    Attributes:
        not_before: frames sent earlier are refused, because the last run may have admitted them. Seconds
            since the epoch.
    """

    def __init__(self, folder: Path | None, clock: Callable[[], float]) -> None:
        self._clock, self._newest, self._promised = clock, 0, 0
        self._seen = NumberFile(folder / SEEN) if folder is not None else None
        self.not_before = max(int(clock() * 1000), self._seen.value + 1 if self._seen else 0) / 1000

    def note(self, sent_at: int) -> None:
        """Note an admitted frame's time of sending, in ms. The frame may be used once this returns."""
        self._newest = max(self._newest, sent_at)
        if sent_at > self._promised:
            self._promise(max(int((self._clock() + PROMISE_S) * 1000), sent_at))

    def close(self) -> None:
        """Save for the last time when the member stops, with the exact time instead of one in the future."""
        if self._newest:
            self._promise(self._newest)

    def _promise(self, until: int) -> None:
        self._promised = until
        try:
            if self._seen is not None:
                # Not synced, because all connections would wait for the disk while a checkpoint is written.
                # A lost write after a power cut does no harm: the machine takes so long to start that the
                # clock is past every admitted frame's time of sending.
                self._seen.write(until, synced=False)
        except StateUnwritable as error:
            log.warning("%s. After a crash, frames of the last seconds may be admitted twice", error)
