"""Request signatures and replay protection. Pure. docs/judge-protocol.md describes the protocol.

Four headers, each exactly once:

    swarmd-peer        the sender's peer id
        swarmd-origin      scheme://host[:port] that the sender connected to, so that one judge cannot forward
                           the request to another
        swarmd-sequence    nanoseconds since 1970, decimal; larger than in any earlier request of this peer to
                           this judge; at most one hour ahead of the judge's clock; for an unknown peer, not
                           older than two windows
    swarmd-signature   128 lowercase hex digits: Ed25519 over `signed_message`, in the domain DOMAIN
"""

import re
from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from judge.errors import BAD_SIGNATURE, Refusal
from judge.types import Signed
from p2p.identity import verify
from p2p.types import PeerId

DOMAIN = b"swarmd judge request v1"
# Each header, with the regular expression of its value.
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "swarmd-peer": r"[1-9A-HJ-NP-Za-km-z]{52}",
        "swarmd-origin": r"https?://[\x21-\x7e]{1,255}",
        "swarmd-sequence": r"0|[1-9][0-9]{0,18}",
        "swarmd-signature": r"[0-9a-f]{128}",
    }
)


def signed_message(method: str, origin: str, target: str, sequence: int, body: bytes | str) -> bytes:
    """Return the bytes that are signed. No field can hold a line break, so no two requests share a message.

    target: path and query as sent. body: the body, or its SHA-256 in hex if the body is still to arrive.
    """
    digest = body if isinstance(body, str) else sha256(body).hexdigest()
    return "\n".join((method, origin, target, str(sequence), digest)).encode()


def verify_request(
    method: str,
    target: str,
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes | str,
    origins: Collection[str] = (),
) -> Signed | Refusal:
    """Return the signer of this request, or a Refusal.

    headers: names in lower case (ASGI). body: see `signed_message`. origins: URLs under which this judge is
    reached; empty: any.
    """
    values: dict[str, str] = {}
    for raw_name, raw_value in headers:
        if (name := raw_name.decode("latin-1")) in HEADERS:
            if name in values:
                return Refusal(400, f"the header {name} appears twice", "Send it once.")
            values[name] = raw_value.decode("latin-1")
    for name, form in HEADERS.items():
        if name not in values:
            return Refusal(
                401, f"the header {name} is missing", "Sign the request: docs/judge-protocol.md says how."
            )
        if not re.fullmatch(form, values[name]):
            return Refusal(
                400,
                f"the header {name} is malformed",
                "docs/judge-protocol.md gives the form of each header.",
            )
    peer, origin, sequence, signature = (values[name] for name in HEADERS)
    if int(sequence) >= 2**63:
        return Refusal(
            400,
            "the sequence number is too large",
            "Use a number below 2**63; swarmd uses nanoseconds since 1970.",
        )
    if not verify(
        peer, DOMAIN, signed_message(method, origin, target, int(sequence), body), bytes.fromhex(signature)
    ):
        return BAD_SIGNATURE
    if origins and origin not in origins:
        return Refusal(
            403,
            "the request was signed for another judge",
            f"Reach this judge as {' or '.join(sorted(origins))}.",
        )
    return Signed(PeerId(peer), int(sequence))


def signing_headers() -> dict[str, Any]:
    """Return the OpenAPI description of the headers that sign a request."""
    return {
        "parameters": [
            {
                "name": name,
                "in": "header",
                "required": True,
                "schema": {"type": "string", "pattern": f"^({form})$"},
            }
            for name, form in HEADERS.items()
        ]
    }
