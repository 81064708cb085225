"""Backups of a node: the key, and on request the training.

A backup is one zip file, stored and not packed; it is read as if a stranger had made it.

    backup.json                          peer id
    identity.key                         the key: whoever has it is this node
    node.json, choices.json              seed, and what was joined      } with the training
    metrics.jsonl                        the rounds                     }
    checkpoints/round-00000012/…         weights or adapter, optimizer, run; safetensors, msgpack and JSON

A restore unpacks beside the old files, checks everything (zip has a CRC of each file, a checkpoint's manifest
SHA-256), and only then takes their place. The old ones are kept aside. Where that is cut off, the folder
`restoring` stays, and no node starts beside it: it would draw another key, or begin at round 1.
"""

import errno
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec

from p2p import durable
from p2p.errors import OperatorError
from p2p.identity import Identity
from swarmd.errors import CannotRecord, ConfigError, SwarmdError
from swarmd.state.folder import CHOICES_FILE, IDENTITY_FILE, METRICS_FILE, RESTORING, SEED_FILE, StateFolder

INDEX: Final = "backup.json"
BESIDE: Final = (SEED_FILE, CHOICES_FILE, METRICS_FILE)
CHECKPOINTS: Final = "checkpoints"
_IN_CHECKPOINT: Final = re.compile(r"checkpoints/round-([0-9]{8,12})/[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_LARGEST: Final = {
    INDEX: 2**16,
    IDENTITY_FILE: 2**10,
    SEED_FILE: 2**16,
    CHOICES_FILE: 2**16,
    METRICS_FILE: 2**40,
}
_MAX_FILES: Final = 64
_BLOCK_BYTES: Final = 2**20
_NOT_A_ZIP: Final = (
    OSError,
    ValueError,
    RuntimeError,
    NotImplementedError,
    EOFError,
    zipfile.BadZipFile,
    MemoryError,
    OverflowError,
)


class _Index(msgspec.Struct, frozen=True):
    schema: int
    peer_id: str


class BadBackup(SwarmdError):
    """The backup cannot be used. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Restored:
    peer_id: str
    round: int | None  # round of the checkpoint; None: only the key
    kept: Sequence[Path]  # the folders that hold the replaced files


def write_backup(folder: Path, to: Path, checkpoint: Path) -> None:
    """Write a new file, mode 0600, with the node's key and the training state of a checkpoint.

    Raises OSError where the checkpoint is removed meanwhile, ConfigError where `to` exists, CannotRecord.
    """
    identity = Identity.load(folder / IDENTITY_FILE)
    if to.exists() or to.is_symlink():
        raise ConfigError(f"{to} exists already, and a backup never replaces a file. Name a new one.")
    draft = durable.draft_beside(to)
    sources = {name: folder / name for name in (IDENTITY_FILE, *BESIDE) if (folder / name).is_file()}
    sources |= {f"{CHECKPOINTS}/{checkpoint.name}/{path.name}": path for path in sorted(checkpoint.iterdir())}
    with ExitStack() as stack:
        opened = {name: stack.enter_context(path.open("rb")) for name, path in sources.items()}
        try:
            _write(opened, identity.peer_id, draft)
            draft.rename(to)
            durable.sync(to.parent)
        except OSError as error:
            raise CannotRecord(
                f"{to}: cannot be written: {error.strerror or error}. Free some space, or name another file."
            ) from None
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def _write(files: Mapping[str, IO[bytes]], peer_id: str, to: Path) -> None:
    """Write the files and the index into a new zip archive, mode 0600.

    Raises OSError.
    """
    with os.fdopen(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, source in files.items():
                with archive.open(zipfile.ZipInfo(name), "w", force_zip64=True) as target:
                    shutil.copyfileobj(source, target, _BLOCK_BYTES)
            archive.writestr(zipfile.ZipInfo(INDEX), msgspec.json.encode(_Index(1, peer_id)))
        file.flush()
        os.fsync(file.fileno())


def restore(state: StateFolder, file: Path, check: Callable[[Path], object]) -> Restored:
    """Put a backup, or a copied key file, in the place of what the folder has.

    Raises BadBackup, and changes nothing, where it cannot be used; CannotRecord where the disk fails. check:
    raises where the folder it is given is not a whole `checkpoints` folder.
    """
    folder, draft = state.path, state.path / RESTORING
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(mode=0o700)
        peer_id, rounds = _checked(file, draft, check)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CannotRecord.to(draft, error) from None
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    try:
        kept = _take_place(draft, folder, with_training=rounds is not None)
        shutil.rmtree(draft)
    except OSError as error:
        raise CannotRecord(
            f"{folder}: only a part of the backup is in its place: {error.strerror or error}. Free some space"
            " or mend its permissions, and run the command again. The old files' names end in .old."
        ) from None
    return Restored(peer_id, rounds, kept)


def _checked(file: Path, draft: Path, check: Callable[[Path], object]) -> tuple[str, int | None]:
    """Unpack into `draft`; returns the peer id and the checkpoint's round. Raises BadBackup, OSError."""
    if zipfile.is_zipfile(file):
        names, peer_id = _unpack(file, draft)
    else:
        names, peer_id = [IDENTITY_FILE], None
        _copy_key(file, draft / IDENTITY_FILE)
    try:
        identity = Identity.load(draft / IDENTITY_FILE)
    except OperatorError:
        raise BadBackup(f"{file}: it holds no whole key. Nothing was changed.") from None
    if peer_id not in (None, identity.peer_id):
        raise BadBackup(f"{file}: its key is not that of the peer id it names. Nothing was changed.")
    rounds = {int(found[1]) for name in names if (found := _IN_CHECKPOINT.fullmatch(name))}
    if len(rounds) > 1:
        raise BadBackup(f"{file}: it has more than one checkpoint. Nothing was changed.")
    if rounds:
        try:
            check(draft / CHECKPOINTS)
        except (OperatorError, OSError, ValueError) as error:
            raise BadBackup(f"{file}: its checkpoint is not whole: {error}. Nothing was changed.") from None
    return identity.peer_id, min(rounds, default=None)


