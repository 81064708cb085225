"""A node's estimate of the swarm's size, and its bytes: the response to SWARM_SIZE."""

from dataclasses import dataclass

import msgspec

MAX_ESTIMATE = 16  # bytes of an answer
ESTIMATE_VERSION = 1
MAX_SIZE = 10_000_000
MAX_SHARDS = 2**15  # then every number is below 2^16


class _Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    version: int
    size: int
    shards: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class Estimate:
    """One node's estimate: the number of authors by its own count, and the number of shards."""

    size: int
    shards: int


def encode_estimate(estimate: Estimate) -> bytes:
    return _encoder.encode(_Body(ESTIMATE_VERSION, estimate.size, estimate.shards))


def decode_estimate(body: bytes) -> Estimate | None:
    """None for what `encode_estimate` would not have written, or a later version."""
    try:
        parsed = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    good = parsed.version == ESTIMATE_VERSION and 0 < parsed.size <= MAX_SIZE and 0 < parsed.shards <= MAX_SHARDS
    return Estimate(parsed.size, parsed.shards) if good and _encoder.encode(parsed) == body else None
