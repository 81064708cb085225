"""Peers that nobody can dial: circuit relay v2, the relay's side, and hole punching through it (DCUtR).

Specifications: github.com/libp2p/specs, relay/circuit-v2.md and relay/DCUtR.md. The messages are py-libp2p's.
Its relay (`CircuitV2Protocol`) is not used: in version 0.8.1 it takes reservations in others' names, lets one
asker have every circuit of a peer, and does not end a circuit on which nothing moves (docs/p2p.md).
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import multiaddr
import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Limit, Reservation, StopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as PeerMessage
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode, to_proto_status
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited
from multiaddr.exceptions import Error as MultiaddrError

from p2p.address import Endpoint, parse_endpoint
from p2p.admission.inbound_slots import one_too_many
from p2p.engines.libp2p.network import circuit, direct, remote_host
from p2p.engines.libp2p.streams import IncomingStream, end
from p2p.engines.request_response import Broken
from p2p.engines.traffic import RateGate
from p2p.netgroup import LOCAL, MIN_PORT, group_of, is_public, machine_of_host, share_group_of_host
from p2p.rate_limit import MAX_PIECE, TokenBucket, TokenBuckets
from p2p.types import PeerId

HOP, STOP = TProtocol("/libp2p/circuit/relay/0.2.0/hop"), TProtocol("/libp2p/circuit/relay/0.2.0/stop")
MAX_MESSAGE_BYTES = 4096
MESSAGE_TIMEOUT_S = 10.0
# All circuits together, at a relay that its operator did not set up as one.
GUEST_BYTES_PER_S = 128.0 * 1024
# Requests of one machine.
REQUESTS_PER_S, REQUESTS_AT_ONCE = 5.0, 50.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What others may have of a relay. A machine is an IPv4 address, or a /64 of IPv6.

    If all reservations or circuits are taken, the network group with most of them loses its youngest to a
    newcomer of a smaller one (`one_too_many`).
    """

    reservations: int = 96  # fewer than there are places: those who hold one keep theirs
    reservations_of_machine: int = 16
    lasts: float = 3600.0  # seconds a reservation holds, unless its connection ends first
    circuits: int = 128  # at once
    # The peer takes 16 in all (`circuits.INBOUND_CIRCUITS`), through two relays.
    circuits_to_peer: int = 8
    circuits_of_machine: int = 16  # asked for by one machine
    circuits_of_machine_to_peer: int = 4
    size: int = 64 << 20  # bytes of a circuit, both ways together
    seconds: float = 600.0  # how long a circuit lasts
    idle: float = 30.0  # seconds in which nothing moves on it
    rate: float = float(1 << 20)  # bytes a second of all circuits together


async def send(stream: Any, message: Any) -> None:
    await stream.write(encode_varint_prefixed(message.SerializeToString()))


async def receive(stream: Any, kind: Any) -> Any:
    """Receive a message. Raises one of the library's many where none comes in time, or it is too large."""
    with trio.fail_after(MESSAGE_TIMEOUT_S):
        return kind.FromString(await read_varint_prefixed_bytes_limited(stream, MAX_MESSAGE_BYTES))


async def hail(host: Any, peer: Any, protocol: TProtocol, message: Any) -> tuple[Any, Any] | None:
    """Open a stream to a peer, send it a message, and return the stream and the answer.

    Returns None where it does not agree, or does not answer. The stream is ended then, and where this is
    cancelled.
    """
    stream = None
    try:
        with trio.fail_after(MESSAGE_TIMEOUT_S):
            stream = await host.new_stream(peer, [protocol])
            await send(stream, message)
            answer = await receive(stream, type(message))
        if answer.status == StatusCode.OK:
            agreed, stream = stream, None
            return agreed, answer
        log.debug("%s does not agree to %s: %s", peer, protocol, answer.status)
    except Exception as error:
        # The peer is gone, does not know the protocol, or answers something else.
        log.debug("%s does not answer to %s: %r", peer, protocol, error)
    finally:
        if stream is not None:
            await end(stream)
    return None


# Network group, machine and peer at one end of a circuit.
End = tuple[str, str, Any]


@dataclass(eq=False, frozen=True, slots=True)
class _Carried:
    """A circuit that a relay carries, or is about to. scope: cancelled to cut it off."""

    asker: End
    target: End
    scope: trio.CancelScope


