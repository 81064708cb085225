"""Uploaded weights must be finite, be a known model's tensors, and have the declared size and digest."""

import itertools
import random
import struct
from hashlib import sha256

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from judge.verified.weights_check import (
    MAX_HEADER_BYTES,
    UnfitWeights,
    WeightsCheck,
    check_header,
    with_checkpoint_names,
)
from testbed.uploaded_weights import SIZES, file_of, parts_of, whole
from tests.judge.verified.standin_worker import SHAPES

GOOD = file_of(SHAPES)


def checked(
    file: bytes, cuts: tuple[int, ...] = (), size: int | None = None, digest: str | None = None
) -> None:
    check = WeightsCheck(len(file) if size is None else size, digest or sha256(file).hexdigest(), SHAPES)
    edges = [0, *sorted(min(cut, len(file)) for cut in cuts), len(file)]
    for begin, end in itertools.pairwise(edges):
        check.feed(file[begin:end])
    check.end()


@given(
    st.sampled_from(("F32", "BF16")),
    st.permutations(list(SHAPES)),
    st.lists(st.integers(0, len(GOOD))),
    st.integers(),
)
def test_a_valid_file_passes_in_pieces_of_any_size(
    format: str, order: list[str], cuts: list[int], seed: int
) -> None:
    checked(file_of({name: SHAPES[name] for name in order}, format, random.Random(seed)), tuple(cuts))


@given(st.integers(0, len(GOOD) * 8 - 1), st.lists(st.integers(0, len(GOOD)), max_size=3))
def test_a_file_with_a_flipped_bit_is_rejected(bit: int, cuts: list[int]) -> None:
    changed = bytearray(GOOD)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(UnfitWeights):
        checked(bytes(changed), tuple(cuts), digest=sha256(GOOD).hexdigest())


@settings(max_examples=300)
@given(st.binary(max_size=len(GOOD) + 50), st.booleans(), st.lists(st.integers(0, 400), max_size=3))
@example(b"", False, [])
def test_random_bytes_are_rejected(data: bytes, with_length: bool, cuts: list[int]) -> None:
    """The bytes may have the declared digest and size."""
    file = struct.pack("<Q", len(data)) + data if with_length else data
    with pytest.raises(UnfitWeights):
        checked(file, tuple(cuts))


@pytest.mark.parametrize("shape", [[3, 4], [12], [4, 3, 1], [2, 6], [], [4, 4]])
def test_tensors_of_other_shapes_are_rejected(shape: list[int]) -> None:
    header, data = parts_of(GOOD)
    header["a.weight"]["shape"] = shape
    with pytest.raises(UnfitWeights, match="shapes differ"):
        checked(whole(header, data))


def test_a_header_may_list_tensors_in_any_order_with_little_metadata() -> None:
    header, data = parts_of(GOOD)
    backwards = dict(reversed(header.items()))
    checked(whole({"__metadata__": {str(i): "x" for i in range(16)}, **backwards}, data))
    with pytest.raises(UnfitWeights, match="does not describe a safetensors file"):
        checked(whole({"__metadata__": {str(i): "x" for i in range(17)}, **backwards}, data))


def test_tensors_of_two_number_formats_are_refused() -> None:
    header, data = parts_of(GOOD)
    header["b.bias"] |= {"dtype": "BF16", "data_offsets": [48, 58]}
    with pytest.raises(UnfitWeights, match="several number formats"):
        checked(whole(header, data[:58]))


entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(("F32", "BF16", "F64", "I64", "Q", 3)),
        "shape": (
            st.lists(st.integers(-2, 2**60), max_size=4)
            | st.sampled_from([list(shape) for shape in SHAPES.values()])
        ),
        "data_offsets": (
            st.lists(st.integers(-2, 2**60), min_size=1, max_size=3)
            | st.sampled_from([[0, 48], [48, 68], [20, 68], [0, 20]])
        ),
    },
    optional={"more": st.none()},
)


