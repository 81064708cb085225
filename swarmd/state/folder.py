"""The state folder of a node and its lock: one node at a time owns it. Also its seed, and leaving it."""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Final

import msgspec

from p2p import durable
from swarmd.errors import CannotRecord, ConfigError, StateFolderInUse

log = logging.getLogger(__name__)

RUN_FILE = "run.json"  # the running node's pid and control socket; removed when it stops
LOCK_FILE = "lock"
IDENTITY_FILE = "identity.key"
METRICS_FILE = "metrics.jsonl"
CHOICES_FILE = "choices.json"
LOG_FILE = "swarmd.log"
EVENTS_FILE = "events.jsonl"  # the exchange's events (`exchange.replay`)
# Minimum free disk space when a node starts: two checkpoints of the model tiny have 20 MB.
MIN_FREE_BYTES = 24_000_000
# How long to wait for the lock. `in_use` holds it for an instant without owning the folder.
_LOCK_WAIT_S = 0.2
# How long to wait if the lock file names a dead process: a new owner will write its own pid soon.
_NO_OWNER_WAIT_S = 5.0
# How long to wait if the lock file names no process: a short command has the lock (`briefly`).
_BRIEF_WAIT_S = 60.0


def default_state_dir() -> Path:
    """Return the default state folder: `~/.local/state/swarmd/node` on Linux (XDG, through platformdirs)."""
    from platformdirs import user_state_path

    return user_state_path("swarmd") / "node"


class StateFolder(contextlib.ExitStack):
    """An open, locked state folder. `close`, or the end of a `with` block, releases the lock.

    The kernel holds the lock (flock), so the lock ends with the process, even if that is killed. Child
    processes do not inherit the descriptor: a trainer that outlives a killed daemon does not hold the lock.
    """

    def __init__(self, path: Path, lock: int) -> None:
        super().__init__()
        self.path = path
        self.callback(os.close, lock)

    @classmethod
    def open(cls, path: Path, *, briefly: bool = False) -> "StateFolder":
        """Make the folder (mode 0700) if it does not exist, and take its lock.

        briefly: for a short command; a node that starts meanwhile waits for the lock instead of failing.

        Raises StateFolderInUse, naming the owner's pid, and ConfigError if the folder cannot be used.
        """
        path = path.expanduser().absolute()
        try:
            str(path).encode()
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.stat().st_mode & stat.S_IWOTH:
                remedy = (
                    f"Run `chmod o-w {quote(str(path))}` or choose"
                    if durable.keeps_modes(path)
                    else "Its file system keeps no permissions. Choose"
                )
                raise ConfigError(
                    f"{path}: everybody can write to this state folder. {remedy} another with --state-dir."
                )
            lock = _open_lock(path)
            try:
                _acquire(path, lock, "" if briefly else str(os.getpid()))
                durable.remove_drafts(path)
            except BaseException:
                os.close(lock)
                raise
        except UnicodeEncodeError:
            raise ConfigError(
                f"{str(path)!r}: the name of a state folder has to be UTF-8. Choose another with --state-dir."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be used as the state folder: {error.strerror or error}. Choose another with"
                " --state-dir."
            ) from None
        return cls(path, lock)

    def require_room(self) -> None:
        """Raise CannotRecord if the disk has no room for a small checkpoint, figures and logs."""
        if (free := shutil.disk_usage(self.path).free) < MIN_FREE_BYTES:
            raise CannotRecord(
                f"{self.path}: the disk has {free / 1e6:,.0f} MB free, and a node needs"
                f" {MIN_FREE_BYTES / 1e6:,.0f} MB at least, for its checkpoints, figures and logs. Free some"
                " space, or choose another folder with --state-dir."
            )


