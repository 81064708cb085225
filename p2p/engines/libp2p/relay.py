"""For peers that cannot be dialled: the relay's side of circuit relay v2, and hole punching (DCUtR).

Specifications: github.com/libp2p/specs, relay/circuit-v2.md and relay/DCUtR.md. The messages are py-libp2p's.
Its relay (`CircuitV2Protocol`) is not used. In version 0.8.1 it accepts reservations in other peers' names,
lets one asker take all circuits of a peer, and does not end idle circuits (docs/p2p.md).
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
# Rate of all circuits together, at a node whose operator did not declare it public.
GUEST_BYTES_PER_S = 128.0 * 1024
# Requests of one machine: rate and burst.
REQUESTS_PER_S, REQUESTS_AT_ONCE = 5.0, 50.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Limits of a relay. A machine is an IPv4 address or an IPv6 /64.

    If all reservations or circuits are taken, the network group with the most of them loses its youngest to a
    newcomer of a smaller group (`one_too_many`).
    """

    # Fewer than the inbound slots, because peers with a reservation keep their slots.
    reservations: int = 96
    reservations_of_machine: int = 16
    lasts: float = 3600.0  # duration of a reservation in seconds; it ends earlier with its connection
    circuits: int = 128  # at once
    # A peer accepts 16 in all (`circuits.INBOUND_CIRCUITS`), through two relays.
    circuits_to_peer: int = 8
    circuits_of_machine: int = 16  # requested by one machine
    circuits_of_machine_to_peer: int = 4
    size: int = 64 << 20  # bytes of a circuit, both directions together
    seconds: float = 600.0  # longest duration of a circuit
    idle: float = 30.0  # seconds without data after which a circuit ends
    rate: float = float(1 << 20)  # bytes a second of all circuits together


async def send(stream: Any, message: Any) -> None:
    await stream.write(encode_varint_prefixed(message.SerializeToString()))


async def receive(stream: Any, kind: Any) -> Any:
    """Receive a message. Raises various errors of the library if it is late, malformed or too large."""
    with trio.fail_after(MESSAGE_TIMEOUT_S):
        return kind.FromString(await read_varint_prefixed_bytes_limited(stream, MAX_MESSAGE_BYTES))


