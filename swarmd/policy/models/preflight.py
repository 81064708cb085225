"""Preflight checks of the configured model and device, without torch and without a download.

`swarmd join` asks before it makes anything, and tells a mistake within a second. What cannot be told so soon
is the trainer's to find.
"""

import ast
import ctypes
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from swarmd.config.config import ModelConfig
from swarmd.errors import NoModel
from swarmd.policy.models import hub
from swarmd.policy.models.config_json import read_config_json

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
    if config.device == "cuda" and not (torch_has_cuda() and driver_there()):
        why = (
            "no driver for one was found"
            if torch_has_cuda()
            else "the torch that is installed was built without it"
        )
        raise NoModel(
            f"device 'cuda' was asked for, and {why}. Install a torch built for it and its driver, or use"
            " --device auto."
        )
    if config.device == "mps" and sys.platform != "darwin":
        raise NoModel("device 'mps' was asked for, and only Apple's machines have it. Use --device auto.")


def torch_has_cuda() -> bool:
    """Return whether the installed torch was built for CUDA or ROCm; True if that cannot be told.

    Its version.py is read, not run.
    """
    found = importlib.util.find_spec("torch")
    try:
        assert found is not None and found.origin is not None
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
        said = {name: value for line in ast.parse(text).body for name, value in _assigned(line)}
    except (AssertionError, OSError, ValueError, SyntaxError):
        return True
    return not {"cuda", "hip"} <= said.keys() or said["cuda"] is not None or said["hip"] is not None


def _assigned(line: ast.stmt) -> list[tuple[str, object]]:
    match line:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
            return [(name, value)]
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
            return [(name, value)]
    return []


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
