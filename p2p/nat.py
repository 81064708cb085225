"""Whether others can reach this node: dial-back, and the handshake that learns who listens at an address.

**Dial-back** asks connected members to dial this node anew. Question: byte 3 and a port as two bytes,
big-endian. Answer: one byte, then the IP address that the asker's connection comes from, 4 or 16 bytes: 0, it
is not tried; 1, it is being tried, ask again; 2, the asker itself answered there; 3, it did not.

The answering member dials only the address that the connection comes from, at a port from 1024 up, within a
rate limit, and tells only whether the asker's own key answered there. So nobody can use it to dial or to
probe a third party (as in AutoNAT of libp2p: github.com/libp2p/specs, autonat, autonat-v1.md, "Security
Considerations").

**The handshake**, `knock`, is half of one, over a new connection. Dial-backs use it, as an engine makes no
second connection to a peer, and the check of bootstrap addresses, which has no engine. We reveal nothing of
ourselves: in Noise XX the responder proves its key first, and then we hang up. At most 120 bytes are sent,
the same to every listener.

Noise XX with libp2p's payload: noiseprotocol.org/noise.html (revision 34), github.com/libp2p/specs, noise.
The protocol is chosen by multistream-select 1.0: github.com/multiformats/multistream-select.
"""

import ipaddress
import itertools
import logging
import os
import socket
import struct
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import trio
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from noise.connection import Keypair, NoiseConnection

from p2p.address import parse_endpoint
from p2p.identity import KEY_BYTES, peer_id_of
from p2p.netgroup import LOCAL, group_of_host
from p2p.peers.introduction import ask_each
from p2p.rate_limit import TokenBucket
from p2p.types import Ask, Peer, PeerId, PeerRequest

# The time for all of it.
PROBE_TIMEOUT_S = 5.0
_CHOICE = b"\x13/multistream/1.0.0\n\x07/noise\n"  # each line after its length
_SIGNED = b"noise-libp2p-static-key:"
# Field 1, 36 bytes: libp2p's PublicKey message, of type 1 (Ed25519), 32 bytes follow.
_KEY_HEADER = bytes.fromhex("0a2408011220")
# Field 2, 64 bytes.
_SIGNATURE_HEADER = bytes.fromhex("1240")
_PAYLOAD = struct.Struct("6s32s2s64s")
# What encryption adds.
_TAG_BYTES = 16
# The listener's answer.
_MAX_MESSAGE_BYTES = 4096


class Silent(Exception):
    """There was no answer; the message says why.

    refused: the machine is there, but nothing listens on that port.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Stranger(Exception):
    """Something else than a libp2p peer with an Ed25519 key answers."""


class Handshake:
    """The initiator's side of Noise XX, up to the responder's proof. Sans I/O."""

    def __init__(self) -> None:
        self._noise = NoiseConnection.from_name(b"Noise_XX_25519_ChaChaPoly_SHA256")
        self._noise.set_as_initiator()
        # Our own key would be told in the third message only, which is never sent.
        self._noise.set_keypair_from_private_bytes(Keypair.STATIC, os.urandom(KEY_BYTES))
        self._noise.start_handshake()

    def first(self) -> bytes:
        """Return the first message: -> e, with an empty payload."""
        return bytes(self._noise.write_message())

    def whose(self, message: bytes) -> PeerId:
        """Check the second message and return the peer that signed the connection's key. Raises Stranger.

        The message is <- e, ee, s, es and the payload.
        """
        if len(message) < KEY_BYTES + KEY_BYTES + 2 * _TAG_BYTES:
            raise Stranger("its handshake is too short")
        try:
            payload = self._noise.read_message(message)
            return _proved(bytes(payload), self._noise.noise_protocol.handshake_state.rs.public_bytes)
        except (InvalidTag, InvalidSignature, ValueError) as error:
            # A ValueError means a point of low order, or a malformed payload.
            raise Stranger(f"its handshake proves nothing ({str(error) or type(error).__name__})") from None


async def knock(
    host: str,
    port: int,
    *,
    patience: float = PROBE_TIMEOUT_S,
) -> PeerId:
    """Return the peer that listens there. `host` may be a name. Raises Silent or Stranger."""
    handshake = Handshake()
    first = handshake.first()
    with trio.move_on_after(patience):
        try:
            stream = await trio.open_tcp_stream(host, port)
        except OSError as error:
            raise _silent(error) from None
        async with stream:
            try:
                await stream.send_all(_CHOICE + len(first).to_bytes(2, "big") + first)
                said = await _exactly(stream, len(_CHOICE))
                if said != _CHOICE:
                    raise Stranger("it does not speak libp2p with Noise")
                length = int.from_bytes(await _exactly(stream, 2), "big")
                if length > _MAX_MESSAGE_BYTES:
                    raise Stranger("its handshake is too long")
                return handshake.whose(await _exactly(stream, length))
            except trio.BrokenResourceError:
                raise Stranger("it hung up") from None
    raise Silent(f"no answer within {patience:.0f} s")


async def _exactly(stream: trio.SocketStream, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        some = await stream.receive_some(count - len(data))
        if not some:
            raise Stranger("it hung up")
        data += some
    return bytes(data)


def _silent(error: OSError) -> Silent:
    causes: list[BaseException] = [error]
    while isinstance(causes[-1].__cause__, BaseException):
        causes.append(causes[-1].__cause__)
    leaves = [
        leaf
        for cause in causes
        for leaf in (cause.exceptions if isinstance(cause, BaseExceptionGroup) else [cause])
    ]
    refused = any(isinstance(leaf, ConnectionRefusedError) for leaf in leaves)
    words = next(
        (_words(leaf) for leaf in reversed(leaves) if isinstance(leaf, OSError) and leaf.errno), str(error)
    )
    return Silent("nothing listens on that port" if refused else words, refused=refused)


def _words(error: OSError) -> str:
    """Return the system's own words: trio puts the address before them, and the caller knows it."""
    words = (error.strerror or "") if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
    return words[:1].lower() + words[1:]


