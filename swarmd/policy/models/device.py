"""Device and precision of a model, devices of its processes, free memory, random generators."""

import contextlib
import ctypes
import importlib.util
import os
import platform
import re
import time
import timeit
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
# Larger models get an adapter unless the configuration says otherwise, and all cores.
LORA_FROM_PARAMETERS: Final = 100_000_000
# In order: what torch says of CUDA, HIP and MPS; of a buffer larger than MPS ever makes; of cuBLAS, cuDNN and
# their kin; of the CPU (Linux and macOS, then Windows); of CUDA where NVML cannot tell who has memory (MIG,
# Jetson). cuDNN's NOT_SUPPORTED and cuBLAS's NOT_INITIALIZED can mean it too, and mostly mean something else.
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
        "nf4": torch.bfloat16,  # of a base in 4 bits (lora.py): what it computes in
    }
)
# Whose activations pass float16's 65,504: no answer has a probability then (vLLM's
# _FLOAT16_NOT_SUPPORTED_MODELS; unslothai/unsloth pull requests 4014 and 5092).
PAST_FLOAT16: Final = frozenset(
    ("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm4")
)
# How much faster than float32 it must be on a CPU, before we give up its digits.
BF16_SPEEDUP: Final = 1.5


def choose_device(wanted: str) -> torch.device:
    """Return the wanted device; for "auto" CUDA, then Apple's MPS, then the CPU.

    Raises NoModel where the wanted one is absent, or is there and torch cannot compute on it.
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

    torch counts a GPU that its build has no kernels for.
    """
    try:
        torch.ones(1, device="cuda").add_(1).item()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        # In turn: of a driver or kernels, of a torch without CUDA, of another GPU than the first.
        return first_line(error).rstrip(".")
    return ""


def unused_gpu(wanted: str, device: torch.device) -> list[str]:
    """Return a note for the operator where "auto" took the CPU although a GPU's driver is here."""
    if wanted != "auto" or device.type != "cpu" or not driver_there():
        return []
    return [
        f"training on the CPU: a GPU's driver is here, and this torch ({torch.__version__}) cannot use it"
        f" ({_cuda_fault()}); packaging/install.sh chooses the torch for it, a restart of the machine mends a"
        " driver that was updated or slept, --device cpu leaves it idle"
    ]


def quick_at_bf16(device: torch.device) -> bool:
    """Return whether a device is quick at bfloat16, by asking it or by trying.

    MPS has it on every macOS that torch 2.13 installs on (14).
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
    """Return bfloat16 where the device is quick at it, else float32, or float16 on CUDA.

    trained_whole: a small model, all of whose weights are trained. It stays in float32: there is room, and at
        our learning rates most of an update is smaller than a bfloat16 step.
    adapter: only an adapter is trained, in float32: its base may be in float16 (learner.py scales the loss).
    kind: the model_type of its configuration.

    Raises NoModel for float16 without an adapter.
    """
    if wanted == "float16" and not adapter:
        raise NoModel(
            "model.dtype 'float16' is for a model under an adapter. Set model.lora to 'on', or another dtype."
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
    """Raise NoModel where this library, which `wanted` needs, does not run or is missing; import nothing."""
    if device.type == "mps":
        raise NoModel(f"{wanted} does not run on Apple's MPS: {instead}.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise NoModel(
            f"{wanted} needs the library bitsandbytes, which is not installed here. Run"
            f" `{command_for('bitsandbytes')}`, or {instead}."
        )


def _cpu_gains_from_bf16() -> bool:
    """Measure whether bfloat16 is quicker than float32.

    CPUs without AMX or AVX512-BF16 emulate it: 6.6 times slower than float32 where it was measured. The time
    is that of the processor and of one thread, so that other programs do not change the answer.
    """

    def seconds(dtype: torch.dtype) -> float:
        a, b = torch.ones(128, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        return min(timeit.repeat(lambda: a @ b, number=1, repeat=4, timer=time.thread_time))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return seconds(torch.float32) > BF16_SPEEDUP * seconds(torch.bfloat16)
    finally:
        torch.set_num_threads(threads)


@cache
def gives_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device's products of 16-bit matrices can be asked for in float32; MPS has none."""
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
    """Keep torch in this process to its part of `limits.gpu_memory`, which a device's processes share."""
    if device.type == "cuda" and (share := percent(config.limits.gpu_memory)) < 1:
        torch.cuda.set_per_process_memory_fraction(share / processes, device.index)
    elif device.type == "mps":
        # Of what Metal recommends. torch takes 1.7 times that, so the machine would swap before a refusal.
        torch.mps.set_per_process_memory_fraction(1.0)


