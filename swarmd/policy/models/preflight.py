"""Checks of the configured model and device, and the cores to use, without torch and without a download.

`swarmd join` makes them before it makes anything, and reports a mistake within a second. What cannot be told
so soon is the trainer's to find.

A config.json came with its model. transformers would build as many layers as it asks for, and load an
attention from the hub that it names. So it is validated before transformers reads it: sizes are bounded, and
settings that are ours are removed.
"""

import contextlib
import ctypes
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from swarmd.config.config import ModelConfig
from swarmd.config.messages import key_name, shown
from swarmd.errors import NoModel
from swarmd.policy.models import hub

# Any of these is a driver that CUDA, or ROCm's CUDA, could use: NVIDIA's, WSL's, AMD's, and that of NVIDIA's
# small boards.
DRIVERS: Final = (
    "/proc/driver/nvidia",
    "/dev/nvidiactl",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/nvmap",
    "/dev/nvhost-ctrl",
)
LIBRARIES: Final = ("libcuda.so.1", "libamdhip64.so")


def check(config: ModelConfig) -> None:
    """Check the model's folder and the device without loading anything.

    Raises NoModel where the folder is missing or holds no model, or where the device cannot exist.
    """
    place = hub.find_local(config.name)
    if place is not None:
        read_config_json(place.folder, place.source)
        hub.require_weights(place.folder, place.source)
    if config.device == "cuda" and not driver_there():
        raise no_device("cuda", "no driver for one was found")
    if config.device == "mps" and sys.platform != "darwin":
        raise NoModel("device 'mps' was asked for, and only Apple's machines have it. Use --device auto.")


def no_device(name: str, why: str) -> NoModel:
    return NoModel(
        f"device {name!r} was asked for, and {why}. Install a torch built for it and its driver, or use"
        " --device auto."
    )


def driver_there(
    exists: Callable[[str], bool] = lambda path: Path(path).exists(),
    load: Callable[[str], object] = ctypes.CDLL,
) -> bool:
    """Return whether a driver for CUDA or ROCm can be here. False only where there is no trace of one."""
    if any(map(exists, DRIVERS)):
        return True
    for library in LIBRARIES:
        try:
            load(library)
        except OSError:
            continue
        return True
    return False


OWN_CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cores(*, logical: bool) -> float:
    """Return how many cores' time this process may take: of those that it may run on, within its quotas.

    logical: count each thread of a core.
    """
    found = psutil.cpu_count(logical=logical) or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        found = min(found, len(os.sched_getaffinity(0)))
    return min([found, *cgroup_cores()])


def cgroup_cores(own: Path = OWN_CGROUP, root: Path = CGROUPS) -> Iterator[float]:
    """Yield of how many cores each group with a quota has the time; it may run on any of them all."""
    for group in cgroups(own, root):
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, (group / "cpu.max").read_text().split())
            yield quota / period


def cgroups(own: Path, root: Path) -> Sequence[Path]:
    """Return the folders of the control groups (version 2) around this process."""
    found = None
    with contextlib.suppress(OSError):  # not on Linux
        found = re.search(r"^0::/(.*)$", own.read_text(), re.MULTILINE)
    folder = root / found[1] if found else root
    return folder, *folder.parents


MAX_BYTES: Final = 2**22
# The largest models have some 130.
MAX_LAYERS: Final = 512
# A width, a number of heads, a vocabulary.
MAX_SIZE: Final = 2**22
# Keys whose names contain one of these are ours to set. A language model has no labels, and transformers
# names each.
OURS: Final = ("attn_implementation", "experts_implementation", "use_kernels", "kernel_config", "num_labels")


def read_config_json(folder: Path, source: str) -> dict[str, Any]:
    """Read a model's config.json, without the keys that name an implementation.

    Raises NoModel where it is no such file, or describes a model too large to be built.
    """
    try:
        with (folder / "config.json").open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise NoModel(
                f"the config.json of {source} has more than {MAX_BYTES:,} bytes: it is no model's. Choose"
                " another model."
            )
        document = json.loads(text)
    except OSError as error:
        raise NoModel(
            f"the config.json of {source} cannot be read: {error.strerror or error}. Mend its permissions."
        ) from None
    except (ValueError, RecursionError):
        # It is not UTF-8 or not JSON, or has numbers of thousands of digits or lists nested thousands deep.
        raise not_json(source) from None
    if not isinstance(document, dict):
        raise not_json(source)
    for section in _sections(document):
        if section.get("quantization_config"):
            raise NoModel(
                f"the weights of {source} are quantised, and cannot be trained. Choose the model that they"
                " were made from."
            )
        for key in [key for key in section if any(part in key for part in OURS)]:
            del section[key]
        for key, value in section.items():
            limit = _limit(key)
            if limit is not None and isinstance(value, int | float) and value > limit:
                asked = f"{key_name(key)} = {shown(value)}"
                raise NoModel(
                    f"the config.json of {source} has {asked}; more than {limit:,} is not built. Choose"
                    " another model."
                )
    return document


def not_json(source: str) -> NoModel:
    return NoModel(f"the config.json of {source} is not a JSON object. Download the model again.")


def _sections(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the document and every object inside it."""
    waiting: list[Any] = [document]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()


def _limit(key: str) -> int | None:
    """Return the largest value that a number of this name may have, or None for no limit."""
    if "layer" in key:
        return MAX_LAYERS
    return (
        MAX_SIZE
        if any(
            part in key
            for part in ("size", "dim", "width", "heads", "n_head", "n_embd", "experts", "depth", "cycles")
        )
        else None
    )
