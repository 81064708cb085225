"""NVML's figures of the node's GPUs, with simulated figures and on a real GPU if there is one."""

import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from swarmd.daemon.guest.nvidia import NvidiaGpus

pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
US, TRAINER, GAME = 100, 101, 200  # process ids
Used = Sequence[tuple[int, int, int]]  # pid, µs, percent


class Nvml:
    """Stands in for nvidia-ml-py with given figures; it raises the package's real errors."""

    NVMLError, NVML_SUCCESS = pynvml.NVMLError, pynvml.NVML_SUCCESS
    NVML_ERROR_NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND

    def __init__(self, *gpus: Mapping[str, Any]) -> None:
        usual = {"contexts": [], "used": [], "mW": None, "mig": None}
        self.gpus = [SimpleNamespace(**usual | gpu) for gpu in gpus]

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        return self.gpus[index]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Any) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in gpu.contexts]

    def nvmlDeviceGetProcessUtilization(self, gpu: Any, since: int) -> list[Any]:  # noqa: N802
        if gpu.used is None:
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        samples = [
            SimpleNamespace(pid=pid, timeStamp=at, smUtil=share) for pid, at, share in gpu.used if at > since
        ]
        if not samples:
            raise self.NVMLError(self.NVML_ERROR_NOT_FOUND)
        return samples

    def nvmlDeviceGetPowerUsage(self, gpu: Any) -> int:  # noqa: N802
        if gpu.mW is None:
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(gpu.mW)

    def nvmlDeviceGetMigMode(self, gpu: Any) -> list[int]:  # noqa: N802
        if gpu.mig is None:
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [gpu.mig, 1 - gpu.mig]  # the current mode, and the mode after a reset


def gpus(nvml: Nvml) -> NvidiaGpus:
    return NvidiaGpus(lambda: [US, TRAINER], lambda: nvml)


def test_the_load_of_other_programs_is_read_from_the_nodes_gpu() -> None:
    theirs = {"contexts": [GAME], "used": [(GAME, 9, 90)], "mW": 200_000}
    shared = {"contexts": [TRAINER, GAME], "used": [(TRAINER, 5, 60), (GAME, 5, 25)], "mW": 75_000}
    nvml = Nvml(theirs, shared)
    found = gpus(nvml)
    assert (found.used_by_others(), found.watts()) == (0.25, 75.0)
    nvml.gpus[1].used += [(GAME, 7, 10), (GAME, 8, 40)]
    assert found.used_by_others() == 0.4  # the load in the latest sample
    assert found.used_by_others() == 0.0  # no sample since


def test_with_several_gpus_the_largest_load_of_other_programs_counts() -> None:
    both = [{"contexts": [TRAINER], "used": [(GAME, 1, share)], "mW": 50_000} for share in (10, 30)]
    found = gpus(Nvml(*both))
    assert (found.used_by_others(), found.watts()) == (0.3, 100.0)


@pytest.mark.parametrize(
    "gpu",
    [
        {
            "contexts": [GAME],
            "used": [(GAME, 1, 99)],
            "mW": 1,
        },  # the node trains on another GPU, or in a container
        {"contexts": [TRAINER], "used": None},  # WSL
    ],
)
def test_unknown_figures_are_none(gpu: Mapping[str, Any]) -> None:
    found = gpus(Nvml(gpu))
    assert (found.used_by_others(), found.watts()) == (None, None)


def test_without_a_driver_there_are_no_figures() -> None:
    def fails() -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    found = NvidiaGpus(lambda: [US], fails)
    assert (found.nvml, found.used_by_others(), found.watts()) == (None, None, None)
    assert not found.tells_use()


def test_whether_figures_are_available_is_known_before_training() -> None:
    """WSL and MIG give no figures; an idle GPU has no sample yet."""
    mute, idle = {"used": None}, {"used": []}
    assert [gpus(Nvml(*each)).tells_use() for each in ([mute], [idle], [mute, idle])] == [False, True, True]


def test_the_power_of_a_gpu_in_slices_is_not_reported_as_the_nodes() -> None:
    slices, whole = ({"contexts": [TRAINER], "mW": 50_000, "mig": mig} for mig in (1, 0))
    assert [gpus(Nvml(*each)).watts() for each in ([slices], [whole], [slices, whole])] == [None, 50.0, 50.0]


@pytest.mark.gpu
def test_a_real_gpu_gives_figures() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    held = torch.ones(1000, device="cuda")
    found = NvidiaGpus(lambda: [os.getpid()])
    others, watts = found.used_by_others(), found.watts()
    assert held.sum().item() == 1000
    assert others is not None and 0 <= others <= 1
    assert watts is not None and watts > 0
