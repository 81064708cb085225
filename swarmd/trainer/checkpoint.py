"""Checkpoints: written atomically, the two newest kept, each verified before use.

    <state-dir>/checkpoints/round-00000012/
        manifest.json     size and SHA-256 of every other file; written last
        run.msgpack       round, random state, pool
        …                 the policy's files: weights or adapter, optimizer, its random state

A save writes to a temporary folder, syncs every file and the folder, and then renames it. So a folder named
after a round is complete unless the disk failed, and the manifest detects that.

A checkpoint is due every `checkpoint.every` seconds (`Timetable`), and is written between two rounds. kill -9
loses the rounds since the last one. They are run again from the same state: the same seed draws the same
questions, and their lines in metrics.jsonl are truncated and written again.
"""

import contextlib
import errno
import hashlib
import itertools
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from p2p import durable
from swarmd.errors import CannotRecord, SwarmdError
from swarmd.experience.outliers import GateState
from swarmd.experience.pool import PoolEntry
from swarmd.experience.replay_schedule import GuardState
from swarmd.experience.strategies import Success

Content = bytes | memoryview  # the content of a file

SCHEMA = 1
KEPT_CHECKPOINTS = 2
DAY_S = 86_400.0


@dataclass(frozen=True)
class RunState:
    """The state of a run, apart from its policy."""

    round: int  # number of finished rounds
    seed: int
    task_rng: tuple[int, tuple[int, ...], float | None]  # random.Random.getstate()
    batch_rng: tuple[int, tuple[int, ...], float | None]
    pool: tuple[PoolEntry, ...]
    schema: int = SCHEMA
    # The state of replay:
    updates: int = 0  # updates so far, as the pool counts them
    # Updates before each of the last rounds (`Pool.before`)
    before: Mapping[int, int] = field(default_factory=dict)
    used: tuple[bytes, ...] = ()  # digests of external rollouts that were trained on (`Pool.used`)
    guard: GuardState = field(default_factory=GuardState)
    # The state of a round's parts:
    gate: GateState = field(default_factory=GateState)
    levels: Mapping[str, int] = field(default_factory=dict)  # of the staircase, by subject
    # Tokens of this node's latest answers in the asked form, by specialty.
    lengths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    success: Success = field(default_factory=Success)


