"""The progress of a download, in words."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from swarmd.terminal import duration_words

REPORT_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Download:
    source: str  # name of the model or file, in words
    done: int  # bytes that are on the disk, of all files
    total: int
    rate: float  # bytes per second; 0 if not known yet
    doing: str = "downloading"

    @property
    def seconds_left(self) -> float | None:
        """The seconds left; None while the rate is not known, 0 when everything is here."""
        left = max(0, self.total - self.done)
        return left / self.rate if self.rate > 0 else None if left else 0.0

    @property
    def words(self) -> str:
        """The progress in words: "downloading qwen2.5-0.5b: 312 of 988 MB, 2 min left"."""
        words, left = (
            f"{self.doing} {self.source}: {self.done / 1e6:.0f} of {self.total / 1e6:.0f} MB",
            self.seconds_left,
        )
        return words + (f", {duration_words(left)} left" if left else "")


class Progress:
    """Reports a download's progress: when a file begins, every few seconds, and at the end.

    To the hub's library it is a progress bar (`update`).
    """

    def __init__(
        self,
        source: str,
        total: int,
        report: Callable[[Download], None],
        clock: Callable[[], float] = time.monotonic,
        doing: str = "downloading",
    ) -> None:
        """Start a download.

        source: name of the model or file. total: bytes of all files. doing: the verb.
        """
        self._source, self._total, self._report, self._clock = source, total, report, clock
        self._doing = doing
        # Bytes on the disk, and the part of them that arrived since the start.
        self._there = self._got = 0
        self._begun = self._said = clock()

    def found(self, size: int) -> None:
        """Start a file of which an earlier run left `size` bytes."""
        self._there += size
        self._say()

    def update(self, size: int) -> None:
        """Count bytes that arrived, or, if negative, bytes that must be downloaded again."""
        self._there, self._got = self._there + size, self._got + max(0, size)
        if self._there >= self._total or self._clock() >= self._said + REPORT_EVERY_S:
            self._say()

    def _say(self) -> None:
        self._said = self._clock()
        rate = self._got / max(1e-9, self._said - self._begun)
        self._report(Download(self._source, self._there, self._total, rate, self._doing))
