"""Reads and writes the address book's file, peers.json, as bytes. Pure."""

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

_Time = Annotated[float, msgspec.Meta(gt=-1e12, lt=1e12)]  # seconds since the epoch; 0: never


class _Peer(msgspec.Struct):
    id: str
    addresses: list[str]
    last_success: _Time
    proved: str
    source: str
    itself: bool
    tried: bool
    heard: _Time
    misses: Annotated[int, msgspec.Meta(ge=0, lt=10**12)]
    missed: _Time


class _File(msgspec.Struct, tag_field="schema", tag=1):
    key: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32,128}\Z")]
    anchors: list[str]
    peers: list[_Peer]


_decoder = msgspec.json.Decoder(_File)


@dataclass(frozen=True, slots=True)
class Contents:
    key: bytes
    anchors: Sequence[PeerId]
    peers: Sequence[tuple[PeerId, Known]]


def write(key: bytes, anchors: Sequence[PeerId], peers: Mapping[PeerId, Known]) -> bytes:
    entries = [
        _Peer(
            peer,
            k.addresses,
            k.last_success,
            k.proved,
            k.source,
            k.itself,
            k.tried,
            k.heard,
            k.misses,
            k.missed,
        )
        for peer, k in peers.items()
    ]
    return (
        msgspec.json.format(msgspec.json.encode(_File(key.hex(), list(anchors), entries)), indent=1) + b"\n"
    )


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
    peers = [_known(entry, written) for entry in file.peers[:most]]
    return Contents(bytes.fromhex(file.key), tuple(map(PeerId, file.anchors[:MAX_ADDRESSES])), peers)


def _known(entry: _Peer, written: float) -> tuple[PeerId, Known]:
    """Check and convert one entry. Raises ValueError where the id is none."""
    public_key_of(entry.id)
    known = Known(
        [
            str(endpoint)
            for address in entry.addresses[:MAX_ADDRESSES]
            if (endpoint := parse_endpoint(address))
        ]
    )
    known.last_success, known.heard, known.misses, known.missed = (
        entry.last_success,
        entry.heard or written,
        entry.misses,
        entry.missed,
    )
    known.itself, known.tried = entry.itself, entry.tried
    known.source = entry.source[:64] or (known.group if known.addresses else "")
    known.proved = known.addresses[0] if known.addresses[:1] == [entry.proved] else ""
    return PeerId(entry.id), known
