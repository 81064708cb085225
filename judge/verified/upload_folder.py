"""Uploaded weights on disk, from their arrival to their evaluation. A file is complete or absent.

ID.part           arriving
ID.safetensors    complete, synced, and named in the database; removed once its evaluation has ended
"""

import contextlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from judge.verified.weights_check import WeightsCheck
from p2p import durable

WHOLE, PART = ".safetensors", ".part"
# Glob pattern of an upload's id.
_ID = "[0-9a-f]" * 32


class UploadFolder:
    """The folder of uploads. Raises OSError if the disk is full or broken."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._path).free

    def file(self, id: str) -> Path:
        return self._path / (id + WHOLE)

    def whole(self) -> list[str]:
        """Return the ids of the uploads that are complete."""
        return [path.stem for path in self._path.glob(_ID + WHOLE)]

    def keep_only(self, ids: Collection[str]) -> None:
        """Remove files that an earlier run of the judge left behind. Other files are not touched."""
        for path in (*self._path.glob(_ID + WHOLE), *self._path.glob(_ID + PART)):
            if path.suffix == PART or path.stem not in ids:
                path.unlink(missing_ok=True)

    def remove(self, id: str) -> None:
        self.file(id).unlink(missing_ok=True)

    def begin(self, id: str, check: WeightsCheck) -> "ArrivingFile":
        return ArrivingFile(self._path / (id + PART), self.file(id), check)


class ArrivingFile:
    """A file that arrives. Always close it: closing removes an unfinished file."""

    def __init__(self, part: Path, whole: Path, check: WeightsCheck) -> None:
        self._part, self._whole, self._check = part, whole, check
        self._file = os.fdopen(
            os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
        )

    def write(self, piece: bytes) -> None:
        """Write and check a piece of the file. Raises OSError, UnfitWeights."""
        self._check.feed(piece)
        self._file.write(piece)

    def finish(self) -> None:
        """Complete the file; it is on disk when this returns. Raises UnfitWeights, OSError."""
        self._check.end()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.rename(self._whole)
        durable.sync(self._whole.parent)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Buffered bytes could not be written; the file is removed anyway.
            self._file.close()
        self._part.unlink(missing_ok=True)
