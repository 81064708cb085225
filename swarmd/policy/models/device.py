"""Device and precision of a model, the devices of worker processes, free memory, random generators."""

import contextlib
import ctypes
import importlib.util
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import psutil
import torch

from swarmd.config.amounts import percent
from swarmd.config.config import ModelConfig, NodeConfig
from swarmd.errors import NoModel, SwarmdError, command_for
from swarmd.policy.models.hub import first_line
from swarmd.policy.models.preflight import CGROUPS, OWN_CGROUP, cgroups, cores, driver_there, no_device

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# Larger models use an adapter, unless configured otherwise, and several cores.
LORA_FROM_PARAMETERS: Final = 100_000_000
# Patterns in order: messages of torch for CUDA, HIP and MPS; for a buffer larger than MPS supports; of
# cuBLAS, cuDNN and similar libraries; for the CPU (Linux and macOS, then Windows); for CUDA if NVML cannot
# tell who uses the memory (MIG, Jetson). cuDNN's NOT_SUPPORTED and cuBLAS's NOT_INITIALIZED can mean it too,
# but mostly do not.
OUT_OF_MEMORY: Final = re.compile(
    r"out of memory|Invalid buffer size|STATUS_ALLOC_FAILED|DefaultCPUAllocator: (can't allocate|not enough)"
    r" memory|NVML_SUCCESS == .*CUDACachingAllocator",
    re.IGNORECASE,
)
DTYPES: Final = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "nf4": torch.bfloat16,  # the dtype in which a base stored in 4 bits computes (lora.py)
    }
)
# Models whose activations exceed float16's maximum of 65,504, so that logits become NaN (vLLM's
# _FLOAT16_NOT_SUPPORTED_MODELS; unslothai/unsloth pull requests 4014 and 5092).
PAST_FLOAT16: Final = frozenset(
    ("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm4")
)
# bfloat16 is used on a CPU only if it is this many times as fast as float32, since it is less precise.
BF16_SPEEDUP: Final = 1.5


def choose_device(wanted: str) -> torch.device:
    """Return the wanted device; for "auto" the first of CUDA, Apple's MPS and the CPU that exists.

    Raises NoModel if the wanted device is absent, or torch cannot compute on it.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        wanted = next(name for name, is_there in there.items() if is_there)
    fault = _cuda_fault() if wanted == "cuda" else ""
    if there[wanted] and fault:
        raise NoModel(
            f"there is a GPU, and this torch ({torch.__version__}) cannot compute on it: {fault}. Close other"
            " programs that use it, name another one in CUDA_VISIBLE_DEVICES, install the torch that is built"
            " for it (NVIDIA before Turing: UV_TORCH_BACKEND=cu126 packaging/install.sh) or use --device cpu."
        )
    if not there[wanted]:
        raise no_device(wanted, f"this torch ({torch.__version__}) sees none" + f" ({fault})" * bool(fault))
    return torch.device(wanted)


@cache
def _cuda_fault() -> str:
    """Return why torch cannot compute on a CUDA device; "" if it can.

    This needs a test, since torch also counts a GPU for which its build has no kernels.
    """
    try:
        torch.ones(1, device="cuda").add_(1).item()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        # In this order: an error of driver or kernels, a torch without CUDA, a fault of a GPU after the
        # first.
        return first_line(error).rstrip(".")
    return ""


def unused_gpu(wanted: str, device: torch.device) -> list[str]:
    """Return a note for the operator if "auto" chose the CPU although a GPU's driver is installed."""
    if wanted != "auto" or device.type != "cpu" or not driver_there():
        return []
    return [
        f"training on the CPU: a GPU driver is installed, and this torch ({torch.__version__}) cannot use"
        f" it ({_cuda_fault()}). Run packaging/install.sh, which chooses a suitable torch, restart the"
        " machine if the driver was updated or the machine slept, or set --device cpu"
    ]


def quick_at_bf16(device: torch.device) -> bool:
    """Return whether a device computes bfloat16 fast, by asking the device or by measuring.

    MPS supports bfloat16 on every macOS version that torch 2.13 installs on (14 and later).
    """
    return {
        "cuda": lambda: bool(torch.cuda.is_bf16_supported(including_emulation=False)),
        "mps": lambda: True,
        "cpu": _cpu_gains_from_bf16,
    }[device.type]()


