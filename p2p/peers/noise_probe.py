"""Partial Noise handshake over a new connection, which learns the listener's peer id.

Dial-backs use it, because an engine makes no second connection to a peer. The check of bootstrap addresses
uses it, because no engine runs then. We reveal nothing about us: in Noise XX the responder proves its key
first, and then we hang up. At most 120 bytes are sent, the same to every listener.

Noise XX with libp2p's payload: noiseprotocol.org/noise.html (revision 34), github.com/libp2p/specs, noise.
The protocol is chosen by multistream-select 1.0: github.com/multiformats/multistream-select.
"""

import os
import socket
import struct
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import trio
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from noise.connection import Keypair, NoiseConnection

from p2p.address import parse_bootstrap
from p2p.identity import KEY_BYTES, peer_id_of
from p2p.types import PeerId

# Timeout of the whole probe.
PROBE_TIMEOUT_S = 5.0
_CHOICE = b"\x13/multistream/1.0.0\n\x07/noise\n"  # each line after its length
_SIGNED = b"noise-libp2p-static-key:"
# Field 1, 36 bytes: libp2p's PublicKey message of type 1 (Ed25519); the key's 32 bytes follow.
_KEY_HEADER = bytes.fromhex("0a2408011220")
# Field 2, 64 bytes: the signature.
_SIGNATURE_HEADER = bytes.fromhex("1240")
_PAYLOAD = struct.Struct("6s32s2s64s")
# The authentication tag that encryption adds.
_TAG_BYTES = 16
# Longest handshake message of the listener.
_MAX_MESSAGE_BYTES = 4096


class NoPeer(Exception):
    """No libp2p peer with an Ed25519 key answers. The message says why."""


class Handshake:
    """The initiator's side of Noise XX, up to the responder's proof. Sans I/O.

    Attributes:
        first: the first message: -> e, with an empty payload.
    """

    def __init__(self) -> None:
        self._noise = NoiseConnection.from_name(b"Noise_XX_25519_ChaChaPoly_SHA256")
        self._noise.set_as_initiator()
        # Only the third message would reveal our key, and that is never sent.
        self._noise.set_keypair_from_private_bytes(Keypair.STATIC, os.urandom(KEY_BYTES))
        self._noise.start_handshake()
        self.first = bytes(self._noise.write_message())

    def whose(self, message: bytes) -> PeerId:
        """Check the second message and return the peer that signed the connection's key. Raises NoPeer.

        The message is <- e, ee, s, es and the payload.
        """
        if len(message) < KEY_BYTES + KEY_BYTES + 2 * _TAG_BYTES:
            raise NoPeer("its handshake is too short")
        try:
            payload = self._noise.read_message(message)
            return _proved(bytes(payload), self._noise.noise_protocol.handshake_state.rs.public_bytes)
        except (InvalidTag, InvalidSignature, ValueError) as error:
            # ValueError: a point of low order, or a malformed payload.
            raise NoPeer(f"its handshake proves no peer id ({str(error) or type(error).__name__})") from None


async def knock(
    host: str,
    port: int,
    *,
    patience: float = PROBE_TIMEOUT_S,
) -> PeerId:
    """Return the id of the peer that listens at host and port. `host` may be a name. Raises NoPeer."""
    handshake = Handshake()
    with trio.move_on_after(patience):
        try:
            stream = await trio.open_tcp_stream(host, port)
        except OSError as error:
            raise _no_peer(error) from None
        async with stream:
            try:
                await stream.send_all(_CHOICE + len(handshake.first).to_bytes(2, "big") + handshake.first)
                if await _exactly(stream, len(_CHOICE)) != _CHOICE:
                    raise NoPeer("it does not speak libp2p with Noise")
                if (length := int.from_bytes(await _exactly(stream, 2), "big")) > _MAX_MESSAGE_BYTES:
                    raise NoPeer("its handshake is too long")
                return handshake.whose(await _exactly(stream, length))
            except trio.BrokenResourceError:
                raise NoPeer("it hung up") from None
    raise NoPeer(f"no answer within {patience:.0f} s")


async def probe(addresses: Iterable[str], connected: Collection[PeerId] = ()) -> list[dict[str, Any]]:
    """Probe bootstrap addresses, all at the same time. Connected peers count as answering."""
    found: dict[str, dict[str, Any]] = {address: {} for address in addresses}

    async def knock_at(address: str) -> None:
        there = parse_bootstrap(address)[0] in connected
        found[address] = {"answers": True, "says": "connected"} if there else await who_answers(address)

    async with trio.open_nursery() as nursery:
        for address in found:
            nursery.start_soon(knock_at, address)
    return [{"address": address, **entry} for address, entry in found.items()]


async def who_answers(bootstrap: str) -> dict[str, Any]:
    """Probe a bootstrap address, and report whether the peer that it names answers there."""
    wanted, endpoint = parse_bootstrap(bootstrap)
    since = time.monotonic()
    try:
        there = await knock(endpoint.host, endpoint.port)
    except NoPeer as error:
        return {"answers": False, "says": str(error)}
    took = f"answers in {(time.monotonic() - since) * 1000:.0f} ms"
    return {
        "answers": there == wanted,
        "says": took if there == wanted else f"another peer answers there, {there}",
    }


async def _exactly(stream: trio.SocketStream, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        if not (some := await stream.receive_some(count - len(data))):
            raise NoPeer("it hung up")
        data += some
    return bytes(data)


def _no_peer(error: OSError) -> NoPeer:
    """Return a NoPeer with the system's error text, without the address that trio puts before it.

    trio tries each address of a name, and raises an error whose cause is a group of all their errors.
    """
    cause = error.__cause__
    errors: Sequence[Any] = cause.exceptions if isinstance(cause, ExceptionGroup) else [error]
    if any(isinstance(each, ConnectionRefusedError) for each in errors):
        return NoPeer("nothing listens on that port")
    last = errors[-1]
    words = str(last.strerror) if isinstance(last, socket.gaierror) else os.strerror(last.errno or 0)
    return NoPeer(words[:1].lower() + words[1:])


def _proved(payload: bytes, static: bytes) -> PeerId:
    """Check libp2p's NoiseHandshakePayload: the identity's key, and its signature over the static key.

    Every implementation writes these two fields first, in this order; later fields are ignored. Raises
    ValueError or InvalidSignature.
    """
    if len(payload) < _PAYLOAD.size:
        raise ValueError("its payload is too short")
    key_header, public, signature_header, signature = _PAYLOAD.unpack_from(payload)
    if (key_header, signature_header) != (_KEY_HEADER, _SIGNATURE_HEADER):
        raise ValueError("its key is not Ed25519")
    Ed25519PublicKey.from_public_bytes(public).verify(signature, _SIGNED + static)
    return peer_id_of(public)
