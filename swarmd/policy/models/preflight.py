"""Check the configured model and device, and count cores, without torch and without a download.

`swarmd join` runs these checks before it creates anything, and so reports a mistake within a second. The
trainer checks everything that takes longer.
"""

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from swarmd.config.config import ModelConfig
from swarmd.errors import NoModel
from swarmd.policy.models import hub
from swarmd.policy.models.files import gguf, model_folder

# Each of these files is a sign of a driver for CUDA or for ROCm's CUDA interface: NVIDIA's, WSL's, AMD's, and
# that for NVIDIA's small boards.
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

    Raises NoModel if the folder is missing or holds no model, or if the device cannot exist.
    """
    place = hub.find_local(config.name)
    if place is not None and place.gguf is not None:
        gguf.check(place.gguf)
    elif place is not None:
        model_folder.read_config_json(place.folder, place.source)
        model_folder.small_files(place.folder, place.source)
        model_folder.weight_map(place.folder, place.source)
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
    """Return whether a driver for CUDA or ROCm may be installed; False only if there is no sign of one."""
    if any(map(exists, DRIVERS)):
        return True
    for library in LIBRARIES:
        with contextlib.suppress(OSError):
            load(library)
            return True
    return False


OWN_CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cores(*, logical: bool) -> float:
    """Return how many cores this process may use: the cores that it may run on, limited by its CPU quotas.

    logical: count each hardware thread of a core.
    """
    found = psutil.cpu_count(logical=logical) or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        found = min(found, len(os.sched_getaffinity(0)))
    return min([found, *cgroup_cores()])


def cgroup_cores(own: Path = OWN_CGROUP, root: Path = CGROUPS) -> Iterator[float]:
    """Yield each control group's CPU quota, in cores. A quota limits CPU time, not the choice of cores."""
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