def _proved(payload: bytes, static: bytes) -> PeerId:
    """Check libp2p's NoiseHandshakePayload: the identity's key, and its signature over the static key.

    Both stand first and in this order, as every implementation writes them; what follows is for later.
    Raises ValueError, InvalidSignature.
    """
    if len(payload) < _PAYLOAD.size:
        raise ValueError("its payload is too short")
    key_header, public, signature_header, signature = _PAYLOAD.unpack_from(payload)
    if (key_header, signature_header) != (_KEY_HEADER, _SIGNATURE_HEADER):
        raise ValueError("its key is not Ed25519")
    Ed25519PublicKey.from_public_bytes(public).verify(signature, _SIGNED + static)
    return peer_id_of(public)


MIN_PORT = 1024
# How long an outcome is kept. In that time one peer is tried at most PORTS times.
KEPT_S = 30.0
PORTS = 2
# Dials for all peers together.
DIALS_PER_S, DIALS_AT_ONCE = 1.0, 8.0
AT_ONCE = 4
ASK_AGAIN_S = 0.5
# The time for one member's answer.
MEMBER_TIMEOUT_S = 8.0
# Members that are asked.
MAX_ASKED = 4
# An outcome and an IPv6 address.
MAX_REPLY_BYTES = 17
_PORT = struct.Struct(">H")
_REMEMBERED_PEERS = 1024

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Knock = Callable[[str, int], Awaitable[PeerId]]

log = logging.getLogger(__name__)


class Outcome(IntEnum):
    REFUSED = 0
    TRYING = 1
    REACHED = 2
    NOT_REACHED = 3


@dataclass(frozen=True, slots=True)
class DialBackReply:
    outcome: Outcome
    seen_at: Address | None  # our address, as the asked peer sees it


def question(port: int) -> bytes:
    return PeerRequest.DIAL_BACK.message(_PORT.pack(port))


def answered(message: bytes) -> DialBackReply | None:
    """Parse an answer; None where it is none."""
    if len(message) not in (1, 5, 17) or message[0] > max(Outcome):
        return None
    return DialBackReply(Outcome(message[0]), ipaddress.ip_address(message[1:]) if len(message) > 1 else None)


def seen_at(peer: Peer | None) -> Address | None:
    """Return where the peer's connection comes from; None through a relay, as it would be the relay's."""
    endpoint = parse_endpoint(peer.address) if peer is not None else None
    if endpoint is None or not endpoint.kind.startswith("ip"):
        return None
    address = ipaddress.ip_address(endpoint.host)
    return address.ipv4_mapped or address if isinstance(address, ipaddress.IPv6Address) else address


