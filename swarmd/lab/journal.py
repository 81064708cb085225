"""A file of JSON lines that can be cut back to an earlier point that was durable."""

import fcntl
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec


class Mark(msgspec.Struct, frozen=True):
    """A point in a journal: what is before it."""

    bytes: int = 0
    sha256: str = sha256().hexdigest()


class Journal:
    """One process at a time: opening it waits until no other process has it open.

    Raises OSError, as files do.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError:
            self._file.close()
            raise
        self._digest, self._bytes = sha256(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def append(self, line: Any) -> None:
        data = msgspec.json.encode(line) + b"\n"
        self._file.write(data)
        self._file.flush()
        self._digest.update(data)
        self._bytes += len(data)

    def mark(self) -> Mark:
        """Write everything so far to disk, and return this point."""
        os.fsync(self._file.fileno())
        return Mark(self._bytes, self._digest.hexdigest())

    def back_to(self, mark: Mark) -> None:
        """Drop what is behind the mark; an empty one is the beginning of every file.

        ValueError where the file does not begin with it.
        """
        self._file.seek(0)
        self._digest, self._bytes = sha256(self._file.read(mark.bytes)), mark.bytes
        if self._digest.hexdigest() != mark.sha256:
            raise ValueError("it does not begin with what was written")
        self._file.truncate(mark.bytes)

    def lines(self) -> Iterator[bytes]:
        self._file.seek(0)
        yield from self._file
