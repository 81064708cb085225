"""The address book's file, as bytes. JSON; `schema` 2 has tables, a key and anchors, 1 was a list of peers and is still read. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2p.address import parse_endpoint
from p2p.identity import public_key_of
from p2p.peers.buckets import Known
from p2p.types import PeerId

MAX_FILE = 8 * 1024 * 1024
MAX_ADDRESSES = 8  # of one peer


@dataclass(frozen=True, slots=True)
class Contents:
    key: bytes | None  # None: schema 1
    anchors: Sequence[PeerId]
    peers: Sequence[tuple[PeerId, Known]]


def write(key: bytes, anchors: Sequence[PeerId], peers: Mapping[PeerId, Known]) -> bytes:
    entries = [
        {
            "id": peer, "addresses": known.addresses, "proved": known.proved, "source": known.source, "itself": known.itself,
            "tried": known.tried, "heard": known.heard, "last_success": known.last_success, "misses": known.misses,
            "missed": known.missed,
        }
        for peer, known in peers.items()
    ]  # fmt: skip
    return json.dumps({"schema": 2, "key": key.hex(), "anchors": list(anchors), "peers": entries}, indent=1).encode() + b"\n"


def read(content: bytes, written: float, most: int) -> Contents:
    """written: when the file was, seconds since the epoch. most: peers to read. Raises ValueError, TypeError, KeyError, AttributeError
    or RecursionError on what is no such file.
    """
    if len(content) > MAX_FILE:
        raise ValueError("too long")
    document = json.loads(content)
    if document["schema"] not in (1, 2):
        raise ValueError("of another version")
    old = document["schema"] == 1
    peers = [_entry(entry, old, written) for entry in document["peers"][:most]]
    if old:
        return Contents(None, (), peers)
    key = bytes.fromhex(document["key"])
    if not 16 <= len(key) <= 64:
        raise ValueError("its key is of the wrong length")
    return Contents(key, tuple(PeerId(str(peer)) for peer in document["anchors"][:MAX_ADDRESSES]), peers)


def _entry(entry: dict[str, object], old: bool, written: float) -> tuple[PeerId, Known]:
    peer, addresses = entry["id"], entry["addresses"]
    if not isinstance(peer, str) or not isinstance(addresses, list):
        raise TypeError("not a peer")
    public_key_of(peer)
    known = Known([str(endpoint) for address in addresses[:MAX_ADDRESSES] if (endpoint := parse_endpoint(address))])
    known.last_success = _number(entry["last_success"])
    known.heard, known.source = written, known.group if known.addresses else ""
    if not old:
        known.heard, known.misses, known.missed = (
            _number(entry["heard"]) or written,
            int(_number(entry["misses"])),
            _number(entry["missed"]),
        )
        known.itself, known.tried = entry["itself"] is True, entry["tried"] is True
        known.source = str(entry["source"])[:64] or known.source
        known.proved = known.addresses[0] if known.addresses[:1] == [entry["proved"]] else ""
    return PeerId(peer), known


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e12:
        raise ValueError("not a number that it can be")
    return float(value)
