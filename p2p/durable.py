"""Durable writes: after a power cut a file or a folder is wholly the old one or wholly the new one.

Also numbers on disk that outlive a crash, and the sequence numbers of our own frames.
"""

import errno
import itertools
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from p2p.errors import StateUnwritable


def replace(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Put `data` at `path`, whatever was there before. Raises OSError; the old file is then untouched."""
    _place(path, data, mode, os.replace)


def create(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Put `data` at `path`, where nothing is yet.

    An existing file is never touched. Raises FileExistsError, or another OSError.
    """
    _place(path, data, mode, _link)


def set_aside(path: Path) -> Path:
    """Rename a file that cannot be used, so that it can be looked into. Returns its new path."""
    aside = path.with_name(f"{path.name}.corrupt")
    path.replace(aside)
    return aside


def keep_aside(path: Path) -> Path:
    """Rename a file or folder that something else is to replace. Returns its new path, which was free."""
    names = (path.with_name(f"{path.name}.old{number or ''}") for number in itertools.count())
    aside = next(name for name in names if not name.exists() and not name.is_symlink())
    path.rename(aside)
    return aside


def name_folder(draft: Path, path: Path, *, replacing: bool = False) -> None:
    """Rename a finished folder to `path` once every file in it is on disk. Raises OSError.

    replacing: remove the folder that is there. Without it there may be none, or an empty one.
    """
    for entry in [*sorted(draft.rglob("*"), reverse=True), draft]:
        # The content of a folder is synced before the folder.
        sync(entry)
    if replacing and path.exists():
        shutil.rmtree(path)
    draft.rename(path)
    sync(path.parent)


def _place(path: Path, data: bytes, mode: int, step: Callable[[Path, Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        step(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(draft: Path, path: Path) -> None:
    """Move a draft to a path where no file is yet.

    A hard link refuses to replace a file, in one step. On file systems without links an empty file holds the
    place first.
    """
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        path.touch(exist_ok=False)
        draft.replace(path)


log = logging.getLogger(__name__)


class NumberFile:
    """One number on disk. A lost file counts as 0, and a damaged one, which is set aside."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises StateUnwritable where it exists and cannot be read."""
        self._path = path
        self.value = self._stored()

    def write(self, value: int) -> None:
        """Replace the number; it is on disk when this returns. Raises StateUnwritable."""
        try:
            replace(self._path, b"%d\n" % value)
        except OSError as error:
            raise StateUnwritable(
                f"cannot write {self._path}: {error.strerror}; check the folder's permissions and the free"
                " space"
            ) from None
        self.value = value

    def _stored(self) -> int:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise StateUnwritable(
                f"cannot read {self._path}: {error.strerror}; check who owns it and its folder"
            ) from None
        if text.endswith(b"\n") and text[:-1].isdigit() and len(text) <= 20:
            return int(text)
        aside = set_aside(self._path)
        log.warning("%s was damaged and is now %s; the clock takes its place", self._path, aside)
        return 0


class SequenceFile:
    """An iterator of rising numbers, none used twice. Reserves a block of them on disk before the first.

    A lost or damaged file does no harm: numbers then go on from the clock, in milliseconds. A node that uses
    fewer than a thousand a second can never have reached those.
    """

    def __init__(self, path: Path, clock: Callable[[], float], *, block: int = 1000) -> None:
        """Read the file. Raises StateUnwritable where it exists and cannot be read."""
        self._reserved, self._block = NumberFile(path), block
        self._next = self._end = max(self._reserved.value, int(clock() * 1000))

    def __iter__(self) -> "SequenceFile":
        return self

    def __next__(self) -> int:
        """Return the next number.

        Raises StateUnwritable when a new block cannot be reserved; then nothing may be published.
        """
        if self._next >= self._end:
            self._reserved.write(self._next + self._block)
            self._end = self._reserved.value
        self._next += 1
        return self._next - 1