def choose_dtype(
    wanted: str,
    device: torch.device,
    *,
    trained_whole: bool,
    adapter: bool = False,
    kind: str = "",
    probe: Callable[[torch.device], bool] = quick_at_bf16,
) -> torch.dtype:
    """Return bfloat16 if the device computes it fast, else float32, or float16 on CUDA.

    Args:
        wanted: `model.dtype`.
        device: the model's device.
        trained_whole: whether all weights of a small model are trained. It then stays in float32: there is
            room, and at our learning rates most of an update is smaller than a bfloat16 step.
        adapter: whether only an adapter is trained, in float32. Its base may then be in float16 (learner.py
            scales the loss).
        kind: the model_type of the configuration.
        probe: returns whether a device computes bfloat16 fast.

    Raises:
        NoModel: for float16 without an adapter.
    """
    if wanted == "float16" and not adapter:
        raise NoModel(
            "model.dtype 'float16' works only if an adapter is trained. Set model.lora to 'on', or"
            " model.dtype to 'auto'."
        )
    narrow = device.type == "cuda" and kind not in PAST_FLOAT16
    if wanted == "nf4" and narrow and not probe(device):
        return torch.float16
    if wanted != "auto":
        return DTYPES[wanted]
    if trained_whole:
        return torch.float32
    if probe(device):
        return torch.bfloat16
    return torch.float16 if adapter and narrow else torch.float32


def require_bitsandbytes(wanted: str, device: torch.device, instead: str) -> None:
    """Raise NoModel if bitsandbytes, which `wanted` needs, is missing or unsupported. Imports nothing."""
    if device.type == "mps":
        raise NoModel(f"{wanted} does not run on Apple's MPS: {instead}.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise NoModel(
            f"{wanted} needs the library bitsandbytes, which is not installed here. Run"
            f" `{command_for('bitsandbytes')}`, or {instead}."
        )


def _cpu_gains_from_bf16() -> bool:
    """Measure whether bfloat16 is faster than float32.

    CPUs without AMX or AVX512-BF16 emulate it: 6.6 times slower than float32 on a measured machine. CPU time
    of one thread is measured, so that other programs do not change the result.
    """

    # Imported here, since the import takes a while, and CUDA and MPS do not need it.
    from torch.utils.benchmark import Timer

    def seconds(dtype: torch.dtype) -> float:
        values = {"a": torch.ones(128, 512, dtype=dtype), "b": torch.ones(512, 512, dtype=dtype)}
        timer = Timer("a @ b", globals=values, timer=time.thread_time, num_threads=1)
        return min(timer.timeit(1).mean for _ in range(4))

    return seconds(torch.float32) > BF16_SPEEDUP * seconds(torch.bfloat16)


@cache
def gives_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device can multiply 16-bit matrices with a float32 result; MPS cannot."""
    one = torch.ones(1, 8, 8, dtype=dtype, device=device)
    try:
        torch.mm(one[0], one[0], out_dtype=torch.float32)
        torch.bmm(one, one, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


SLOW_AT_BF16: Final = {
    "cuda": "this GPU has no bfloat16 (NVIDIA's have it from Ampere on)",
    "cpu": "this CPU is slow at bfloat16",
}


def limit_memory(config: NodeConfig, device: torch.device, processes: int = 1) -> None:
    """Limit torch in this process to its part of `limits.gpu_memory`, which the processes share."""
    if device.type == "cuda" and (share := percent(config.limits.gpu_memory)) < 1:
        torch.cuda.set_per_process_memory_fraction(share / processes, device.index)
    elif device.type == "mps":
        # 1.0 is Metal's recommended maximum. torch's default is 1.7 times that, and the machine would swap.
        torch.mps.set_per_process_memory_fraction(1.0)


def free_memory(device: torch.device, processes: int = 1) -> int:
    """Return roughly the bytes that each of `processes` can still allocate on the device."""
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        allowed = torch.cuda.get_per_process_memory_fraction(device.index) * about.total_memory
        free = int(torch.cuda.mem_get_info(device)[0])
        if about.is_integrated and torch.version.hip is None:
            # In memory shared with the CPU, CUDA counts the page cache as used, and a download fills it.
            free = _main_memory()
        return min(free // processes, int(allowed) - torch.cuda.memory_reserved(device))
    free = _main_memory()
    if device.type == "mps":
        # Metal's own limit is a fixed share of the machine's memory, even if other programs use that memory.
        free = min(free, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return free // processes


def _main_memory() -> int:
    """Return roughly the bytes of main memory that this process can still allocate."""
    return max(0, min([int(psutil.virtual_memory().available), *cgroup_rooms()]))


def cgroup_rooms(own: Path = OWN_CGROUP, root: Path = CGROUPS) -> Iterator[int]:
    """Yield the unused memory of each control group with a limit, counting page cache as unused.

    This limit is set for a container or a service, and the kernel kills processes that exceed it.
    """
    for group in cgroups(own, root):
        # Fails if there is no such group, or its limit is the word "max".
        with contextlib.suppress(OSError, ValueError, TypeError):
            limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
            cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            yield limit - used + int(cached[1])  # type: ignore[index]


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out, so that a smaller batch may help.

    Devices, libraries and Python use different messages, and few have a separate exception type.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None
    )


@contextlib.contextmanager
def within_memory(refusal: SwarmdError) -> Iterator[None]:
    """Raise `refusal` if memory runs out within the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise refusal from error


