"""Convert a GGUF file, as used by llama.cpp and ollama, once into a folder that transformers reads.

The file is untrusted. A separate process reads it (`from_gguf.py`), within limits on CPU time and memory. The
files that it writes are then checked as for any other model (`model_folder.py`) and stay in the cache. The
small files are converted first, and the weights once the model is known to fit. This module does not import
torch.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from p2p import durable
from swarmd.config.hub_access import hub_folder
from swarmd.config.messages import shown
from swarmd.errors import NoModel, command_for
from swarmd.policy.models.files.model_folder import plain_file
from swarmd.policy.models.files.progress import Download, Progress
from swarmd.terminal import printable

MAGIC: Final = b"GGUF"
_PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
# Matches the progress bars that the process writes to standard error.
_PERCENT: Final = re.compile(rb"(\d+)%\|")


def file_of(path: Path) -> Path | None:
    """Return the GGUF file that a path means: the path itself, or a folder's only one without safetensors.

    Raises NoModel for a folder with several.
    """
    if os.path.isfile(path):  # noqa: PTH113  `Path.is_file` raises for a name that is too long
        if path.suffix.lower() == ".gguf":
            return path
        with path.open("rb") as file:
            return path if file.read(len(MAGIC)) == MAGIC else None
    if not os.path.isdir(path):  # noqa: PTH112  as above
        return None
    found = [each for each in sorted(path.glob("*.[gG][gG][uU][fF]")) if not each.name.startswith("mmproj")]
    if not found or any(path.glob("*.safetensors")):
        return None
    if len(found) > 1 and not _PART.search(found[0].name):
        names = ", ".join(shown(each.name) for each in found[:9])
        raise NoModel(f"{path} holds {len(found)} GGUF files. Give the path of one: {names}.")
    return found[0]


def folder_for(file: Path) -> Path:
    """Return the cache folder for a GGUF file. A changed file gets another folder."""
    found = file.stat()
    key = f"{file.resolve()} {found.st_size} {found.st_mtime_ns}"
    return hub_folder() / "swarmd-gguf" / hashlib.sha256(os.fsencode(key)).hexdigest()[:32]


def check(file: Path) -> None:
    """Check a GGUF file as far as possible without a library. Raises NoModel."""
    plain_file(file.resolve(), str(file.parent), begins=MAGIC)
    if _PART.search(file.name):
        raise one_part(file)
    if importlib.util.find_spec("gguf") is None:
        raise NoModel(
            f"{file} is a GGUF file, and the package that reads it is missing. Run `{command_for('gguf')}`,"
            " or give the safetensors model that it was made from."
        )


def one_part(file: Path) -> NoModel:
    return NoModel(
        f"{file} is one of several parts of a model. Join them with llama.cpp's `llama-gguf-split --merge`,"
        " and give the path of the whole file."
    )


def convert(
    file: Path, folder: Path, wanted: str, report: Callable[[Download], None] = lambda _: None
) -> None:
    """Write the small files of a GGUF file's model, or its weights, into `folder`.

    Nodes of this machine that start at the same time convert only once. Folder and weights appear atomically.

    Args:
        file: the GGUF file.
        folder: the cache folder (`folder_for`).
        wanted: "config.json" for the small files, or the name of the weights' file.
        report: receives the progress.

    Raises:
        NoModel: if the file cannot be converted.
    """
    if (folder / wanted).exists():
        return
    check(file)
    progress = Progress(file.name, file.stat().st_size, report, doing="converting")
    progress.found(0)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / wanted).exists():
                draft = durable.draft_beside(folder)
                try:
                    draft.mkdir()
                    _run(progress, file, draft, wanted, folder)
                    if folder.exists():
                        durable.sync(draft / wanted)
                        (draft / wanted).rename(folder / wanted)
                    else:
                        durable.name_folder(draft, folder)
                finally:
                    shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise no_room(folder.parent, error) from error


def no_room(folder: Path, error: Exception) -> NoModel:
    return NoModel(
        f"a GGUF file's model cannot be kept as safetensors in {folder} ({printable(str(error))}). Free some"
        " space there, or set HF_HOME to another folder."
    )


def _run(progress: Progress, file: Path, *arguments: Path | str) -> None:
    """Run the process that converts the file. Raises NoModel."""
    size, done = file.stat().st_size, 0
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "swarmd.policy.models.files.from_gguf", file.resolve(), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # The process needs neither the network nor a GPU.
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    ) as process:
        try:
            while text := os.read(process.stderr.fileno(), 2**16):  # type: ignore[union-attr]  # they are pipes
                for percent in map(int, _PERCENT.findall(text)):
                    step = max(0, size * min(percent, 99) // 100 - done)
                    done += step
                    progress.update(step)
            fault = process.stdout.read()  # type: ignore[union-attr]
        except BaseException:
            process.kill()
            raise
    if fault:
        raise NoModel(json.loads(fault))
    if process.returncode:
        raise NoModel(
            f"{file} cannot be read: its {size / 1e6:,.0f} MB take more memory or time than expected. Close"
            " other programs, or give the safetensors model that it was made from."
        )
    progress.update(size - done)
