"""Writes tensors as safetensors bytes with one copy.

The format (huggingface/safetensors, "Format"): eight bytes with the header's length, little-endian; the
header, JSON, padded with spaces; the tensors' bytes, without a gap. `safetensors.torch.save` makes the same
file by way of NumPy and two more copies: two to five times as long for the hundreds of small tensors of a
small model.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

_NAMES: Final = {
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

    The bytes are a copy: later changes of the tensors leave it alone.
    """
    # Largest elements first, so that each tensor begins at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    file = torch.empty(start + end, dtype=torch.uint8)
    data = memoryview(file.numpy())  # type: ignore[arg-type]  # an array is a buffer
    data[:start] = struct.pack("<Q", len(text)) + text
    places = [
        file[start + begin : start + end].view(tensor.dtype).view(tensor.shape)
        for (begin, end), (_, tensor) in zip(
            (entry["data_offsets"] for entry in header.values()), ordered, strict=True
        )
    ]
    if ordered:
        torch._foreach_copy_(places, [tensor.detach() for _, tensor in ordered])
    return data