def release_cached(device: torch.device) -> None:
    """Release the memory that the allocator caches.

    After running out of memory, the cached blocks may have the wrong sizes. While the node is paused, other
    programs, such as a game, may need the memory.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def threads_for(config: NodeConfig, parameters: int) -> int:
    """Return torch's number of threads on a CPU: as configured, else the best in measurements.

    A small model uses one thread: a second thread would make its round a fifth faster for a third more CPU
    time, and several such nodes often share a machine. A model of more than LORA_FROM_PARAMETERS parameters
    uses as many cores as `limits.cpu` allows, divided among the processes of this run (docs/performance.md).
    """
    if config.model.threads:
        return config.model.threads
    if parameters <= LORA_FROM_PARAMETERS:
        return 1
    return max(1, int(cores(logical=False) * percent(config.limits.cpu)) // config.workers.processes)


def use_threads(config: NodeConfig, device: torch.device, parameters: int) -> None:
    """Set torch's threads: `threads_for` on a CPU; elsewhere the configured number or torch's default."""
    if config.model.threads or device.type == "cpu":
        torch.set_num_threads(threads_for(config, parameters))


def compile_nothing() -> None:
    """Disable kernels that oneDNN compiles at run time.

    A contained process has no executable memory for them.
    """
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]


def keep_freed_memory(device: torch.device) -> bool:
    """Make the C library keep freed memory for later allocations: up to 2 GiB, in blocks below 64 MiB.

    Otherwise each step of a small model returns its activations to the kernel and receives fresh pages, which
    takes 5 to 15 % of its CPU time (docs/performance.md). Uses glibc's mallopt(3); with other libraries and
    devices, nothing is done. Returns whether the setting was changed.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, 2**26) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def to_device(values: Sequence[float] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return these numbers as a tensor on the device; the host does not wait for CUDA's queued work.

    On MPS the copy is synchronous, since MPS would read the numbers after they are freed
    (pytorch/pytorch#189690).
    """
    return torch.as_tensor(values).to(device, non_blocking=device.type == "cuda")


def seeded(device: torch.device, seed: int) -> torch.Generator:
    """Return a separate random number generator, which other draws do not affect."""
    return torch.Generator(device=device).manual_seed(seed)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def count_devices() -> int:
    """Count the visible CUDA devices."""
    return torch.cuda.device_count()


def devices_alike(count: int) -> bool:
    """Return whether the first `count` CUDA devices are of one kind, so that they round equally.

    torch divides a sum into as many blocks as the device can run at once, which changes the rounding.
    """
    return len(set(map(torch.cuda.get_device_name, range(min(count, torch.cuda.device_count()))))) < 2


def environment(config: ModelConfig, place: int) -> Mapping[str, str]:
    """Return environment variables with which a child process sees only the device for its place.

    place: number of the process; the trainer's is 0.
    """
    if choose_device(config.device).type != "cuda":
        return {}
    # ROCm reads both variables, HIP's first.
    variable = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    visible = os.environ.get(variable) or os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()] or [
        str(i) for i in range(torch.cuda.device_count())
    ]
    return {variable: names[place % len(names)]}
