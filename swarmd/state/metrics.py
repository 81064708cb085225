"""metrics.jsonl, one line a round: writing the file, and reading it. `types.RoundLine` has the fields."""

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

# Nearly all lines are shorter.
_LONG_LINE_BYTES = 4096
# A file this large is rotated, replacing the older rotated file: both together hold some 140,000 rounds.
ROTATE_BYTES = 2**26


class MetricsFile:
    """metrics.jsonl, open for appending. Raises CannotRecord.

    Opening truncates a torn last line and the lines of rounds after the checkpoint, as these rounds will be
    played again. A line that a disk error damaged stays in the file, and readers skip it. A file of `most`
    bytes is renamed to `older(path)`, so that weeks of short rounds do not fill the disk.

    resumed_round: the checkpoint's round (0 for a fresh start). notes: messages about missing lines.
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
        # Rounds before the older file's first line are gone by rotation, so they do not count as missing.
        if missing := resumed_round + 1 - (first or first_here or 1) - aside - lines:
            self.notes.append(
                f"{path.name} was damaged or cut: {missing} of the {resumed_round} rounds behind have no line"
                " there any more"
            )

    def _open(self) -> None:
        # The umask applies: other users may read the file.
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        durable.sync(self.path.parent)

    def append(self, line: RoundLine) -> None:
        """Write one line, in one call. Raises CannotRecord and leaves the file as it was."""
        data = msgspec.json.encode(line) + b"\n"
        try:
            if (before := os.fstat(self._file).st_size) >= self._most:
                # Rename the full file and begin another.
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
        """Wait until all lines are durable on disk. Raises CannotRecord."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise CannotRecord.to(self.path, error) from None

    def close(self) -> None:
        os.close(self._file)


def older(path: Path) -> Path:
    """Return the path of the rotated file with a metrics file's earlier lines."""
    return path.with_name(f"{path.name}.1")


def read_metrics(path: Path, last: int | None = None) -> Sequence[RoundLine]:
    """Return the lines of a metrics file, as `each_round` does.

    last: return only this many of the last lines; weeks of rounds are gigabytes in memory.
    """
    return [*deque(each_round(path, tail=None if last is None else last * _LONG_LINE_BYTES), last)]


def each_round(path: Path, last: float = math.inf, tail: int | None = None) -> Iterator[RoundLine]:
    """Yield the lines of the rounds up to `last`, with one line at a time in memory.

    Torn lines and repeated rounds are skipped. An absent file has no lines. tail: read only this many bytes
    from the end. Raises CannotRecord if a file cannot be read.
    """
    before = 0
    try:
        with ExitStack() as stack:
            # The newer file is opened first: a file rotated meanwhile is then read twice instead of missed.
            files = [stack.enter_context(each.open("rb")) for each in (path, older(path)) if each.exists()]
            sizes = [file.seek(0, os.SEEK_END) for file in files]
            skipped = 0 if tail is None else sum(sizes) - tail
            for file, size in zip(reversed(files), reversed(sizes), strict=True):
                file.seek(max(0, skipped))
                skipped -= size
                for raw in file:
                    if (line := parsed(raw)) is not None and before < line.round <= last:
                        before = line.round
                        yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise CannotRecord(
            f"{path}: cannot be read: {error.strerror or error}. Move it away, or correct its permissions."
        ) from None


def parsed(raw: bytes) -> RoundLine | None:
    """Parse a line of the file; return None if it is not a valid `RoundLine`."""
    try:
        return msgspec.json.decode(raw, type=RoundLine)
    except (ValueError, RecursionError):
        return None


def _cut(path: Path, before: int, round_number: int) -> tuple[int, int, int]:
    """Truncate the file after this round's line. Raises OSError.

    before: the last round of the older file. Returns the number of lines left, the first round and the last.
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
