"""Atomic, durable writes: after a power cut a file or folder has its old or its new content, never a mix."""

import contextlib
import errno
import glob
import itertools
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

log = logging.getLogger(__name__)

T = TypeVar("T")


def replace(path: Path, data: bytes, mode: int = 0o600, *, synced: bool = True) -> None:
    """Write a file, replacing an existing one.

    Args:
        path: the file. Missing parent folders are made.
        data: the new content.
        mode: permissions of the new file.
        synced: wait until the file is on disk. If False, the file survives kill -9, but a power cut may lose
            the old and the new content.

    Raises:
        OSError: the file cannot be written; the old file is unchanged.
    """
    _place(path, data, mode, os.replace, synced)


def create(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a new file. An existing file is never touched.

    Raises:
        FileExistsError: there is a file at `path`.
        OSError: the file cannot be written.
    """
    _place(path, data, mode, _link, synced=True)


def load(path: Path, read: Callable[[bytes], T], without: str, most: int = -1) -> T | None:
    """Read and parse a file. Return None if it is missing or damaged.

    A damaged file is set aside, with a warning in the log.

    Args:
        path: the file.
        read: parses the content. Raises ValueError if it is damaged.
        without: the consequence of a lost file, for the warning.
        most: how many bytes to read at most; -1 for all.
    """
    try:
        with path.open("rb") as file:
            return read(file.read(most))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        # msgspec's errors are ValueErrors. If the folder is not writable, the next save reports that.
        with contextlib.suppress(OSError):
            log.warning("%s was damaged (%s) and is renamed to %s: %s", path, error, set_aside(path), without)
        return None


def set_aside(path: Path) -> Path:
    """Rename a damaged file to `<name>.corrupt`, so that it can be examined. Return its new path."""
    return path.replace(path.with_name(f"{path.name}.corrupt"))


def free_aside(path: Path) -> Path:
    """Return an unused path, `<name>.old` or with a number, for the backup of a file."""
    names = (path.with_name(f"{path.name}.old{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists() and not name.is_symlink())


def draft_beside(path: Path) -> Path:
    """Return a hidden path next to `path` for a draft; it ends in this process's id.

    Drafts of processes that no longer run are removed, because they may be large or contain a key.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        pid = left.suffix[1:]
        if pid.isdecimal() and len(pid) < 10 and not lives(pid):
            with contextlib.suppress(OSError):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return path.with_name(f".{path.name}.{os.getpid()}")


def lives(pid: str) -> bool:
    """Return whether a process with this id runs; False if the text is not a process id."""
    return pid.isdecimal() and len(pid) < 10 and bool(psutil.pid_exists(int(pid)))


def name_folder(draft: Path, path: Path, *, replacing: bool = False) -> None:
    """Sync every file in a finished folder, then rename the folder to `path`. Raises OSError.

    Args:
        draft: the finished folder.
        path: its final name.
        replacing: first remove a folder at `path`. If False, such a folder must be empty or missing.
    """
    for entry in [*sorted(draft.rglob("*"), reverse=True), draft]:
        # Reverse order syncs the content of a folder before the folder.
        sync(entry)
    if replacing and path.exists():
        shutil.rmtree(path)
    draft.rename(path)
    sync(path.parent)


def remove_drafts(folder: Path) -> None:
    """Remove half-written files of killed processes. No other process may be writing to the folder."""
    for draft in folder.glob(".*." + "[0-9a-f]" * 16):
        draft.unlink(missing_ok=True)


def _place(path: Path, data: bytes, mode: int, step: Callable[[Path, Path], None], synced: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        step(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    if synced:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk. Raises OSError, except if the system cannot sync folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _link(draft: Path, path: Path) -> None:
    """Give a draft its final name, and never replace an existing file.

    A hard link fails atomically if the file exists. On file systems without hard links an empty file reserves
    the name, and the draft then replaces it.
    """
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        path.touch(exist_ok=False)
        draft.replace(path)


def keeps_modes(folder: Path) -> bool:
    """Return whether the folder's file system keeps permissions; FAT and some network shares do not."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return not os.fstat(file.fileno()).st_mode & 0o077
    return True
