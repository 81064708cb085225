"""Two hundred uploads that a judge must not load: ten of each of twenty kinds.

The tests and benchmarks/judge/hostile_uploads.py use them.
"""

import gzip
import io
import json
import math
import pickle
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from typing import Any

from testbed.uploaded_weights import whole

EACH = 10
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class HostileUpload:
    kind: str
    body: bytes
    said: dict[str, Any] = field(default_factory=dict)  # false fields, added to the upload's declaration
    headers: dict[str, str] = field(default_factory=dict)
    slow: bool = False  # whether its last byte is never sent


def uploads(shapes: Shapes, seed: int) -> Iterator[HostileUpload]:
    """Yield EACH uploads of every kind. `shapes`: the tensors of a model that the judge knows."""
    rng = random.Random(seed)
    for kind, make in KINDS.items():
        for number in range(EACH):
            made = make(shapes, rng, number)
            yield HostileUpload(kind, made) if isinstance(made, bytes) else HostileUpload(kind, *made)


def header_of(shapes: Shapes, width: int = 2) -> dict[str, Any]:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * width
        header[name] = {
            "dtype": "BF16" if width == 2 else "F32",
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    return header


def _good(shapes: Shapes) -> bytes:
    return whole(header_of(shapes), bytes(_numbers(shapes) * 2))


def _numbers(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _sized(shapes: Shapes, start: bytes, number: int) -> bytes:
    """Return the file unchanged if `number` is odd; else cut or pad it to the size of the model's weights."""
    size = len(_good(shapes))
    return start if number % 2 else (start + bytes(max(0, size - len(start))))[:size]


def _changed(shapes: Shapes, change: Callable[[dict[str, Any], str], None], rng: random.Random) -> bytes:
    """Return a valid file, except that the header's entry of one tensor is changed."""
    header = header_of(shapes)
    change(header, rng.choice(sorted(header)))
    return whole(header, bytes(_numbers(shapes) * 2))


@cache
def _zip_bomb() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../model.safetensors", bytes(10**7))
    return out.getvalue()


@cache
def _gzip_bomb() -> bytes:
    return gzip.compress(bytes(10**7))


def _zip(shapes: Shapes, rng: random.Random, number: int) -> bytes:
    return _sized(shapes, _zip_bomb()[number // 2 * 4 :], number)


def _gzip(shapes: Shapes, rng: random.Random, number: int) -> bytes:
    return _sized(shapes, _gzip_bomb()[: len(_gzip_bomb()) - number // 2], number)


def _symlinks(shapes: Shapes, rng: random.Random, number: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        link = tarfile.TarInfo("model.safetensors")
        link.type, link.linkname = (
            (tarfile.SYMTYPE, tarfile.LNKTYPE)[number // 2 % 2],
            ("/etc/passwd", "../../judge.key")[number % 2],
        )
        archive.addfile(link)
    return _sized(shapes, out.getvalue(), number)


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch /tmp/hostile-upload",)


def _pickles(shapes: Shapes, rng: random.Random, number: int) -> bytes:
    text = pickle.dumps(_Runs(), protocol=number % 6)
    if number >= 6:  # in the format of torch.save
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("archive/data.pkl", text)
        text = out.getvalue()
    return _sized(shapes, text, number)


def _wrong_shapes(shapes: Shapes, rng: random.Random, number: int) -> bytes:
    def change(header: dict[str, Any], name: str) -> None:
        shape = header[name]["shape"]
        header[name]["shape"] = [[*shape[::-1], 1], [*shape, 1], [math.prod(shape)] * 2, [], [1] * 9][
            number % 5
        ]

    return _changed(shapes, change, rng)


def _huge_vocabulary(shapes: Shapes, rng: random.Random, number: int) -> Any:
    def change(header: dict[str, Any], name: str) -> None:
        rows = [2**20, 2**31, 2**40, 2**62, 10**18][number % 5]
        begin, width = header[name]["data_offsets"][0], math.prod(shapes[name][1:])
        header[name]["shape"] = [rows, *shapes[name][1:]]
        if number >= 5:
            header[name]["data_offsets"] = [begin, begin + rows * width * 2]

    return _changed(shapes, change, rng)


def _huge_header(shapes: Shapes, rng: random.Random, number: int) -> bytes:
    length = [2**64 - 1, 2**63, 2**40, 2**31, 10**8, 10**6, 300_000, 0, 1, 2**32][number]
    return struct.pack("<Q", length) + _good(shapes)[8:]


def _overlaps(shapes: Shapes, rng: random.Random, number: int) -> bytes:
    def change(header: dict[str, Any], name: str) -> None:
        begin, end = header[name]["data_offsets"]
        shift = -2 * (number + 1) if begin else 2 * (number + 1)
        header[name]["data_offsets"] = [begin + shift, end + shift]

    return _changed(shapes, change, rng)


def _out_of_range(shapes: Shapes, rng: random.Random, number: int) -> bytes:
    def change(header: dict[str, Any], name: str) -> None:
        begin, end = header[name]["data_offsets"]
        far = [2**31, 2**53, 2**63, 2**64, 10**30]
        header[name]["data_offsets"] = [
            [begin + far[number % 5], end + far[number % 5]],
            [-far[number % 5], end],
        ][number // 5]

    return _changed(shapes, change, rng)


def _configuration(shapes: Shapes, rng: random.Random, number: int) -> bytes:
    document: dict[str, Any] = {
        "model_type": "qwen2",
        "auto_map": {"AutoModelForCausalLM": "evil--repo.Model"},
        "trust_remote_code": True,
    }
    text = json.dumps(
        document | {"_attn_implementation": "evil/repo", "vocab_size": 10 ** (number + 3)}
    ).encode()
    return _sized(shapes, (struct.pack("<Q", len(text)) + text) if number % 4 < 2 else text, number)


def _tokenizer(shapes: Shapes, rng: random.Random, number: int) -> bytes:
    text = json.dumps(
        {"model": {"type": "BPE", "vocab": {"a" * i: i for i in range(300)}, "merges": ["a a"] * 5_000}}
    ).encode()
    return _sized(shapes, (struct.pack("<Q", len(text)) + text) if number % 4 < 2 else text, number)


def _not_numbers(shapes: Shapes, rng: random.Random, number: int) -> bytes:
    width = 2 + 2 * (number % 2)
    data = bytearray(_numbers(shapes) * width)
    place = [0, len(data) - width, rng.randrange(_numbers(shapes)) * width][number % 3]
    bits = struct.pack("<f", [math.nan, math.inf, -math.inf][number % 3])
    data[place : place + width] = bits[4 - width :]
    return whole(header_of(shapes, width), bytes(data))


def _deep(shapes: Shapes, rng: random.Random, number: int) -> bytes:
    opening, closing = ((b"[", b"]"), (b'{"a":', b"}"))[number % 2]
    depth = [1_000, 5_000, 20_000, 40_000, 43_000][number // 2]
    text = opening * depth + (b"1" + closing * depth)[: 262_000 - len(opening) * depth]
    return whole(b'{"a":' * (number == 8) + text, bytes(_numbers(shapes) * 2))


def _wrong_digest(shapes: Shapes, rng: random.Random, number: int) -> Any:
    return _good(shapes), {"sha256": rng.randbytes(32).hex()}


def _longer(shapes: Shapes, rng: random.Random, number: int) -> Any:
    good = _good(shapes)
    if number % 2:
        return good + bytes(2 ** (2 * number)), {}  # declared with its true size
    return (
        good + bytes(2 ** (2 * number)),
        {"bytes": len(good), "sha256": sha256(good).hexdigest()},
        {"transfer-encoding": "chunked"},
    )


def _shorter(shapes: Shapes, rng: random.Random, number: int) -> Any:
    good = _good(shapes)
    cut = good[: rng.randrange(len(good))] if number else b""
    if number % 2:
        return good[: -2 * number], {}
    return cut, {"bytes": len(good), "sha256": sha256(good).hexdigest()}, {"transfer-encoding": "chunked"}


def _slow(shapes: Shapes, rng: random.Random, number: int) -> Any:
    good = _good(shapes)
    said = {"bytes": len(good), "sha256": sha256(good).hexdigest()}
    return (
        good[: [0, 1, 7, 8, 9, 100, 1_000, len(good) // 2, len(good) - 2, len(good) - 1][number]],
        said,
        {},
        True,
    )


def _strange(shapes: Shapes, rng: random.Random, number: int) -> bytes:
    def change(header: dict[str, Any], name: str) -> None:
        of_the_tensor: list[dict[str, Any]] = [
            {"dtype": "F64"},
            {"dtype": "PICKLE"},
            {"shape": [2**31, 2**33]},
            {"more": {"__reduce__": "os.system"}},
            {"data_offsets": header[name]["data_offsets"][:1]},
        ]
        beside_it: list[dict[str, Any]] = [
            {"__metadata__": {"x": {"y": 1}}},
            {"__metadata__": {f"k{i}": "v" * 100 for i in range(2_000)}},
            {f"t{i}": {} for i in range(20_000)},
        ]
        if number == 0:
            header["../../../etc/passwd"] = header.pop(name)
        elif number == 1:
            del header[name]["shape"]
        elif number < 7:
            header[name] |= of_the_tensor[number - 2]
        else:
            header |= beside_it[number - 7]

    return _changed(shapes, change, rng)


def _compressed(shapes: Shapes, rng: random.Random, number: int) -> Any:
    return _good(shapes), {}, {"content-encoding": ["gzip", "zstd", "br", "deflate", "x-gzip"][number % 5]}


def _declared(shapes: Shapes, rng: random.Random, number: int) -> Any:
    said: Sequence[dict[str, Any]] = [
        {"model": "../../etc"},
        {"model": "/etc/passwd"},
        {"model": "evil/repo"},
        {"lora_rank": 2**40},
        {"lora_rank": 0},
        {"lora_rank": 8, "base": "../../../../../."},
        {"answers": 10**9},
        {"sha256": "../judge.key"},
        {"folder": "/etc"},
        {"lora_rank": 512, "base": "0" * 16},
    ]
    return _good(shapes), said[number]


KINDS: Mapping[str, Callable[[Shapes, random.Random, int], Any]] = {
    "zip bomb": _zip,
    "gzip bomb": _gzip,
    "archive with links": _symlinks,
    "pickle": _pickles,
    "wrong shapes": _wrong_shapes,
    "huge vocabulary": _huge_vocabulary,
    "huge header": _huge_header,
    "overlapping tensors": _overlaps,
    "offsets out of range": _out_of_range,
    "config.json with code": _configuration,
    "tokenizer bomb": _tokenizer,
    "infinite or NaN weights": _not_numbers,
    "deep JSON": _deep,
    "wrong digest": _wrong_digest,
    "longer than declared": _longer,
    "shorter than declared": _shorter,
    "strange header": _strange,
    "compressed": _compressed,
    "strange declaration": _declared,
    "slow": _slow,
}