class DialBack:
    """Answers the question. Dials only while `run` runs."""

    def __init__(
        self, peers: Callable[[], Sequence[Peer]], clock: Callable[[], float], *, knock: Knock = knock
    ) -> None:
        self._peers, self._clock, self._knock = peers, clock, knock
        self._outcomes: OrderedDict[tuple[PeerId, int], tuple[float, Outcome]] = OrderedDict()
        self._dials = TokenBucket(DIALS_PER_S, DIALS_AT_ONCE, clock())
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await trio.sleep_forever()
            finally:
                # Others may still ask while the node ends.
                self._nursery = None

    def __call__(self, peer: PeerId, message: bytes) -> bytes:
        """Answer a question; empty for another one."""
        content = PeerRequest.DIAL_BACK.content(message)
        if content is None or len(content) != _PORT.size:
            return b""
        (port,) = _PORT.unpack(content)
        address = seen_at(next((known for known in self._peers() if known.id == peer), None))
        return bytes([self._outcome(peer, address, port)]) + (address.packed if address is not None else b"")

    def _outcome(self, peer: PeerId, address: Address | None, port: int) -> Outcome:
        now = self._clock()
        while self._outcomes and (
            now - next(iter(self._outcomes.values()))[0] > KEPT_S or len(self._outcomes) > _REMEMBERED_PEERS
        ):
            self._outcomes.popitem(last=False)
        if (peer, port) in self._outcomes:
            return self._outcomes[peer, port][1]
        tried = Counter(asker for asker, _ in self._outcomes)[peer]
        if (
            address is None
            or port < MIN_PORT
            or tried >= PORTS
            or self._nursery is None
            or Counter(outcome for _, outcome in self._outcomes.values())[Outcome.TRYING] >= AT_ONCE
            or self._dials.wait(now)
        ):
            return Outcome.REFUSED
        self._outcomes[peer, port] = now, Outcome.TRYING
        self._nursery.start_soon(self._try, peer, str(address), port, now)
        return Outcome.TRYING

    async def _try(self, peer: PeerId, host: str, port: int, asked: float) -> None:
        outcome = Outcome.NOT_REACHED
        try:
            if await self._knock(host, port) == peer:
                outcome = Outcome.REACHED
        except (Silent, Stranger) as error:
            log.debug("%s cannot be dialled back at %s, port %d: %s", peer, host, port, error)
        if (peer, port) in self._outcomes:
            self._outcomes[peer, port] = asked, outcome


def can_be_dialled(replies: Iterable[DialBackReply]) -> bool | None:
    """Return whether the whole internet can dial us; None where no member outside our network could say.

    IPv6 alone is not enough: many members have none.
    """
    said = {
        (reply.outcome, reply.seen_at.version)
        for reply in replies
        if reply.seen_at is not None and group_of_host(str(reply.seen_at)) != LOCAL
    }
    if (Outcome.REACHED, 4) in said:
        return True
    return False if {outcome for outcome, _ in said} & {Outcome.REACHED, Outcome.NOT_REACHED} else None


def who_dials_back(peers: Iterable[Peer], ports: Mapping[str, int]) -> dict[PeerId, int]:
    """Choose up to MAX_ASKED members, and the port at which each is to dial us back.

    IPv4 and IPv6 take turns. Of each, distant members come first, then those that we dialled: they see the
    address that others would dial.

    ports: where we listen, of "ip4" and "ip6".
    """
    found: dict[str, list[tuple[bool, bool, PeerId]]] = {kind: [] for kind in sorted(ports)}
    for peer in peers:
        endpoint = parse_endpoint(peer.address)
        if endpoint is not None and endpoint.kind in found:
            near = group_of_host(endpoint.host) == LOCAL
            found[endpoint.kind].append((near, peer.direction != "outbound", peer.id))
    turns = itertools.zip_longest(
        *([(peer, ports[kind]) for _, _, peer in sorted(those)] for kind, those in found.items())
    )
    return dict([one for turn in turns for one in turn if one is not None][:MAX_ASKED])


async def ask_members(
    ask: Ask, members: Mapping[PeerId, int], *, patience: float = MEMBER_TIMEOUT_S
) -> dict[PeerId, DialBackReply]:
    """Have these members dial us back, at the same time, each at its port.

    Those that do not know the question, or have no outcome in time, are left out.
    """

    async def until_tried(member: PeerId) -> DialBackReply | None:
        asked = question(members[member])
        while (reply := answered(await ask(member, asked, MAX_REPLY_BYTES))) is not None and (
            reply.outcome is Outcome.TRYING
        ):
            await trio.sleep(ASK_AGAIN_S)
        return reply

    said = await ask_each(until_tried, members, patience)
    return {member: reply for member, reply in said.items() if reply is not None}
