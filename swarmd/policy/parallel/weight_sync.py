"""Weight sync from the trainer to the generators by one file in memory, without stopping either side.

The trainer writes all trained tensors (with LoRA, only the adapter's) to a temporary file and renames it to
its final name. Between two tokens, a generator checks for a newer file. A rename is atomic, and an open file
stays unchanged for its reader. So a reader never gets a mix of two versions, even if either side is killed.
The version is the number of updates that led to the weights.
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
# The version is stored as a tensor. Its name has no dot, so it cannot clash with a weight's name.
_VERSION: Final = "version"
# Copies of the weights that exist at once: the current one, one being written, and one still being read.
_COPIES: Final = 3


def private_folder(state_dir: Path, size: int, memory: Path = _MEMORY) -> Path:
    """Make an empty folder for weights of `size` bytes that only this user can read.

    It is in memory if there is room, else in the folder for temporary files. The name in memory depends on
    the state folder, so that the next run removes the files of a killed trainer.
    """
    name = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:16]
    folder = memory / f"swarmd-{os.getuid()}-{name}"
    # Free the room of a previous run first. A symbolic link or another user's folder stays, and mkdir fails.
    shutil.rmtree(folder, ignore_errors=True)
    # The system may lack this folder, or refuse access to it.
    with contextlib.suppress(OSError):
        if shutil.disk_usage(memory).free >= _COPIES * size:
            folder.mkdir(mode=0o700)
            return folder
    return Path(tempfile.mkdtemp(prefix="swarmd-"))


class WeightWriter:
    """The trainer's side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.version: int | None = None  # the last published version

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Write this version of the weights for the generators, unless it was written last.

        If there is no room, the generators continue with an older version, and a warning is logged.
        """
        if version == self.version:
            return
        fresh = self._folder / f".{_FILE}.{os.getpid()}"
        try:
            # systemd removes the folder at its user's last logout, and temporary files after some days.
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
        else:
            self.version = version


class WeightReader:
    """A generator's side. Call it between two tokens."""

    def __init__(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Prepare to read the weights that a trainer publishes.

        weights: the tensors that are overwritten.
        """
        self._path, self._weights = folder / _FILE, weights
        self._seen: tuple[int, int] | None = None
        self.version = -1  # -1: nothing read yet

    def __call__(self) -> int:
        """Load newer weights if there are any. Returns the version of the weights in use."""
        # The file is missing before the first version, and after the end of the run.
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
                    raise ValueError(f"the weights in {self._path} belong to another model")
                for name, weight in self._weights.items():
                    weight.copy_(file.get_tensor(name))
                self.version = int(file.get_tensor(_VERSION))
        except SafetensorError as error:
            raise ValueError(f"the weights in {self._path} cannot be read ({error})") from error
