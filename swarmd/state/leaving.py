"""What `swarmd leave` removes from a state folder, and what it leaves there.

By name: nothing that swarmd did not write is touched.
"""

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarmd.errors import CannotRecord

# The swarm's: what was joined, who was met
JOINED: Final = ("choices.json", "peers.json*", "seen*", "reputation*")
OWN: Final = (
    *(
        "identity.key*",
        "sequence*",
        "checkpoints*",
        "metrics.jsonl*",
        "node.json*",
        "usage.json*",
        "swarmd.log*",
        "trainer.log*",
    ),
    *("receipts.jsonl*", "restoring-*", "tracking*", "ui.html*", "pause.json*", "lock", "run.json"),
)


@dataclass(frozen=True, slots=True)
class Leaving:
    folder: Path
    removed: Sequence[Path]
    stays: Sequence[Path]

    def carry_out(self) -> None:
        """Remove the files.

        Raises CannotRecord where one cannot be removed.
        """
        for path in self.removed:
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                raise CannotRecord(
                    f"{path}: cannot be removed: {error.strerror or error}. Remove it by hand."
                ) from None
        with contextlib.suppress(OSError):  # others' files are there, or it is a mount point
            self.folder.rmdir()


def leaving(folder: Path, *, everything: bool) -> Leaving:
    """Plan which files of the state folder `swarmd leave` removes and which stay.

    everything: also the key, the checkpoints, the figures and the logs. Files set aside (`….old`) go with
        them.
    """
    patterns = (*JOINED, *OWN) if everything else JOINED
    found = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    stays = sorted(path for path in folder.iterdir() if path not in found) if folder.is_dir() else []
    return Leaving(folder, found, stays)
