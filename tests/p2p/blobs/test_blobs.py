"""Blobs: content survives packing, and malformed blobs are rejected before they use resources."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.blobs.blobs import MAX_CONTENT_BYTES, BadBlob, BlobStore, pack, unpack, zstd

ZERO = bytes(1)


@settings(derandomize=True, max_examples=100)
@given(st.binary(min_size=1, max_size=5000))
def test_unpacking_a_packed_blob_gives_its_content(content: bytes) -> None:
    assert unpack(pack(content)) == content


def test_content_larger_than_a_receiver_accepts_is_not_packed() -> None:
    assert len(unpack(pack(ZERO * MAX_CONTENT_BYTES))) == MAX_CONTENT_BYTES
    with pytest.raises(ValueError, match="more than"):
        pack(ZERO * (MAX_CONTENT_BYTES + 1))
    with pytest.raises(ValueError, match="more than"):
        pack(random.Random(0).randbytes(MAX_CONTENT_BYTES))  # incompressible


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"not zstd",
        pack(b"content")[:-1],
        pack(b"content") + b"x",
        pack(b"content") * 2,
        # A zstd frame that does not state its size.
        zstd.compress(b"content", options={zstd.CompressionParameter.content_size_flag: 0}),
        zstd.compress(b""),
        zstd.compress(ZERO * (MAX_CONTENT_BYTES + 1)),
    ],
)
def test_malformed_blobs_are_refused(blob: bytes) -> None:
    with pytest.raises(BadBlob):
        unpack(blob)


def test_the_caller_may_set_a_lower_limit() -> None:
    with pytest.raises(BadBlob):
        unpack(pack(b"content"), limit=6)


def test_mutated_blobs_are_rejected_or_have_a_bounded_size() -> None:
    rng = random.Random(0)
    blob = bytearray(pack(b"some text, and some more text, and some text " * 20))
    for _ in range(2000):
        mutated = bytearray(blob)
        mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
        with contextlib.suppress(BadBlob):
            assert len(unpack(bytes(mutated))) <= MAX_CONTENT_BYTES


def test_a_full_store_drops_the_blob_that_was_requested_least_recently() -> None:
    store = BlobStore(kept_bytes=250)
    first, second, third = (store.put(bytes([n]) * 100) for n in range(3))
    assert store.get(first) is None and store.bytes == 200  # the third displaced the first
    assert store.get(second) == bytes([1]) * 100
    store.put(bytes([9]) * 100)
    assert store.get(third) is None and store.get(second) is not None
    store.put(bytes([9]) * 100)
    assert len(store.held) == 2 and store.bytes == 200