def _take_place(draft: Path, folder: Path, *, with_training: bool) -> list[Path]:
    """Move what was unpacked into the folder; returns where the old files are.

    A key that is the same stays.
    """
    kept = []
    for name in (IDENTITY_FILE, *((CHECKPOINTS, *BESIDE) if with_training else ())):
        old, new = folder / name, draft / name
        if name == IDENTITY_FILE and old.is_file() and old.read_bytes() == new.read_bytes():
            continue
        if old.exists():
            kept.append(durable.keep_aside(old))
        if new.exists():
            # Or a file, renamed because metrics.jsonl may be larger than the memory.
            durable.name_folder(new, old)
    return kept


def _unpack(file: Path, draft: Path) -> tuple[list[str], str]:
    """Unpack into `draft`; returns the names, and the peer id in the backup. Raises BadBackup."""
    with _explained(file), zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        _require_plain(archive, entries)
        with archive.open(INDEX) as source:
            index = msgspec.json.decode(source.read(_LARGEST[INDEX] + 1), type=_Index)
        names = sorted(entries.keys() - {INDEX})
        if index.schema != 1 or IDENTITY_FILE not in names:
            raise ValueError("it is of another version, or has no key")
        for name in names:
            path = draft / name
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with (
                archive.open(name) as source,
                os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target,
            ):
                shutil.copyfileobj(source, target, _BLOCK_BYTES)
        return names, index.peer_id


def _require_plain(archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo]) -> None:
    """Raise ValueError for an entry whose name, size or compression a backup never has.

    A backup is not compressed, so that nothing can grow when it is read.
    """
    if len(entries) != len(archive.infolist()) or len(entries) > _MAX_FILES or INDEX not in entries:
        raise ValueError("it is not a backup of swarmd")
    for name, entry in entries.items():
        if name not in _LARGEST and not _IN_CHECKPOINT.fullmatch(name):
            raise ValueError(f"it holds {name[:80]!r}, which no backup does")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name} is packed, which no backup is")
        if entry.file_size > _LARGEST.get(name, entry.file_size):
            raise ValueError(f"{name} has {entry.file_size} bytes, more than it may")


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except (*_NOT_A_ZIP, msgspec.MsgspecError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BadBackup(
            f"{file}: not a backup that can be used: {str(error) or type(error).__name__}. Nothing was"
            " changed."
        ) from None


def _copy_key(file: Path, to: Path) -> None:
    try:
        with file.open("rb") as source:
            content = source.read(_LARGEST[IDENTITY_FILE])
    except OSError as error:
        raise BadBackup(f"{file}: cannot be read: {error.strerror}. Nothing was changed.") from None
    durable.create(to, content)
