"""Signed frames: seal, parse and check them. Pure: takes bytes and returns an Envelope or a Reason.

A frame is one canonical msgpack array, and its form is frozen for version 1:

    [tag "swarmd", version 1, swarm id (16 bytes), author's public key (32 bytes), sequence, sent_at in ms,
     kind, body, signature]

The signature covers all bytes before it, including the array's header. msgpack can encode one value in
several ways (long integers, str for bin, trailing bytes). A frame that we would encode differently is
refused. So one content has one id, and an old frame cannot be re-encoded to look new.
"""

from typing import Annotated

import msgspec

from p2p.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, peer_id_of, verify_key
from p2p.types import Envelope, Reason

VERSION = 1
# Nodes refuse longer frames.
MAX_FRAME_BYTES = 256 * 1024
# All fields but the body take less than 256 bytes.
MAX_BODY_BYTES = MAX_FRAME_BYTES - 256
DOMAIN = b"swarmd frame v1"

_TAG_BYTES = b"\xa6swarmd"
_SIGNATURE_TAIL = 2 + SIGNATURE_BYTES  # msgpack: bin 8, length, the bytes


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A parsed frame whose signature is not checked yet."""

    tag: str
    version: int
    swarm_id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    author: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    sent_at_ms: Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
    kind: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9-]*\Z", max_length=32)]
    body: bytes
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


_decoder = msgspec.msgpack.Decoder(Frame)
_encoder = msgspec.msgpack.Encoder()


def seal(identity: Identity, swarm_id: bytes, sequence: int, now: float, kind: str, body: bytes) -> bytes:
    """Sign a body and return the frame.

    Args:
        identity: the author's key.
        swarm_id: 16 bytes (`Topic.swarm_id`).
        sequence: the author's counter; never repeats.
        now: seconds since the epoch.
        kind: the body's type, a lower-case word of at most 32 letters.
        body: the content.

    Raises:
        ValueError: no receiver would admit the frame.
    """
    fields = (
        "swarmd",
        VERSION,
        swarm_id,
        identity.public_key,
        sequence,
        int(now * 1000),
        kind,
        body,
        bytes(SIGNATURE_BYTES),
    )
    if len(draft := _encoder.encode(fields)) > MAX_FRAME_BYTES:
        raise ValueError(f"frame too large: {len(draft):,} bytes (limit {MAX_FRAME_BYTES:,})")
    if isinstance(parsed := parse(draft, swarm_id), Reason):
        unfit = f"no receiver would admit kind {kind!r}, sequence {sequence}, time {now}"
        raise ValueError(f"{unfit}: {parsed.value}")  # noqa: TRY004
    return draft[:-SIGNATURE_BYTES] + identity.sign(DOMAIN, draft[:-_SIGNATURE_TAIL])


def parse(frame: bytes, swarm_id: bytes) -> Frame | Reason:
    """Parse a frame and check its form, version and swarm, but not its size or signature."""
    if frame[1 : 1 + len(_TAG_BYTES)] != _TAG_BYTES or len(frame) < 2 + len(_TAG_BYTES):
        return Reason.MALFORMED
    version = frame[1 + len(_TAG_BYTES)]
    # Frames of later versions begin with the same tag and a version number; the rest is free.
    if version != VERSION:
        newer = 0x90 <= frame[0] <= 0x9F and version < 0x80
        return Reason.WRONG_VERSION if newer else Reason.MALFORMED
    try:
        parsed = _decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError):
        # ValueError: text that is not UTF-8. RecursionError: arrays nested thousands deep.
        return Reason.MALFORMED
    # 0x99 is msgpack's array of nine.
    if frame[0] != 0x99 or _encoder.encode(parsed) != frame:
        return Reason.MALFORMED
    return parsed if parsed.swarm_id == swarm_id else Reason.OTHER_SWARM


def check(parsed: Frame, frame: bytes) -> Envelope | Reason:
    """Check the signature of a parsed frame. This is expensive, so callers do it last."""
    return (
        Envelope(
            peer_id_of(parsed.author), parsed.sequence, parsed.sent_at_ms / 1000, parsed.kind, parsed.body
        )
        if verify_key(parsed.author, DOMAIN, frame[:-_SIGNATURE_TAIL], parsed.signature)
        else Reason.BAD_SIGNATURE
    )
