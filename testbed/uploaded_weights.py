"""Writes safetensors files for a judge, valid and hostile ones.

It is written from the format's description, independently of swarmd's writer.
"""

import json
import math
import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any

SIZES = {"F32": 4, "BF16": 2}


def file_of(
    shapes: Mapping[str, Sequence[int]], format: str = "F32", rng: random.Random | None = None
) -> bytes:
    """Return a valid file with small random numbers."""
    rng = rng or random.Random(1)
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * SIZES[format]
        header[name] = {"dtype": format, "shape": list(shape), "data_offsets": [begin, end]}
    numbers = [rng.uniform(-1, 1) for _ in range(end // SIZES[format])]
    data = struct.pack(f"<{len(numbers)}f", *numbers)
    if format == "BF16":
        data = b"".join(data[i + 2 : i + 4] for i in range(0, len(data), 4))
    return whole(header, data)


def whole(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def parts_of(file: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:end]), file[end:]
