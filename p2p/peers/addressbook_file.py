"""Reads and writes the address book's file, peers.json, as bytes. Pure."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from p2p.address import parse_endpoint
from p2p.identity import public_key_of
from p2p.peers.buckets import Known
from p2p.types import PeerId

MAX_FILE_BYTES = 8 * 1024 * 1024
# Addresses of one peer.
MAX_ADDRESSES = 8


class _File(msgspec.Struct, tag_field="schema", tag=1):
    key: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32,128}\Z")]
    anchors: list[str]
    peers: dict[str, Known]


_decoder = msgspec.json.Decoder(_File)


@dataclass(frozen=True, slots=True)
class Contents:
    key: bytes
    anchors: Sequence[PeerId]
    peers: Sequence[tuple[PeerId, Known]]


def write(key: bytes, anchors: Sequence[PeerId], peers: Mapping[PeerId, Known]) -> bytes:
    file = _File(key.hex(), list(anchors), {str(peer): known for peer, known in peers.items()})
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def read(content: bytes, written: float, most: int) -> Contents:
    """Parse the file. Raises ValueError on anything else.

    written: when the file was, seconds since the epoch. most: how many peers to take.
    """
    if len(content) > MAX_FILE_BYTES:
        raise ValueError("too long")
    try:
        file = _decoder.decode(content)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    peers = [_checked(*entry, written) for entry in itertools.islice(file.peers.items(), most)]
    return Contents(bytes.fromhex(file.key), tuple(map(PeerId, file.anchors[:MAX_ADDRESSES])), peers)


def _checked(name: str, known: Known, written: float) -> tuple[PeerId, Known]:
    """Check one entry, without what holds for one run alone. Raises ValueError where the id is none."""
    public_key_of(name)
    endpoints = map(parse_endpoint, known.addresses[:MAX_ADDRESSES])
    known.addresses = [str(endpoint) for endpoint in endpoints if endpoint]
    known.pinned, known.failures, known.last_failure = [], 0, 0.0
    known.heard = known.heard or written
    known.source = known.source[:64] or (known.group if known.addresses else "")
    known.proved = known.addresses[0] if known.addresses[:1] == [known.proved] else ""
    return PeerId(name), known
