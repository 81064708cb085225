"""A read-only snapshot of a run, taken without its lock: the newest whole checkpoint and its rounds' metrics.

A node may be training in the folder meanwhile, and removes a checkpoint once there are two newer ones. So
whatever is wanted of one is read whole and compared with its manifest; where it went away in between, the
newest is looked for again.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarmd.errors import SwarmdError
from swarmd.trainer.checkpoint import manifest_of, saved_in

# Each try needs the node to have saved twice while a checkpoint was being read.
_MAX_TRIES: Final = 5


class NothingSaved(SwarmdError):
    """The state folder holds no checkpoint.

    Let `swarmd join` run there for a minute, or name the folder with --state-dir.
    """


@dataclass(frozen=True, slots=True)
class Snapshot:
    round: int  # rounds behind the checkpoint
    files: Mapping[str, bytes]  # the files that were asked for


def read_snapshot(state_dir: Path, names: Sequence[str]) -> Snapshot:
    """Read the newest checkpoint that is whole. names: of files in it.

    Raises NothingSaved if there is none, SwarmdError if none is whole.
    """
    notes: list[str] = []
    for _ in range(_MAX_TRIES):
        notes = []
        if not (folders := saved_in(state_dir / "checkpoints")[::-1]):
            raise NothingSaved(
                f"{state_dir} holds no checkpoint. Let `swarmd join` run there for a minute, or name the"
                " folder with --state-dir."
            )
        for folder in folders:
            try:
                files = {name: _read(folder, name) for name in names}
                return Snapshot(int(folder.name.removeprefix("round-")), files)
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                # The checkpoint was removed meanwhile, is damaged, or is of another version.
                notes.append(f"{folder.name}: {error}")
    raise SwarmdError(
        f"no checkpoint in {state_dir} is whole ({'; '.join(notes)}). Let the node save once more, or restore"
        " the folder."
    )


def _read(folder: Path, name: str) -> bytes:
    """OSError where it is gone; ValueError or KeyError where it is not what the manifest says."""
    known, data = manifest_of(folder)[name], (folder / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != known.sha256:
        raise ValueError(f"{name} is not what was written")
    return data