async def hail(host: Any, peer: Any, protocol: TProtocol, message: Any) -> tuple[Any, Any] | None:
    """Open a stream to a peer, send it a message, and return the stream and the answer.

    Returns None if the peer refuses or does not answer. The stream is reset then, and on cancellation.
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
        log.debug("%s refuses %s: %s", peer, protocol, answer.status)
    except Exception as error:
        # The peer is gone, does not know the protocol, or sent an invalid answer.
        log.debug("%s does not answer %s: %r", peer, protocol, error)
    finally:
        if stream is not None:
            await end(stream)
    return None


# Network group, machine and peer at one end of a circuit.
End = tuple[str, str, Any]


@dataclass(eq=False, frozen=True, slots=True)
class _Carried:
    """A circuit that the relay carries, or is opening. scope: cancel it to end the circuit."""

    asker: End
    target: End
    scope: trio.CancelScope


def end_of(connection: Any, peer: Any) -> End:
    host = remote_host(connection)
    return share_group_of_host(host) or "", machine_of_host(host), peer


class Relay:
    """A relay; `handle` is the handler of HOP streams.

    Args:
        host: the library's host.
        banned: whether a peer is banned now.
        clock: returns seconds since the epoch.
        limits: limits of the relay.
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
        # Peer id -> end of the reservation, (network group, machine); oldest first.
        self._reserved: dict[Any, tuple[float, tuple[str, str]]] = {}
        self._network.slots.reserved = lambda peer: self._holds(peer, clock())
        self._circuits: list[_Carried] = []  # oldest first
        self._asks = TokenBuckets[str](REQUESTS_PER_S, REQUESTS_AT_ONCE)
        # The limits of a circuit, sent to the peers at both ends.
        self._limit = Limit(duration=int(limits.seconds), data=limits.size)
        self._bytes = RateGate(limits.rate, float(limits.size))

    async def handle(self, stream: Any) -> None:
        asker = _, machine, peer = end_of(stream, stream.muxed_conn.peer_id)
        try:
            message = await receive(stream, HopMessage)
            if circuit(stream) is not None or self._banned(PeerId(str(peer))):
                # An asker that came through a relay has no known address, so its machine cannot be limited.
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
        """Make a reservation for the peer at the other end; the peer id in the message is ignored."""
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
            # The protocol has no message for the end of a reservation, so the connection is closed.
            del self._reserved[leaving]
            await self._network.close_peer(leaving)
        until = now + self._limits.lasts
        self._reserved[peer] = until, asker[:2]
        # Leave out local addresses. js-libp2p passes on all addresses from here, and the nodes that get them
        # would dial local addresses in their own networks.
        ours = [address for address in self._host.get_addrs() if "/p2p-circuit" not in str(address)]
        told = [address for address in ours if group_of(str(address)) != LOCAL] or ours
        await _answer(
            stream,
            StatusCode.OK,
            reservation=Reservation(expire=int(until), addrs=[address.to_bytes() for address in told]),
            limit=self._limit,
        )

    def _holds(self, peer: Any, now: float) -> bool:
        """Return whether the peer has a reservation; it ends with the peer's direct connection."""
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
                if (found := await hail(self._host, target, STOP, ask)) is None:
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
        """Make room for a new circuit, if need be by ending another one. Return False if that fails."""
        limits, asker = self._limits, new.asker[:2]
        own = [its for its in self._circuits if its.asker[:2] == asker]
        to_peer = [its for its in self._circuits if its.target[2] == new.target[2]]
        if len(own) >= limits.circuits_of_machine or (
            sum(its in to_peer for its in own) >= limits.circuits_of_machine_to_peer
        ):
            return False
        for those, most in ((to_peer, limits.circuits_to_peer), (self._circuits, limits.circuits)):
            if len(those) >= most:
                if (leaving := one_too_many({its: its.asker[:2] for its in those}, asker)) is None:
                    return False
                leaving.scope.cancel()
                self._circuits.remove(leaving)
        return True

    def _payers(self, carried: _Carried) -> tuple[Any, ...]:
        """Return the circuit's path in the tree of the shared rate.

        The end whose network group has more circuits comes first in the path. So a machine with many circuits
        has one share, no matter whether it is the asker or the target.
        """
        ends = Counter(group for its in self._circuits for group, _, _ in (its.asker, its.target))
        most = sorted((carried.asker, carried.target), key=lambda one: ends[one[0]], reverse=True)
        return (*most[0], *most[1])

    async def _carry(self, carried: _Carried, one: IncomingStream, other: IncomingStream) -> None:
        """Forward bytes in both directions until one side ends or a limit is reached.

        The idle timer runs only while no bytes are under way, so bytes that wait for our rate limit do not
        count as idle time.
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
# Maximum number of the other side's addresses that we dial.
MAX_DIALLED = 2
TRIES, TRY_AGAIN_S = 6, 10.0
# Timeout of one try.
TRY_TIMEOUT_S = 6.0
# Tries with all peers together, rate and burst. They are limited because a peer may name a victim's address.
TRIES_PER_S, TRIES_AT_ONCE = 0.1, 8.0


class HolePunching:
    """Punches holes through NAT for peers that are connected through a relay (DCUtR).

    Both peers dial each other at the same moment. The peer that was dialled through the relay begins. Each
    dials from its listen port to the address at which members see the other peer; most routers keep the port.
    py-libp2p's `DCUtRProtocol` also works, but it dials any address that the other side names.

    Args:
        host: the library's host.
        listen: our listen addresses.
        here: returns our addresses as members see them, with our listen ports; empty while unknown.
    """

    def __init__(self, host: Any, listen: Sequence[Endpoint], here: Callable[[], Sequence[str]]) -> None:
        self._host, self._network, self._here = host, host.get_network(), here
        self._listen = {f"/{endpoint.kind}/": (endpoint.host, endpoint.port) for endpoint in listen}
        self._tries = TokenBucket(TRIES_PER_S, TRIES_AT_ONCE, trio.current_time())

    async def begin(self, peer: Any) -> None:
        """Punch a hole to a peer that dialled us through a relay.

        Several tries are needed: a new node refuses at first, because it does not know yet at which address
        members see it.
        """
        for _ in range(TRIES):
            if self._here() and not self._tries.wait(trio.current_time()):
                try:
                    await self._begin(peer)
                except Exception as error:
                    # The peer refuses, does not know the protocol, or sent an invalid answer.
                    log.debug("hole punching with %s failed: %r", peer, error)
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
        """Handle a DCUtR stream. Only a peer that we dialled through a relay may open one."""
        try:
            if circuit(stream) is None or not stream.muxed_conn.is_initiator:
                return
            # Wait until we know our address instead of refusing: for go-libp2p a refusal is final, and
            # js-libp2p tries three times with 5 s each.
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
        """Dial all addresses until one answers.

        begun: whether we opened the DCUtR stream. If so, we are the server of a connection that both sides
            dialled. But a peer that can be dialled directly accepts our dial as a server and waits for us to
            speak, so we also dial it as a client, from another port.
        """

        async def attempt(dial: Any, address: str, *source: Any) -> None:
            try:
                await dial(multiaddr.Multiaddr(address), peer, *source)
                nursery.cancel_scope.cancel()
            except Exception as error:
                # The dial failed, or another peer answered.
                log.debug("no connection to %s at %s: %r", peer, address, error)

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
    """Return the addresses that we dial: public IP addresses with a port from MIN_PORT up."""
    found: dict[str, None] = {}
    for raw in addresses:
        with contextlib.suppress(MultiaddrError, ValueError, LookupError):
            endpoint = parse_endpoint(str(multiaddr.Multiaddr(bytes(raw))))
            if endpoint is not None and is_public(endpoint.host) and endpoint.port >= MIN_PORT:
                found[str(endpoint)] = None
    return [*found][:MAX_DIALLED]


async def _named_addresses(stream: Any, wanted: int) -> Sequence[bytes]:
    """Return the addresses in the next message. Raises ValueError if its type is not `wanted`."""
    message = await receive(stream, HolePunch)
    if message.type != wanted:
        raise ValueError(f"message of type {message.type}")
    return list(message.ObsAddrs)