def end_of(connection: Any, peer: Any) -> End:
    host = remote_host(connection)
    return share_group_of_host(host) or "", machine_of_host(host), peer


class Relay:
    """A relay. handle: the handler of HOP streams.

    banned: whether a peer is to stay away now. clock: seconds since the epoch.
    """

    def __init__(
        self,
        host: Any,
        banned: Callable[[PeerId], bool],
        clock: Callable[[], float],
        limits: RelayLimits = RelayLimits(),
    ) -> None:
        self._host, self._network, self._banned, self._clock, self._limits = (
            host,
            host.get_network(),
            banned,
            clock,
            limits,
        )
        # Peer id -> until, its network group and machine; the oldest first
        self._reserved: dict[Any, tuple[float, tuple[str, str]]] = {}
        self._network.slots.reserved = lambda peer: self._holds(peer, clock())
        self._circuits: list[_Carried] = []  # the oldest first
        self._asks = TokenBuckets[str](REQUESTS_PER_S, REQUESTS_AT_ONCE)
        # Of a circuit, as askers are told.
        self._limit = Limit(duration=int(limits.seconds), data=limits.size)
        self._bytes = RateGate(limits.rate, float(limits.size))

    async def handle(self, stream: Any) -> None:
        asker = _, machine, peer = end_of(stream, stream.muxed_conn.peer_id)
        try:
            message = await receive(stream, HopMessage)
            if circuit(stream) is not None or self._banned(PeerId(str(peer))):
                # Nobody could say who asks if the asker itself came through a relay.
                await _answer(stream, StatusCode.PERMISSION_DENIED)
            elif self._asks.of(machine, self._clock()).wait(self._clock()):
                await _answer(stream, StatusCode.RESOURCE_LIMIT_EXCEEDED)
            elif message.type == HopMessage.RESERVE:
                await self._reserve(stream, asker)
            elif message.type == HopMessage.CONNECT:
                await self._connect(stream, ID(message.peer.id), asker)
            else:
                await _answer(stream, StatusCode.UNEXPECTED_MESSAGE)
        finally:
            await end(stream, well=True)

    async def _reserve(self, stream: Any, asker: End) -> None:
        """Reserve for the peer at the other end, whomever the message names."""
        now, peer = self._clock(), asker[2]
        self._reserved = {one: held for one, held in self._reserved.items() if self._holds(one, now)}
        others = {one: held for one, (_, held) in self._reserved.items() if one != peer}
        full = len(others) >= self._limits.reservations
        leaving = one_too_many(others, asker[:2]) if full else None
        if (full and leaving is None) or (
            [*others.values()].count(asker[:2]) >= self._limits.reservations_of_machine
        ):
            await _answer(stream, StatusCode.RESERVATION_REFUSED)
            return
        if leaving is not None:
            # There is no other way to tell the peer that its reservation has ended.
            del self._reserved[leaving]
            await self._network.close_peer(leaving)
        until = now + self._limits.lasts
        self._reserved[peer] = until, asker[:2]
        # js-libp2p tells others all of these, who would dial their own machines and networks at local ones.
        ours = [address for address in self._host.get_addrs() if "/p2p-circuit" not in str(address)]
        told = [address for address in ours if group_of(str(address)) != LOCAL] or ours
        await _answer(
            stream,
            StatusCode.OK,
            reservation=Reservation(expire=int(until), addrs=[address.to_bytes() for address in told]),
            limit=self._limit,
        )

    def _holds(self, peer: Any, now: float) -> bool:
        """Return whether the peer's reservation holds; it ends with the peer's own connection."""
        until, _ = self._reserved.get(peer, (0.0, None))
        return until > now and bool(direct(self._network.get_connections(peer)))

    async def _connect(self, stream: Any, target: Any, asker: End) -> None:
        if not self._holds(target, self._clock()):
            await _answer(stream, StatusCode.NO_RESERVATION)
            return
        held = direct(self._network.get_connections(target))[0]
        carried = _Carried(asker, end_of(held, target), trio.CancelScope())
        if not self._makes_room(carried):
            await _answer(stream, StatusCode.RESOURCE_LIMIT_EXCEEDED)
            return
        ask = StopMessage(
            type=StopMessage.CONNECT,
            peer=PeerMessage(id=stream.muxed_conn.peer_id.to_bytes()),
            limit=self._limit,
        )
        self._circuits.append(carried)
        try:
            with carried.scope:
                found = await hail(self._host, target, STOP, ask)
                if found is None:
                    await _answer(stream, StatusCode.CONNECTION_FAILED)
                    return
                there, _ = found
                try:
                    await _answer(stream, StatusCode.OK, limit=self._limit)
                    await self._carry(carried, IncomingStream(stream), IncomingStream(there))
                finally:
                    await end(there)
                    await end(stream)
        finally:
            if carried in self._circuits:
                self._circuits.remove(carried)

    def _makes_room(self, new: _Carried) -> bool:
        """Return whether there is room for a circuit, cutting off others that have to leave for it."""
        limits, asker = self._limits, new.asker[:2]
        own = [its for its in self._circuits if its.asker[:2] == asker]
        to_peer = [its for its in self._circuits if its.target[2] == new.target[2]]
        if len(own) >= limits.circuits_of_machine or (
            sum(its in to_peer for its in own) >= limits.circuits_of_machine_to_peer
        ):
            return False
        for those, most in ((to_peer, limits.circuits_to_peer), (self._circuits, limits.circuits)):
            if len(those) >= most:
                leaving = one_too_many({its: its.asker[:2] for its in those}, asker)
                if leaving is None:
                    return False
                leaving.scope.cancel()
                self._circuits.remove(leaving)
        return True

    def _payers(self, carried: _Carried) -> tuple[Any, ...]:
        """Return the path by which a circuit shares the rate.

        The end whose network group has more circuits comes first. So a machine that asks for many circuits
        has one share, and so has one that sends to many askers.
        """
        ends = Counter(group for its in self._circuits for group, _, _ in (its.asker, its.target))
        most = sorted((carried.asker, carried.target), key=lambda one: ends[one[0]], reverse=True)
        return (*most[0], *most[1])

    async def _carry(self, carried: _Carried, one: IncomingStream, other: IncomingStream) -> None:
        """Carry bytes both ways until one side ends, or a limit is reached.

        It is idle while neither sends: what waits for our own rates is under way.
        """
        end, left, under_way = trio.current_time() + self._limits.seconds, self._limits.size, 0

        def moved(by: int) -> None:
            nonlocal under_way
            under_way += by
            both.cancel_scope.deadline = (
                end if under_way else min(end, trio.current_time() + self._limits.idle)
            )

        async def copy(source: IncomingStream, sink: IncomingStream) -> None:
            nonlocal left
            with contextlib.suppress(Broken):
                while (data := await source.read()) and len(data) <= left:
                    left -= len(data)
                    moved(+1)
                    for at in range(0, len(data), MAX_PIECE):
                        piece = data[at : at + MAX_PIECE]
                        await self._bytes.wait(len(piece), (*self._payers(carried), source))
                        await sink.write(piece)
                    moved(-1)
            both.cancel_scope.cancel()

        async with trio.open_nursery() as both:
            both.cancel_scope.deadline = trio.current_time() + min(self._limits.seconds, self._limits.idle)
            both.start_soon(copy, one, other)
            both.start_soon(copy, other, one)