def in_use(path: Path) -> bool:
    """Return whether a running node owns the folder, even if another user runs it.

    Takes the lock for an instant if the lock is free.
    """
    try:
        lock = os.open(path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            # A shared lock, so that two simultaneous checks do not take each other for an owner.
            return not _lock_now(lock, fcntl.LOCK_SH)
        finally:
            os.close(lock)
    except OSError:
        return False


def write_atomically(path: Path, document: Mapping[str, Any]) -> None:
    """Replace `path` with a JSON file, mode 0600, atomically: readers see the whole old or whole new file.

    Raises CannotRecord.
    """
    try:
        durable.replace(path, json.dumps(document).encode())
    except OSError as error:
        raise CannotRecord.to(path, error) from None


class _Drawn(msgspec.Struct):
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def node_seed(configured: int | None, folder: Path) -> int:
    """Return the configured seed, else the seed drawn when this folder was first used.

    Raises CannotRecord if a drawn seed cannot be written.
    """
    if configured is not None:
        return configured
    path, read = folder / "node.json", msgspec.json.Decoder(_Drawn).decode
    if (drawn := durable.load(path, read, "another seed is drawn")) is not None:
        return drawn.seed
    seed = secrets.randbits(32)
    write_atomically(path, {"schema": 1, "seed": seed})
    return seed


def _open_lock(folder: Path) -> int:
    """Open the lock file. It must be a regular file that we own, as we write to it.

    Raises OSError and ConfigError.
    """
    path = folder / LOCK_FILE
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    found = os.fstat(lock)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_uid != os.geteuid():
        os.close(lock)
        raise ConfigError(
            f"{path}: is not a plain file of your own. Run as its owner, or remove it and start again."
        )
    return lock


def _lock_now(lock: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _acquire(folder: Path, lock: int, ours: str) -> None:
    """Take the lock and write `ours`, our pid, into it. Raises StateFolderInUse."""
    begun, told = time.monotonic(), False
    while not _lock_now(lock):
        pid = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
        patience = _LOCK_WAIT_S if durable.lives(pid) else _NO_OWNER_WAIT_S if pid else _BRIEF_WAIT_S
        if time.monotonic() - begun > patience:
            owner = f" (pid {pid})" if pid.isdecimal() else ""
            raise StateFolderInUse(
                f"{folder}: another node{owner} runs with this state folder already: `swarmd status` shows"
                f" it. Stop it with `swarmd stop --state-dir {quote(str(folder))}`, or give this one another"
                " folder with --state-dir."
            )
        if not (pid or told) and time.monotonic() - begun > _LOCK_WAIT_S:
            told = True
            log.warning("waiting for another command in this state folder, such as `swarmd doctor network`")
        time.sleep(0.02)
    os.ftruncate(lock, 0)
    os.pwrite(lock, ours.encode(), 0)


# Files that `swarmd leave` removes, by name, so that it removes no file that swarmd did not write. First
# the files about the swarm: the joined swarm and the known peers.
OF_THE_SWARM: Final = ("choices.json*", "peers.json*", "seen*", "reputation*")
OF_THE_NODE: Final = (
    *(
        "identity.key*",
        "sequence*",
        "checkpoints*",
        "metrics.jsonl*",
        "events.jsonl*",
        "prompts.json*",
        "node.json*",
        "usage.json*",
        "swarmd.log*",
        "trainer.log*",
    ),
    *("receipts.jsonl*", "tracking*", "ui.html*", "pause.json*", "lock", "run.json"),
)


def leaving(folder: Path, *, everything: bool) -> tuple[Sequence[Path], Sequence[Path]]:
    """Return which files of the state folder `swarmd leave` removes, and which stay.

    everything: also the key, the checkpoints, the figures and the logs. Files set aside (`….old`) go with
        them.
    """
    patterns = (*OF_THE_SWARM, *OF_THE_NODE) if everything else OF_THE_SWARM
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(found), sorted(set(folder.iterdir()) - found) if folder.is_dir() else []


def remove(folder: Path, files: Sequence[Path]) -> None:
    """Remove these files of the folder, and the folder if it is empty then.

    Raises CannotRecord if a file cannot be removed.
    """
    for path in files:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise CannotRecord(
                f"{path}: cannot be removed: {error.strerror or error}. Remove it by hand."
            ) from None
    with contextlib.suppress(OSError):
        # Other files are in the folder, or it is a mount point.
        folder.rmdir()