OVERLAPS = [
    [(0, 48), (0, 20)],
    [(0, 48), (47, 67)],
    [(0, 48), (49, 69)],
    [(20, 68), (0, 19)],
    [(0, 68), (0, 68)],
    [(0, 48), (40, 68)],
]


@pytest.mark.parametrize("spans", OVERLAPS)
def test_tensors_that_overlap_or_leave_gaps_are_rejected(spans: list[tuple[int, int]]) -> None:
    header = {
        name: {"dtype": "F32", "shape": SHAPES[name], "data_offsets": span}
        for name, span in zip(SHAPES, spans, strict=True)
    }
    with pytest.raises(UnfitWeights, match="overlap, leave gaps"):
        checked(whole(header, bytes(68)))


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from([*SHAPES, "c", "__metadata__"]), entries))
def test_an_accepted_header_describes_exactly_the_data(
    header: dict[str, dict[str, object]],
) -> None:
    text = parts_of(whole(header, b""))[0]
    try:
        format = check_header(whole(header, b"")[8:], 68, SHAPES)
    except UnfitWeights:
        return
    assert {name: tuple(entry["shape"]) for name, entry in text.items()} == SHAPES
    spans = sorted(tuple(entry["data_offsets"]) for entry in text.values())
    assert spans in ([(0, 48), (48, 68)], [(0, 20), (20, 68)]) and format == "F32"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("format", ["F32", "BF16"])
@pytest.mark.parametrize("place", [0, 7, 16])
@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_nan_and_infinity_are_refused(number: float, format: str, place: int, cut: int) -> None:
    header, data = parts_of(file_of(SHAPES, format))
    width = SIZES[format]
    bits = struct.pack("<f", number)[4 - width :]
    file = whole(header, data[: place * width] + bits + data[(place + 1) * width :])
    with pytest.raises(UnfitWeights, match="not a number"):
        checked(file, (len(file) - len(data) + place * width + cut,))


def test_a_file_of_another_size_than_declared_is_refused() -> None:
    digest = sha256(GOOD).hexdigest()
    for file, words in (
        (GOOD + b"x", "larger than its declared"),
        (GOOD[:-1], "bytes arrived of"),
        (GOOD[:5], "bytes arrived of"),
    ):
        with pytest.raises(UnfitWeights, match=words):
            checked(file, size=len(GOOD), digest=digest)
    with pytest.raises(UnfitWeights, match="longer or shorter than its tensors"):
        checked(GOOD + b"xxxx")
    with pytest.raises(UnfitWeights, match="SHA-256 differs"):
        checked(GOOD, digest="0" * 64)


def test_adapter_tensors_are_mapped_from_pefts_names() -> None:
    own = {"x.lora_A.default.weight": (2, 3), "x.lora_B.default.weight": (4, 2)}
    peft = {f"base_model.model.{name.replace('.default', '')}": shape for name, shape in own.items()}
    file = file_of(peft)
    check = WeightsCheck(len(file), sha256(file).hexdigest(), own)
    check.feed(file)
    check.end()
    assert (
        parts_of(with_checkpoint_names(file))
        == parts_of(with_checkpoint_names(file_of(own)))
        == parts_of(file_of(own))
    )
    header, data = parts_of(file)
    twice = whole(header | {"x.lora_A.default.weight": header["base_model.model.x.lora_A.weight"]}, data)
    with pytest.raises(UnfitWeights, match="duplicated"):
        check_header(twice[8 : -len(data)], len(data), own)


def test_a_wrong_size_is_rejected_before_a_byte_is_read() -> None:
    for size in (0, 9, 43, 4 * 17 + 8 + MAX_HEADER_BYTES + 1, 2**50):
        with pytest.raises(UnfitWeights, match="do not fit this model"):
            WeightsCheck(size, "0" * 64, SHAPES)


def test_a_too_long_header_is_rejected_at_its_stated_length() -> None:
    check = WeightsCheck(len(GOOD), "0" * 64, SHAPES)
    check.feed(b"\xff" * 7)
    with pytest.raises(UnfitWeights, match="header is too large"):
        check.feed(b"\x7f")