async def _answer(stream: Any, status: StatusCode, **more: Any) -> None:
    await send(stream, HopMessage(type=HopMessage.STATUS, status=to_proto_status(status), **more))


DCUTR = TProtocol("/libp2p/dcutr")
# Addresses of the other side that are dialled.
MAX_DIALLED = 2
TRIES, TRY_AGAIN_S = 6, 10.0
# The time for one try.
TRY_TIMEOUT_S = 6.0
# Tries with all peers together: a peer may name a third party's address.
TRIES_PER_S, TRIES_AT_ONCE = 0.1, 8.0


class HolePunching:
    """Punches holes for peers that are connected through a relay.

    Two peers behind NAT that a relay connects dial each other at one moment. The peer that was dialled
    through the relay begins. Both dial from the port that they listen on, at the address at which members see
    the other: most routers keep the port. py-libp2p's own (`DCUtRProtocol`) also works, but dials whatever
    addresses the other side names.

    listen: where we listen. here: where others see this node, with the port that we listen on; empty while
    that is not known.
    """

    def __init__(self, host: Any, listen: Sequence[Endpoint], here: Callable[[], Sequence[str]]) -> None:
        self._host, self._network, self._here = host, host.get_network(), here
        self._listen = {f"/{endpoint.kind}/": (endpoint.host, endpoint.port) for endpoint in listen}
        self._tries = TokenBucket(TRIES_PER_S, TRIES_AT_ONCE, trio.current_time())

    async def begin(self, peer: Any) -> None:
        """Punch a hole to a peer that came to us through a relay.

        A new one does not know yet where others see it, and refuses at first.
        """
        for _ in range(TRIES):
            if self._here() and not self._tries.wait(trio.current_time()):
                try:
                    await self._begin(peer)
                except Exception as error:
                    # The peer refuses, knows no hole punching, or answers something else.
                    log.debug("no hole punching with %s: %r", peer, error)
            if direct(self._network.get_connections(peer)):
                return
            await trio.sleep(TRY_AGAIN_S)

    async def _begin(self, peer: Any) -> None:
        stream = await self._host.new_stream(peer, [DCUTR])
        try:
            asked = trio.current_time()
            await send(stream, self._connect())
            there = dialable(await _named_addresses(stream, HolePunch.CONNECT))
            half = (trio.current_time() - asked) / 2
            await send(stream, HolePunch(type=HolePunch.SYNC))
            await trio.sleep(half)
            await self._dial(peer, there, begun=True)
        finally:
            await end(stream)

    async def handle(self, stream: Any) -> None:
        """Handle a stream: a peer that we dialled through a relay begins. Nobody else may."""
        try:
            if circuit(stream) is None or not stream.muxed_conn.is_initiator:
                return
            # We wait until we know: a refusal is final for go-libp2p, and js-libp2p asks thrice, for 5 s
            # each.
            with trio.fail_after(MESSAGE_TIMEOUT_S):
                while not self._here():
                    await trio.sleep(0.1)
            if not self._tries.wait(trio.current_time()):
                there = dialable(await _named_addresses(stream, HolePunch.CONNECT))
                await send(stream, self._connect())
                await _named_addresses(stream, HolePunch.SYNC)
                await self._dial(stream.muxed_conn.peer_id, there, begun=False)
        finally:
            await end(stream)

    def _connect(self) -> HolePunch:
        return HolePunch(
            type=HolePunch.CONNECT,
            ObsAddrs=[multiaddr.Multiaddr(address).to_bytes() for address in self._here()],
        )

    async def _dial(self, peer: Any, addresses: Sequence[str], begun: bool) -> None:
        """Dial until one address answers.

        begun: we began, and are the server of a connection that both dialled. A peer that anybody can dial
        waits for us to speak instead, so it is dialled from another port as a client, too.
        """

        async def attempt(dial: Any, address: str, *source: Any) -> None:
            try:
                await dial(multiaddr.Multiaddr(address), peer, *source)
                nursery.cancel_scope.cancel()
            except Exception as error:
                # Nothing came through, or not from that address.
                log.debug("no hole to %s at %s: %r", peer, address, error)

        punch = self._network.dial_addr_as_responder if begun else self._network.dial_addr
        with trio.move_on_after(TRY_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    source = next((at for kind, at in self._listen.items() if address.startswith(kind)), None)
                    nursery.start_soon(attempt, punch, address, source)
                    if begun:
                        nursery.start_soon(attempt, self._network.dial_addr, address)
        if direct(self._network.get_connections(peer)):
            log.info("%s: connected without the relay", peer)


def dialable(addresses: Iterable[bytes]) -> list[str]:
    """Return the named addresses that we dial: public IP addresses, with no port of a system service."""
    found: dict[str, None] = {}
    for raw in addresses:
        with contextlib.suppress(MultiaddrError, ValueError, LookupError):
            endpoint = parse_endpoint(str(multiaddr.Multiaddr(bytes(raw))))
            if endpoint is not None and is_public(endpoint.host) and endpoint.port >= MIN_PORT:
                found[str(endpoint)] = None
    return [*found][:MAX_DIALLED]


async def _named_addresses(stream: Any, wanted: int) -> Sequence[bytes]:
    """Return the addresses in the next message. Raises ValueError where it is of another type."""
    message = await receive(stream, HolePunch)
    if message.type != wanted:
        raise ValueError(f"message of type {message.type}")
    return list(message.ObsAddrs)