class ManifestEntry(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    schema: int
    files: dict[str, ManifestEntry]


# Exceptions from reading a checkpoint that is damaged, unreadable, of other types, or nested too deeply.
_DAMAGE = (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError, msgspec.MsgspecError)


class Checkpoints:
    """The checkpoints of one state folder.

    needs: the policy's files that every checkpoint must have. most: largest size of the state folder, bytes.
    """

    def __init__(self, folder: Path, needs: Collection[str] = (), most: int | None = None) -> None:
        self.folder, self._needs, self._most = folder, {"run.msgpack", *needs}, most
        self.size = 0  # bytes of the newest checkpoint

    def save(self, state: RunState, files: Iterable[tuple[str, Content]]) -> Path:
        """Write a checkpoint durably, and remove all but the two newest.

        files: name and content of each of the policy's files; held in memory one at a time. Raises
        CannotRecord, also if the state folder would exceed its limit; existing checkpoints stay intact.
        """
        final = self.folder / folder_name(state.round)
        partial = self.folder / f"partial-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # A save that was killed left partial files, and their space is needed now.
            for left in self.folder.glob("partial-*"):
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir()
            written: dict[str, ManifestEntry] = {}
            for name, content in itertools.chain(files, [("run.msgpack", msgspec.msgpack.encode(state))]):
                self._make_room(memoryview(content).nbytes)
                written[name] = _write(partial / name, content)
            manifest = msgspec.json.encode(_Manifest(SCHEMA, written))
            _write(partial / "manifest.json", msgspec.json.format(manifest, indent=1))
            # After a resume from an older checkpoint, the same round may already have a folder.
            durable.name_folder(partial, final, replacing=True)
        except OSError as error:
            raise _explained(error, self.folder) from error
        finally:
            # Either the folder was renamed, or it is incomplete and useless.
            shutil.rmtree(partial, ignore_errors=True)
        self._prune(keep=final)
        self.size = sum(entry.bytes for entry in written.values())
        return final

    def newest(
        self, take_up: Callable[[RunState, Path], None] = lambda *_: None
    ) -> tuple[RunState, Path, list[str]] | None:
        """Return the newest intact checkpoint, its folder, and notes on skipped ones; None if there is none.

        A damaged one is renamed for inspection once an older intact one is found. Raises SwarmdError if all
        are damaged: they keep their names, so the next start does not begin from scratch either.

        take_up: resumes from a checkpoint; if it raises ValueError or another of _DAMAGE, the checkpoint
        counts as damaged.
        """
        damaged: list[tuple[Path, Exception]] = []
        for path in reversed(saved_in(self.folder)):
            try:
                _verify(path, self._needs)
                state = msgspec.msgpack.decode((path / "run.msgpack").read_bytes(), type=RunState)
                _check(state, path)
                take_up(state, path)
            except _DAMAGE as error:
                damaged.append((path, error))
            else:
                return state, path, [_set_aside(*each) for each in damaged]
        if damaged:
            why = "; ".join(f"{path.name} is damaged ({error})" for path, error in damaged)
            raise SwarmdError(
                f"no checkpoint in {self.folder} can be used: {why}. Use the version of swarmd that"
                " wrote them, restore them from a backup, or start over in another folder with --state-dir."
            )
        return None

    def _make_room(self, size: int) -> None:
        """Remove all but the newest checkpoint if the state folder would become too large.

        Raises CannotRecord if that is not enough.
        """
        if self._most is None or folder_bytes(self.folder.parent) + size <= self._most:
            return
        for old in saved_in(self.folder)[:-1]:
            shutil.rmtree(old, ignore_errors=True)
        if (wanted := folder_bytes(self.folder.parent) + size) > self._most:
            raise CannotRecord(
                f"the state folder {self.folder.parent} would have {wanted / 1e9:.3g} GB, over limits.state,"
                f" {self._most / 1e9:g} GB: two checkpoints have to fit. Raise limits.state and join again,"
                " or move old logs and metrics.jsonl away."
            )

    def _prune(self, keep: Path) -> None:
        others = [p for p in saved_in(self.folder) if p != keep and p.name < keep.name]
        for path in [
            *others[: -(KEPT_CHECKPOINTS - 1)],
            *sorted(self.folder.glob("damaged-*"))[:-1],
        ]:
            shutil.rmtree(path, ignore_errors=True)


def folder_bytes(folder: Path) -> int:
    """Return the total size of all files in a folder, in bytes."""
    found = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                # The file was removed meanwhile.
                found += (Path(path) / name).lstat().st_size
    return found


@dataclass
class Timetable:
    """Decides when the next checkpoint is due.

    It is due after `every` seconds, or later if a day would otherwise write more than `bytes_a_day`. A save
    that cannot wait (at stop and pause, before an answer to the judge) is made at once, and the next one is
    delayed by the same amount. Times are seconds of one monotonic clock.
    """

    every: float
    bytes_a_day: float
    last: float  # time of the last save, or of the start
    paid: float = -math.inf  # time from which the bytes written are within the limit again

    def affordable(self, now: float) -> bool:
        """Return whether another checkpoint may be written without exceeding the limit."""
        return now >= self.paid

    def until_due(self, now: float) -> float:
        """Return the seconds until a checkpoint is due; 0 if one is due now."""
        return max(0.0, self.last + self.every - now, self.paid - now)

    def wrote(self, size: int, now: float) -> None:
        self.last = now
        self.paid = max(self.paid, now) + self.interval(size)

    def interval(self, size: int) -> float:
        """Return the seconds between two checkpoints of this size that the limit allows.

        The interval is at least `every`, so a small checkpoint is not written more often even if the judge
        asks often.
        """
        return max(self.every, size * DAY_S / self.bytes_a_day)


def _set_aside(path: Path, error: Exception) -> str:
    """Rename a damaged checkpoint; return a note for the operator."""
    aside = path.with_name("damaged-" + path.name)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return f"checkpoint {path.name} is damaged ({error}); set aside as {aside.name}, using the one before it"


def folder_name(round_number: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"round-{round_number:08d}"


def _write(path: Path, content: Content) -> ManifestEntry:
    """Write a file; return its manifest entry."""
    path.write_bytes(content)
    return ManifestEntry(memoryview(content).nbytes, hashlib.sha256(content).hexdigest())


def saved_in(folder: Path) -> Sequence[Path]:
    """Return the folders of checkpoints, oldest first."""
    return sorted(
        p for p in folder.glob("round-*") if p.name.removeprefix("round-").isdecimal() and p.is_dir()
    )


def rounds_done(folder: Path, limit: int) -> int | None:
    """Return the newest checkpoint's number of rounds if it reaches the limit, else None.

    limit: 0 for none. Raises SwarmdError if all checkpoints are damaged.
    """
    if not limit or not any(path.name >= folder_name(limit) for path in saved_in(folder)):
        return None
    found = Checkpoints(folder).newest()
    return found[0].round if found and found[0].round >= limit else None


def manifest_of(folder: Path) -> Mapping[str, ManifestEntry]:
    """Return the files that a checkpoint's manifest lists. Raises one of _DAMAGE."""
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=_Manifest)
    if manifest.schema != SCHEMA:
        raise ValueError("its manifest is of another version")
    return manifest.files


def _verify(folder: Path, needs: Set[str]) -> None:
    """Raise one of _DAMAGE if a folder differs from its manifest, or lacks a needed file."""
    files = manifest_of(folder)
    if left_out := sorted(needs - files.keys()):
        raise ValueError(f"its manifest does not name {', '.join(left_out)}")
    for name, known in files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise ValueError(f"{name} is missing")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != known.sha256:
                raise ValueError(f"{name} differs from its manifest")


def _check(state: RunState, folder: Path) -> None:
    """Raise ValueError if the state does not belong to this checkpoint."""
    if folder_name(state.round) != folder.name:
        raise ValueError(f"run.msgpack is of round {state.round}")
    if any(len(kept.scored.rewards) != len(kept.scored.rollout.completions) for kept in state.pool):
        raise ValueError("its pool is inconsistent")


def _explained(error: OSError, folder: Path) -> CannotRecord:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        saved = [f"the last checkpoint, {path.name}, is whole" for path in saved_in(folder)]
        return CannotRecord(
            f"no room for a checkpoint in {folder}: {error.strerror}. Free some space;"
            f" {saved[-1] if saved else 'no checkpoint has been saved yet'}."
        )
    return CannotRecord(
        f"no checkpoint can be written in {folder}: {error.strerror or error}. Check the folder's owner and"
        " mode."
    )