def free_memory(device: torch.device, processes: int = 1) -> int:
    """Return roughly how many bytes each of `processes` can still allocate on the device."""
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        allowed = torch.cuda.get_per_process_memory_fraction(device.index) * about.total_memory
        free = int(torch.cuda.mem_get_info(device)[0])
        if about.is_integrated and torch.version.hip is None:
            # CUDA takes the page cache of memory that it shares with the CPU for used: a download fills it.
            free = _main_memory()
        return min(free // processes, int(allowed) - torch.cuda.memory_reserved(device))
    free = _main_memory()
    if device.type == "mps":
        # Metal's own limit is a share of the machine's memory, whatever other programs have of it.
        free = min(free, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return free // processes


def _main_memory() -> int:
    """Return roughly how many bytes of the machine's memory this process can still take."""
    return max(0, min([int(psutil.virtual_memory().available), *cgroup_rooms()]))


def cgroup_rooms(own: Path = OWN_CGROUP, root: Path = CGROUPS) -> Iterator[int]:
    """Yield what each group with a limit has left of its memory, but for page cache.

    It is the limit of a container or of a service, whose processes the kernel kills beyond it.
    """
    for group in cgroups(own, root):
        # There is no such group, or no limit, which is the word "max".
        with contextlib.suppress(OSError, ValueError, TypeError):
            limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
            cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            yield limit - used + int(cached[1])  # type: ignore[index]


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out, so that a smaller batch may help.

    Devices, their libraries and Python each word it differently, and few have an exception type for it.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None
    )


@contextlib.contextmanager
def within_memory(refusal: SwarmdError) -> Iterator[None]:
    """Raise `refusal` where memory runs out within the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise refusal from error


def release_cached(device: torch.device) -> None:
    """Give back what the allocator keeps for later.

    After an out-of-memory it may be in the wrong sizes; while the node is paused a game may want it.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def threads_for(config: NodeConfig, parameters: int) -> int:
    """Return torch's threads on a CPU: those of the configuration, or else what measurements suggest.

    A second thread makes a small model's round a fifth quicker for a third more CPU, and several such nodes
    often share a machine: one thread. From LORA_FROM_PARAMETERS parameters on a round takes as many cores as
    `limits.cpu` allows, shared among the processes of this run (docs/performance.md).
    """
    if config.model.threads:
        return config.model.threads
    if parameters <= LORA_FROM_PARAMETERS:
        return 1
    return max(1, int(cores(logical=False) * percent(config.limits.cpu)) // config.workers.processes)


def use_threads(config: NodeConfig, device: torch.device, parameters: int) -> None:
    """Set torch's threads: `threads_for` on a CPU, else as configured, or torch's own choice."""
    if config.model.threads or device.type == "cpu":
        torch.set_num_threads(threads_for(config, parameters))


def compile_nothing() -> None:
    """Have torch use no kernels that oneDNN compiles while it runs.

    A contained process has no executable memory to put them in.
    """
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]


def keep_freed_memory(device: torch.device) -> bool:
    """Have the C library keep what is freed for the next allocation: up to 2 GiB, of blocks below 64 MiB.

    Otherwise each step of a small model gives its activations back to the kernel and takes them again as
    fresh pages: 5 to 15 % of its CPU time (docs/performance.md). It is glibc's mallopt(3); elsewhere, and on
    other devices, nothing is done. Returns whether the library was asked to.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, 2**26) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def to_device(values: Sequence[float] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return these numbers as a tensor on the device; CUDA's work is not waited for.

    MPS would read them when they are gone (pytorch/pytorch#189690).
    """
    return torch.as_tensor(values).to(device, non_blocking=device.type == "cuda")


def seeded(device: torch.device, seed: int) -> torch.Generator:
    """Return a random number generator of our own, which nobody else's draws change."""
    return torch.Generator(device=device).manual_seed(seed)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def count_devices() -> int:
    """Count the CUDA devices that are visible."""
    return torch.cuda.device_count()


def devices_alike(count: int) -> bool:
    """Return whether the first `count` CUDA devices are of one kind, so that they round alike.

    torch sums over as many blocks as a device has room for.
    """
    return len(set(map(torch.cuda.get_device_name, range(min(count, torch.cuda.device_count()))))) < 2


def environment(config: ModelConfig, place: int) -> Mapping[str, str]:
    """Return the environment in which a child process sees only the device of its place.

    place: counted from the trainer's, 0.
    """
    if choose_device(config.device).type != "cuda":
        return {}
    # ROCm heeds both, its own first.
    variable = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    visible = os.environ.get(variable) or os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()] or [
        str(i) for i in range(torch.cuda.device_count())
    ]
    return {variable: names[place % len(names)]}
