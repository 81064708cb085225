"""A policy's files in a checkpoint: weights or adapter, optimizer and random state.

All files are safetensors or JSON.

    policy.json            the base model, and the settings of the training
    weights.safetensors    every trained tensor, by its name in the network
    training.safetensors   the optimizer's state as "<field>/<tensor name>", including master copies, and the
                           random state

The caller makes the folder atomic (swarmd/trainer/checkpoint.py).
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from swarmd.errors import SwarmdError
from swarmd.policy.training.learner import Learner
from swarmd.policy.training.optimizer import MASTER

SCHEMA = 1
FILES = ("weights.safetensors", "training.safetensors", "policy.json")
_RANDOM = "random"


class CheckpointUnfit(SwarmdError):
    """The checkpoint does not belong to this model.

    Join with the model it was made with, or give another folder with --state-dir.
    """


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The identity of the weights that training began with."""

    source: str
    revision: str | None
    fingerprint: str  # fingerprint of the base weights
    lora_rank: int | None
    dtype: str
    device: str
    prompt: str = ""  # digest of the prompt around a question


@dataclass(frozen=True, slots=True)
class _Document:
    base: ModelIdentity
    updates: int
    schema: int = SCHEMA
    optimizer: str = "adamw"


def contents(
    identity: ModelIdentity, learner: Learner, generator: torch.Generator
) -> Iterator[tuple[str, bytes | memoryview]]:
    """Yield name and content of each file.

    Each content is copied when it is requested, so that later updates do not change it.
    """
    training = {_RANDOM: generator.get_state()} | learner.optimizer.tensors()
    # Returned as bytes: safetensors' own file writer hides the errno of a full disk.
    yield "weights.safetensors", tensor_file(learner.weights)
    yield "training.safetensors", tensor_file(training)
    document = msgspec.json.encode(_Document(identity, learner.updates, optimizer=learner.optimizer.kind))
    yield "policy.json", msgspec.json.format(document, indent=1)


def described(document: bytes) -> ModelIdentity:
    """Return the base model of a checkpoint, from its policy.json.

    Raises CheckpointUnfit if the file cannot be read.
    """
    try:
        return _decoded(document).base
    except msgspec.MsgspecError as error:
        raise CheckpointUnfit(
            f"the checkpoint's policy.json cannot be read ({error}). Use the version of swarmd that wrote it."
        ) from error


def _decoded(document: bytes) -> _Document:
    found = msgspec.json.decode(document, type=_Document)
    if found.schema != SCHEMA:
        raise CheckpointUnfit(
            f"the checkpoint has schema {found.schema}, this version reads {SCHEMA}. Use the version of"
            " swarmd that wrote it."
        )
    return found


def read(folder: Path, identity: ModelIdentity, learner: Learner, generator: torch.Generator) -> list[str]:
    """Restore the state that `contents` yielded. Returns notes for the operator.

    Raises CheckpointUnfit; OSError, ValueError or KeyError if a file is damaged.
    """
    document = _decoded((folder / "policy.json").read_bytes())
    _check(document.base, identity)
    try:
        weights = load_file(folder / "weights.safetensors")
        training = load_file(folder / "training.safetensors")
    except SafetensorError as error:
        raise ValueError(f"the policy in {folder} cannot be read ({error})") from error
    if {n: t.shape for n, t in weights.items()} != {n: p.shape for n, p in learner.weights.items()}:
        raise CheckpointUnfit(
            f"the weights in {folder} have other tensor names or shapes than {identity.source}. Join with"
            " the model it was made with, or give another folder with --state-dir."
        )
    random, notes = training.pop(_RANDOM), list[str]()
    if document.optimizer != learner.optimizer.kind:
        training = {key: value for key, value in training.items() if key.startswith(f"{MASTER}/")}
        notes.append(
            f"the checkpoint's optimizer was {document.optimizer}, this run's is {learner.optimizer.kind}:"
            " the optimizer's moments are reset"
        )
    learner.optimizer.load(weights, training)
    learner.updates = document.updates
    if document.base.device == identity.device:
        generator.set_state(random)
    else:
        generator.manual_seed(generator.initial_seed() + document.updates)
        notes.append(
            f"the checkpoint was made on {document.base.device}: the random generator is seeded again"
        )
    if document.base.dtype != identity.dtype:
        notes.append(f"the checkpoint was made in {document.base.dtype}, this run is in {identity.dtype}")
    return notes


def _check(then: ModelIdentity, now: ModelIdentity) -> None:
    if then.lora_rank != now.lora_rank:
        raise CheckpointUnfit(
            f"the checkpoint holds {_kind(then)} and the configuration asks for {_kind(now)}. Set"
            + (
                f" model.lora = 'on' and model.lora_rank = {then.lora_rank}"
                if then.lora_rank
                else " model.lora = 'off'"
            )
            + ", or give another folder with --state-dir."
        )
    # If all weights were trained, the checkpoint has them all, so an equal source is enough. An adapter is
    # useful only on exactly the weights that it was trained on.
    if then.fingerprint != now.fingerprint and (now.lora_rank is not None or then.source != now.source):
        at = f" at {then.revision}" if then.revision else ""
        again = f"model.name = {then.source!r}" + (
            f", model.revision = {then.revision!r}" if then.revision else ""
        )
        raise CheckpointUnfit(
            f"the checkpoint was trained from {then.source}{at}, this is"
            f" {now.source}{f' at {now.revision}' if now.revision else ''}: another base model. Set {again},"
            " or give another folder with --state-dir."
        )


def _kind(identity: ModelIdentity) -> str:
    return (
        f"a LoRA adapter of rank {identity.lora_rank}" if identity.lora_rank else "all weights of the model"
    )


_DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensor_file(tensors: Mapping[str, Tensor]) -> memoryview:
    """Encode tensors of any device and layout as a safetensors file.

    The bytes are an independent copy. `safetensors.torch.save` writes the same bytes
    (huggingface/safetensors, "Format"), but it goes through NumPy and makes two more copies. That takes two
    to five times as long for the hundreds of small tensors of a small model.
    """
    # Largest elements first, so that each tensor starts at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    ends = [0, *accumulate(tensor.nbytes for _, tensor in ordered)]
    offsets = list(pairwise(ends))
    header = {
        name: {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        for (name, tensor), place in zip(ordered, offsets, strict=True)
    }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    file = torch.empty(start + ends[-1], dtype=torch.uint8)
    data = memoryview(file.numpy())  # type: ignore[arg-type]  # an array is a buffer
    data[:start] = struct.pack("<Q", len(text)) + text
    places = [
        file[start + begin : start + end].view(tensor.dtype).view(tensor.shape)
        for (begin, end), (_, tensor) in zip(offsets, ordered, strict=True)
    ]
    if ordered:
        torch._foreach_copy_(places, [tensor.detach() for _, tensor in ordered])
    return data


@torch.no_grad()
def put_weights(trained: Mapping[str, Tensor], file: bytes) -> None:
    """Copy the values of a safetensors file into the trained parameters.

    Raises ValueError if they belong to another model.
    """
    try:
        tensors = load(file)
    except SafetensorError as error:
        raise ValueError(f"the weights cannot be read ({error})") from error
    if {name: t.shape for name, t in tensors.items()} != {name: p.shape for name, p in trained.items()}:
        raise ValueError("the weights have other names or shapes than the model")
    for name, parameter in trained.items():
        parameter.copy_(tensors.pop(name))
