"""A peer that signs requests, written from docs/judge-protocol.md, independently of swarmd and the judge."""

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

from p2p.identity import Identity
from swarmd.tasks.curriculum import TINY_9

ORIGIN = "http://judge.test"
# Time at which the clock of a judge at ORIGIN starts, in seconds since 1970.
THEN = 1_800_000_000.0


class SigningPeer:
    def __init__(self, number: int, origin: str = ORIGIN) -> None:
        self.identity = Identity(bytes([number % 256, number // 256]) * 16)
        self.origin = origin
        self.sequence = int(THEN * 1e9) if origin == ORIGIN else time.time_ns()

    def headers(self, method: str, target: str, body: bytes, sequence: int | None = None) -> dict[str, str]:
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        signed = f"{method}\n{self.origin}\n{target}\n{sequence}\n{hashlib.sha256(body).hexdigest()}"
        return {
            "swarmd-peer": self.identity.peer_id,
            "swarmd-origin": self.origin,
            "swarmd-sequence": str(sequence),
            "swarmd-signature": self.identity.sign(b"swarmd judge request v1", signed.encode()).hex(),
        }

    def signed(self, target: str, document: Mapping[str, Any] | bytes) -> dict[str, Any]:
        """Return the content and the headers of a POST request with this document."""
        body = document if isinstance(document, bytes) else encode(document)
        return {"content": body, "headers": self.headers("POST", target, body)}


def encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode()


def wish(
    round_number: int = 1, model: str | None = "tiny", curriculum: str = TINY_9.digest
) -> dict[str, Any]:
    """Return a peer's request for one question."""
    return {"round": round_number, "curriculum": curriculum, "asker": {"model": model}}


def answering(*texts: str) -> dict[str, Any]:
    """Return a document with answers to one question."""
    return {"answers": [{"text": text, "ended": True} for text in texts]}
