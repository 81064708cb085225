"""Check uploaded weights while they arrive, chunk by chunk: digest, size, names, shapes and values.

Pure; keeps no weights. Only safetensors files with exactly the tensors of a known model pass. The format
(huggingface/safetensors, "Format"): eight bytes with the header's length, little-endian; the header, JSON;
the tensors' bytes, without a gap.
"""

import math
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Final, Literal

import msgspec

# The header of an adapter with 400 tensors has about 50,000 bytes.
MAX_HEADER_BYTES: Final = 256 * 1024
_BYTES: Final = {"F32": 4, "BF16": 2}  # bytes of a number, by format
# The exponent bits of a BF16; all are set in NaN and infinity.
_NOT_FINITE: Final = 0x7F80

Shapes = Mapping[str, tuple[int, ...]]


class UnfitWeights(Exception):
    """The file is refused, with cause and remedy."""

    def __init__(self, error: str, remedy: str) -> None:
        super().__init__(error)
        self.error, self.remedy = error, remedy


_Offset = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: Literal["F32", "BF16"]
    shape: Annotated[list[_Offset], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Offset, _Offset]


_Metadata = Annotated[dict[str, str], msgspec.Meta(max_length=16)]


def checkpoint_name(name: str) -> str:
    """Return the checkpoint's name of a tensor that peft calls `base_model.model.….lora_A.weight`.

    It is `….lora_A.default.weight`. Any other name is returned unchanged.
    """
    return re.sub(r"\Abase_model\.model\.(.+\.lora_[AB])\.weight\Z", r"\1.default.weight", name)


def with_checkpoint_names(file: bytes) -> bytes:
    """Return a checked file with its tensors renamed as in a checkpoint."""
    end = 8 + int.from_bytes(file[:8], "little")
    entries = msgspec.json.decode(file[8:end], type=dict[str, msgspec.Raw])
    header = msgspec.json.encode({checkpoint_name(name): entry for name, entry in entries.items()})
    return len(header).to_bytes(8, "little") + header + file[end:]


def check_header(header: bytes, data: int, shapes: Shapes) -> str:
    """Check that the header describes exactly these tensors in `data` bytes.

    Returns their number format. Raises UnfitWeights.
    """
    try:
        parts = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        if "__metadata__" in parts:
            msgspec.json.decode(parts.pop("__metadata__"), type=_Metadata)
        entries = {
            checkpoint_name(name): msgspec.json.decode(raw, type=_Entry) for name, raw in parts.items()
        }
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # A ValueError means that the header is not UTF-8.
        raise UnfitWeights(
            "the header does not describe a safetensors file of F32 or BF16 tensors", _SAVE_AGAIN
        ) from None
    other = len(entries.keys() ^ shapes.keys()) + len(parts) - len(entries)
    if other:
        raise UnfitWeights(f"{other} tensors are missing, unknown or duplicated", _OTHER_MODEL)
    if any(tuple(entry.shape) != shapes[name] for name, entry in entries.items()):
        raise UnfitWeights("the tensors' shapes differ from the model's", _OTHER_MODEL)
    if len(formats := {entry.dtype for entry in entries.values()}) != 1:
        raise UnfitWeights("the tensors have several number formats", "Save them all as F32, or all as BF16.")
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: entry.data_offsets):
        if (
            entry.data_offsets[0] != end
            or entry.data_offsets[1] != end + math.prod(entry.shape) * _BYTES[entry.dtype]
        ):
            raise UnfitWeights(
                "the tensors overlap, leave gaps, or do not have the bytes of their shape", _SAVE_AGAIN
            )
        end = entry.data_offsets[1]
    if end != data:
        raise UnfitWeights("the file is longer or shorter than its tensors", _SAVE_AGAIN)
    return formats.pop()


class WeightsCheck:
    """Checks a file given in pieces of any size, until `end`.

    `feed` and `end` raise UnfitWeights at the first fault.
    """

    def __init__(self, size: int, digest: str, shapes: Shapes) -> None:
        """Start a check.

        size, digest: declared bytes and SHA-256. shapes: by tensor. Raises UnfitWeights if no file of these
        tensors has this size.
        """
        numbers = sum(math.prod(shape) for shape in shapes.values())
        least, most = 2 * numbers + 10, 4 * numbers + 8 + MAX_HEADER_BYTES
        if not least <= size <= most:
            raise UnfitWeights(
                f"{size:,} bytes do not fit this model, whose weights take {least:,} to {most:,}",
                _OTHER_MODEL,
            )
        self._size, self._declared, self._shapes = size, digest, shapes
        self._digest = sha256()
        self._received = 0
        self._head: bytearray | None = bytearray()  # collected until the header is complete
        self._format = ""
        self._rest = b""  # the first bytes of an incomplete number

    def feed(self, piece: bytes) -> None:
        self._received += len(piece)
        if self._received > self._size:
            raise UnfitWeights("the file is larger than its declared size", "Declare the size of the file.")
        self._digest.update(piece)
        if self._head is None:
            self._check_numbers(piece)
            return
        self._head += piece
        if len(self._head) < 8:
            return
        length = int.from_bytes(self._head[:8], "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, self._size - 8):
            raise UnfitWeights("this is not a safetensors file, or its header is too large", _SAVE_AGAIN)
        if len(self._head) >= 8 + length:
            head, self._head = bytes(self._head), None
            self._format = check_header(head[8 : 8 + length], self._size - 8 - length, self._shapes)
            self._check_numbers(head[8 + length :])

    def _check_numbers(self, piece: bytes) -> None:
        piece = self._rest + piece
        whole = len(piece) - len(piece) % _BYTES[self._format]
        self._rest = piece[whole:]
        numbers = memoryview(piece)[:whole]
        finite = (
            all(map(math.isfinite, numbers.cast("f")))
            if self._format == "F32"
            else all(bits & _NOT_FINITE != _NOT_FINITE for bits in numbers.cast("H"))
        )
        if not finite:
            raise UnfitWeights(
                "some weights are infinite or not a number", "Train again from an older checkpoint."
            )

    def end(self) -> None:
        if self._received != self._size:
            raise UnfitWeights(
                f"{self._received:,} bytes arrived of {self._size:,} that were declared",
                "Send the whole file.",
            )
        if self._declared != self._digest.hexdigest():
            raise UnfitWeights("the SHA-256 differs from the declared one", "Send the file that you signed.")


_SAVE_AGAIN: Final = "Send weights.safetensors of a checkpoint as swarmd wrote it."
_OTHER_MODEL: Final = (
    "Name the model, and the rank of the adapter, that the weights are of; GET /v1/verified lists the judge's"
    " models."
)
