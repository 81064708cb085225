"""A pretended GPU that computes on the CPU, and rejects operations that mix its tensors with CPU tensors.

As on a GPU, a 16-bit product is rounded before it is added; as on MPS, a copy must be awaited. Code that runs
on it does not mix devices on CUDA either. It uses torch's extension point for other devices (PrivateUse1)
from Python. It does not imitate memory, speed and kernels of a GPU.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
CPU = torch.device("cpu")
# Operations that accept tensors of both devices, as on CUDA. INDEXES accept CPU tensors only as their second
# argument.
COPIES = frozenset({"copy_", "_to_copy", "_foreach_copy_"})
INDEXES = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
# Composite operations that are not split, because torch chooses their parts by the device.
WHOLE = frozenset({"scaled_dot_product_attention"})


class MixesDevices(Exception):
    """An operation mixed tensors of the CPU and of the device."""


class OnDevice(Tensor):
    """A tensor on the device. `memory` holds its values on the CPU."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> "OnDevice":
        # Even in inference mode, a view of a weight is not an inference tensor.
        with torch.inference_mode(memory.is_inference()):
            made: OnDevice = Tensor._make_wrapper_subclass(
                cls,
                memory.size(),
                strides=memory.stride(),
                storage_offset=memory.storage_offset(),
                dtype=memory.dtype,
                device=torch.device(NAME, 0),
            )
        made.memory = memory
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return torch._C.TensorBase.data.__get__(self)

    @data.setter
    def data(self, other: "OnDevice") -> None:
        self.memory = other.memory
        torch._C.TensorBase.data.__set__(self, other)

    def tolist(self) -> list[Any]:
        return self.memory.tolist()


class OnDeviceGenerator(torch.Generator):
    """A generator on the CPU that reports the pretended device as its own."""

    def __new__(cls, device: Any = "cpu") -> "OnDeviceGenerator":
        made = super().__new__(cls, "cpu")
        made._of = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        return self._of


class Pretending(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested lists, tuples and dicts, several times faster than torch's pytree."""
    if type(value) in (list, tuple):
        for part in value:
            yield from leaves(part)
    elif type(value) is dict:
        yield from leaves([*value.values()])
    else:
        yield value


def mapped(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """Return nested lists, tuples and dicts with each leaf of this kind changed."""
    if type(value) in (list, tuple):
        return type(value)([mapped(kind, change, part) for part in value])
    if type(value) is dict:
        return {name: mapped(kind, change, part) for name, part in value.items()}
    return change(value) if isinstance(value, kind) else value


def computed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operation of the device on the CPU. Raise MixesDevices if it mixes devices."""
    name = func.overloadpacket.__name__
    there = any(isinstance(t, OnDevice) for t in leaves([args, kwargs]))
    wanted = kwargs.get("device")
    if not there and wanted is None and name not in COPIES:
        return func(*args, **kwargs)
    if name not in WHOLE:
        with Pretending():
            # In inference mode, composite operations are not split.
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
    mixable = args[:1] + args[2:] if name in INDEXES else args
    if name == "addmm":
        return computed(torch.ops.aten.add.Tensor, (args[0], args[1] @ args[2]), {})
    tensors = [t for t in leaves([mixable, kwargs]) if isinstance(t, Tensor)]
    if there and name not in COPIES:
        for t in tensors:
            if t.dim() and not isinstance(t, OnDevice):
                raise MixesDevices(
                    f"{func}: a tensor {tuple(t.shape)} on the {t.device}, next to one on the device"
                )
    if name in COPIES and not there and kwargs.get("non_blocking"):
        raise MixesDevices(f"{func}: MPS would read the CPU's memory when it is released")
    to = there if wanted is None else torch.device(wanted).type == NAME
    inner_args, inner = mapped(OnDevice, lambda t: t.memory, ([*args], {**kwargs}))
    if wanted is not None and to:
        inner["device"] = CPU
    result = func(*inner_args, **inner)
    if to:
        result = mapped(Tensor, OnDevice, result)
    return (
        return_and_correct_aliasing(func, args, kwargs, result) if there and to and aliases(func) else result
    )


@cache
def aliases(func: Any) -> bool:
    """Return whether an operation returns an argument or a view of one."""
    schema = func._schema
    return any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))


def _empty(size: Sequence[int], *, dtype: Any = None, **_: Any) -> OnDevice:
    return OnDevice(torch.empty(size, dtype=dtype))


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any) -> OnDevice:
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, _non_blocking: bool = False) -> Tensor:
    of = [t.memory if isinstance(t, OnDevice) else t for t in (source, target)]
    of[1].copy_(of[0])
    return target


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    there: ClassVar = False

    def is_available(self) -> bool:
        return self.there

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device: int) -> bool:
        return self.there


def _register() -> None:
    """Register the device with torch for the rest of this process."""
    _setup_privateuseone_for_python_backend(NAME, hook=_Hooks())
    # `torch.tensor` copies to a device without the dispatch mode.
    for operation, kernel in (
        ("empty.memory_format", _empty),
        ("empty_strided", _empty_strided),
        ("_copy_from", _copy_from),
    ):
        _LIBRARY.impl(operation, kernel, "PrivateUse1")


_LIBRARY = torch.library.Library("aten", "IMPL")


@contextlib.contextmanager
def pretending() -> Iterator[torch.device]:
    """Yield the device, which exists until the block ends."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _register()
    own, _Hooks.there = torch.Generator, True
    # Otherwise a weight that two modules share would become two weights on the device.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        torch.Generator = OnDeviceGenerator  # type: ignore[misc]
        with Pretending():
            yield torch.device(NAME, 0)
    finally:
        torch.Generator, _Hooks.there = own, False  # type: ignore[misc]
        torch.__future__.set_swap_module_params_on_conversion(False)
