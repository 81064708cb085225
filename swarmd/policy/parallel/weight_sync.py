"""Weight sync from the trainer to the generators, without stopping either: one file in memory, replaced.

The trainer writes every trained tensor (with LoRA, the adapter's alone) to a file of another name and renames
it; between two tokens a generator checks whether there is a newer one. A rename is atomic, and a file that is
being read stays as it was for its reader, so weights are never torn, even if either is killed. The version is
the number of updates behind the weights.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from swarmd.policy.training.policy_files import tensor_file

log = logging.getLogger(__name__)

_MEMORY: Final = Path("/dev/shm")  # noqa: S108  Linux keeps it in memory; the folder inside is private
_FILE: Final = "weights.safetensors"
# The name of a tensor beside the weights, whose names have dots.
_VERSION: Final = "version"
# Copies of the weights at once: the current one, the one being written, and one still being read.
_COPIES: Final = 3


def private_folder(state_dir: Path, size: int, memory: Path = _MEMORY) -> Path:
    """Make an empty folder for weights of `size` bytes that nobody else can read.

    It is in memory where there is room, else among the temporary files. In memory it has a name of its own
    for each state folder, so that the next run removes what a killed trainer left behind.
    """
    name = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:16]
    folder = memory / f"swarmd-{os.getuid()}-{name}"
    # First, as what is left takes the room. A symbolic link, or somebody else's, stays: then mkdir fails.
    shutil.rmtree(folder, ignore_errors=True)
    # This system may have no such place, or we may not use it.
    with contextlib.suppress(OSError):
        if shutil.disk_usage(memory).free >= _COPIES * size:
            folder.mkdir(mode=0o700)
            return folder
    return Path(tempfile.mkdtemp(prefix="swarmd-"))


class WeightWriter:
    """The trainer's side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.version: int | None = None  # the version published last

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Write this version of the weights for the generators, unless it is there already.

        Without room they go on with an older one, which is logged.
        """
        if version == self.version:
            return
        fresh = self._folder / f".{_FILE}.{os.getpid()}"
        try:
            # systemd removes it at its user's last logout, and from the temporary files after some days.
            self._folder.mkdir(mode=0o700, exist_ok=True)
            fresh.write_bytes(tensor_file({**weights, _VERSION: torch.tensor(version)}))
            fresh.replace(self._folder / _FILE)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            log.warning(
                "the generators go on with older weights: %s cannot be written (%s). Free some space there.",
                fresh,
                error.strerror,
            )
            return
        self.version = version


class WeightReader:
    """A generator's side: call it between two tokens."""

    def __init__(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Read weights that a trainer publishes.

        weights: written into.
        """
        self._path, self._weights = folder / _FILE, weights
        self._seen: tuple[int, int] | None = None
        self.version = -1  # -1: nothing was read yet

    def __call__(self) -> int:
        """Read newer weights, if there are any. Returns the version of those in place."""
        # The first weights may not be there yet, or the run is over.
        with contextlib.suppress(FileNotFoundError):
            status = self._path.stat()
            seen = (status.st_ino, status.st_mtime_ns)
            if seen != self._seen:
                self._load()
                self._seen = seen
        return self.version

    def _load(self) -> None:
        try:
            with safe_open(self._path, framework="pt") as file, torch.no_grad():
                if set(file.keys()) != {*self._weights, _VERSION}:
                    raise ValueError(f"the weights in {self._path} are not those of this model")
                for name, weight in self._weights.items():
                    weight.copy_(file.get_tensor(name))
                self.version = int(file.get_tensor(_VERSION))
        except SafetensorError as error:
            raise ValueError(f"the weights in {self._path} cannot be read ({error})") from error
