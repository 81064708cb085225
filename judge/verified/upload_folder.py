"""Uploaded weights on disk, between their arrival and their evaluation: a file is whole or it is gone.

ID.part           arriving
ID.safetensors    whole, synced, and named in the database; removed once its evaluation has ended
"""

import contextlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from judge.verified.weights_check import WeightsCheck
from p2p import durable

WHOLE, PART = ".safetensors", ".part"
# The ids of uploads, for a pattern.
_ID = "[0-9a-f]" * 32


class UploadFolder:
    """The folder of uploads. Raises OSError where the disk is full or broken."""

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
        """Remove what an earlier run of the judge left behind. Other files are not touched."""
        for path in (*self._path.glob(_ID + WHOLE), *self._path.glob(_ID + PART)):
            if path.suffix == PART or path.stem not in ids:
                path.unlink(missing_ok=True)

    def remove(self, id: str) -> None:
        self.file(id).unlink(missing_ok=True)

    def begin(self, id: str, check: WeightsCheck) -> "ArrivingFile":
        return ArrivingFile(self._path / (id + PART), self.file(id), check)


class ArrivingFile:
    """A file that arrives. Close it, whatever happens: what was not finished is removed then."""

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
        """Complete the file, which is on disk when this returns. Raises UnfitWeights, too."""
        self._check.end()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.rename(self._whole)
        durable.sync(self._whole.parent)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # What was not written yet cannot be written.
            self._file.close()
        self._part.unlink(missing_ok=True)
