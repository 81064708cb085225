"""Durable writes: after a power cut a file or a folder is wholly the old one or wholly the new one."""

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

log = logging.getLogger(__name__)

T = TypeVar("T")


def replace(path: Path, data: bytes, mode: int = 0o600, *, synced: bool = True) -> None:
    """Put `data` at `path`, whatever was there before. Raises OSError; the old file is then untouched.

    synced: wait for the disk. Without it kill -9 loses nothing, and a power cut may lose both files.
    """
    _place(path, data, mode, os.replace, synced)


def create(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Put `data` at `path`, where nothing is yet.

    An existing file is never touched. Raises FileExistsError, or another OSError.
    """
    _place(path, data, mode, _link, synced=True)


def load(path: Path, read: Callable[[bytes], T], without: str, most: int = -1) -> T | None:
    """Return what `read` makes of a file's bytes, at most `most`; None where there is no file.

    One that cannot be read is set aside. without: what follows from that, for the log.
    """
    try:
        with path.open("rb") as file:
            return read(file.read(most))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        # msgspec's errors are ValueErrors. Where the folder cannot be written, the next save says so.
        with contextlib.suppress(OSError):
            log.warning("%s was damaged (%s) and is now %s; %s", path, error, set_aside(path), without)
        return None


def set_aside(path: Path) -> Path:
    """Rename a file that cannot be used, so that it can be looked into. Returns its new path."""
    return path.replace(path.with_name(f"{path.name}.corrupt"))


def free_aside(path: Path) -> Path:
    """Return a free path for the old version of a file that is about to be replaced."""
    names = (path.with_name(f"{path.name}.old{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists() and not name.is_symlink())


def draft_beside(path: Path) -> Path:
    """Return a hidden name of this process beside `path`, to write it there first.

    What processes that were killed have left under theirs is removed: it may be large, or hold a key.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        pid = left.suffix[1:]
        if pid.isdecimal() and len(pid) < 10 and not lives(pid):
            with contextlib.suppress(OSError):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return path.with_name(f".{path.name}.{os.getpid()}")


def lives(pid: str) -> bool:
    """Return whether there is a process of this id; False where it is no id."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    return True


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


def remove_drafts(folder: Path) -> None:
    """Remove what kills have left of files half written. Nobody else may write to the folder meanwhile."""
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
    """Wait until a file or folder is on disk. Raises OSError, but not where folders cannot be synced."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _link(draft: Path, path: Path) -> None:
    """Move a draft to a path where no file is yet.

    A hard link refuses to replace a file, in one step. On file systems without links an empty file holds the
    place first.
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
