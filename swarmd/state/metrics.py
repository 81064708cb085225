"""metrics.jsonl, one line a round: what each field means, writing the file, and reading it."""

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from p2p import durable
from swarmd.errors import CannotRecord
from swarmd.types import RoundLine

# Nearly always a line has less.
_LONG_LINE_BYTES = 4096
# A file this large is set aside, in place of the one set aside before: some 140,000 rounds in both.
ROTATE_BYTES = 2**26


class MetricsFile:
    """metrics.jsonl, open for appending. Raises CannotRecord.

    A torn last line is cut off, and lines of later rounds, whose work the checkpoint does not hold: they will
    be played again. A line that a disk damaged stays where it is, and is left out by who reads. A file of
    `most` bytes is set aside as `older` names it, so that weeks of short rounds do not fill the disk.

    resumed_round: the round of the checkpoint we go on from (0 for a fresh start). notes: what is missing.
    """

    def __init__(self, path: Path, resumed_round: int, most: int = ROTATE_BYTES) -> None:
        self.path, self._most = path, most
        self.notes: list[str] = []  # notes for the operator
        try:
            self._open()
            aside, first, last = _cut(older(path), 0, resumed_round) if older(path).exists() else (0, 1, 0)
            lines, first_here, _ = _cut(path, last, resumed_round)
        except OSError as error:
            raise CannotRecord.to(path, error) from None
        # Rounds before the older file's first line were set aside twice.
        if missing := resumed_round + 1 - (first or first_here or 1) - aside - lines:
            self.notes.append(
                f"{path.name} was damaged or cut: {missing} of the {resumed_round} rounds behind have no line"
                " there any more"
            )

    def _open(self) -> None:
        # The umask applies: others may read it.
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        durable.sync(self.path.parent)

    def append(self, line: RoundLine) -> None:
        """Write one line, in one call. Raises CannotRecord, with the file as it was before."""
        data = msgspec.json.encode(line) + b"\n"
        try:
            if (before := os.fstat(self._file).st_size) >= self._most:
                # Set the file aside and begin another.
                os.fsync(self._file)
                self.path.replace(older(self.path))
                os.close(self._file)
                self._open()
                before = 0
            written = os.write(self._file, data)
        except OSError as error:
            raise CannotRecord.to(self.path, error) from None
        if written < len(data):
            os.ftruncate(self._file, before)
            raise CannotRecord(f"{self.path}: the disk is full. Free some space.")

    def sync(self) -> None:
        """Return when all lines are durable. Raises CannotRecord."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise CannotRecord.to(self.path, error) from None

    def close(self) -> None:
        os.close(self._file)


def older(path: Path) -> Path:
    """Return the file that a metrics file's earlier lines were set aside in."""
    return path.with_name(f"{path.name}.1")


def read_metrics(path: Path, last: int | None = None) -> Sequence[RoundLine]:
    """Return the lines of a metrics file, as `each_round` does.

    last: read only about so many lines, from the end of the file; weeks of rounds are gigabytes in memory.
    """
    return [*deque(each_round(path, tail=None if last is None else last * _LONG_LINE_BYTES), last)]


def each_round(path: Path, last: float = math.inf, tail: int | None = None) -> Iterator[RoundLine]:
    """Yield the lines of the rounds up to `last`, with one line at a time in memory.

    Torn lines are left out, and rounds that come again. An absent file has no lines. tail: of the end of all
    lines, only so many bytes. Raises CannotRecord where a file cannot be read.
    """
    before = 0
    try:
        with ExitStack() as stack:
            # The newer one is opened first: what is set aside meanwhile is read twice, and not left out.
            files = [stack.enter_context(each.open("rb")) for each in (path, older(path)) if each.exists()]
            sizes = [file.seek(0, os.SEEK_END) for file in files]
            skipped = 0 if tail is None else sum(sizes) - tail
            for file, size in zip(reversed(files), reversed(sizes), strict=True):
                file.seek(max(0, skipped))
                skipped -= size
                for raw in file:
                    line = parsed(raw)
                    if line is not None and before < line.round <= last:
                        before = line.round
                        yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise CannotRecord(
            f"{path}: cannot be read: {error.strerror or error}. Move it away, or mend its permissions."
        ) from None


def parsed(raw: bytes) -> RoundLine | None:
    """Return a line of the file; None if it is not one that we wrote."""
    try:
        return msgspec.json.decode(raw, type=RoundLine)
    except (ValueError, RecursionError):
        return None


def _cut(path: Path, before: int, round_number: int) -> tuple[int, int, int]:
    """Cut off what comes after this round. Raises OSError.

    before: the last round of the file before it. Returns how many lines are left, and the first and the last
    round.
    """
    lines = first = size = 0
    with path.open("rb+") as file:
        # One line at a time is in memory.
        for raw in file:
            line = parsed(raw) if raw.endswith(b"\n") else None
            if line is not None and before < line.round <= round_number:
                before, lines, size = line.round, lines + 1, file.tell()
                first = first or before
        file.truncate(size)
    return lines, first, before
