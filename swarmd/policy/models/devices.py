"""Assigns devices to the processes of a run: round robin over the visible ones."""

import os
from collections.abc import Mapping

import torch

from swarmd.config.config import ModelConfig
from swarmd.policy.models.device import choose_device, free_memory


def device_of(config: ModelConfig) -> str:
    """ "cuda", "mps" or "cpu". NoModel where the one that is asked for is not there."""
    return choose_device(config.device).type


def count_devices() -> int:
    """CUDA devices that are visible."""
    return torch.cuda.device_count()


def environment(config: ModelConfig, place: int) -> Mapping[str, str]:
    """What makes a child process see the one device of its place, counted from the trainer's, 0."""
    if device_of(config) != "cuda":
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()] or [str(i) for i in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": names[place % len(names)]}


def free_share(device: torch.device, processes: int) -> int:
    """Bytes of the device that one of so many processes may plan with."""
    return free_memory(device) // processes
