"""A read-only snapshot of a run, taken without its lock: files of the newest intact checkpoint.

A node may be training in the folder meanwhile, and removes a checkpoint once there are two newer ones. So
every file is read whole and compared with the manifest; if it was removed in between, the newest checkpoint
is looked up again.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarmd.errors import SwarmdError
from swarmd.trainer.checkpoint import manifest_of, saved_in

# Each retry means that the node saved twice while a checkpoint was being read.
_MAX_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class Snapshot:
    round: int  # number of finished rounds in the checkpoint
    files: Mapping[str, bytes]  # the requested files


def read_snapshot(state_dir: Path, names: Sequence[str]) -> Snapshot:
    """Read the newest intact checkpoint. names: of files in it.

    Raises SwarmdError if there is none, or if all are damaged.
    """
    for _ in range(_MAX_TRIES):
        notes = list[str]()
        if not (folders := saved_in(state_dir / "checkpoints")[::-1]):
            raise SwarmdError(
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
        f"all checkpoints in {state_dir} are damaged ({'; '.join(notes)}). Let the node save again, or"
        " restore the folder."
    )


def _read(folder: Path, name: str) -> bytes:
    """Read and verify a file. Raises OSError if it is gone, ValueError or KeyError if it is damaged."""
    known, data = manifest_of(folder)[name], (folder / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != known.sha256:
        raise ValueError(f"{name} differs from its manifest")
    return data
