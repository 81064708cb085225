"""Connections through relays (circuit relay v2), to this node and to peers that cannot be dialled.

Whether this node can be dialled is decided by members that try it (`p2p.peers.dial_back`). py-libp2p's
AutoNAT is not used, because it confirms any address of a connected peer: it takes the existing connection for
a new one.
"""

import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import multiaddr
import trio
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as PeerMessage
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode, to_proto_status

from p2p.address import Endpoint, parse_bootstrap
from p2p.engines.libp2p.network import circuit, close_socket, direct, remote_address, remote_host
from p2p.engines.libp2p.relay import HOP, MESSAGE_TIMEOUT_S, HolePunching, hail, receive, send
from p2p.engines.libp2p.streams import Circuit, end
from p2p.errors import BadAddress
from p2p.latest import Latest
from p2p.netgroup import LOCAL, group_of_host, is_public, on_internet
from p2p.peers.addressbook import AddressBook
from p2p.peers.dial_back import ask_members, can_be_dialled, who_dials_back
from p2p.types import Ask, Peer, PeerId

# Seconds until we ask members whether they can dial us: the first time, while no member could tell, and
# later.
ASK_FIRST_S, ASK_AGAIN_S, ASK_EVERY_S = 3.0, 30.0, 600.0
# Seconds between two checks of our reservations.
TICK_S = 5.0
RESERVATIONS = 2
# A reservation is renewed after this share of its duration.
RENEW_AFTER = 0.5
# Longest duration of a reservation that we believe.
MAX_RESERVATION_S = 3600.0
# Maximum number of inbound circuits that are open at the same time.
INBOUND_CIRCUITS = 16
# Maximum number of connected relays that we try for one peer.
RELAYS_TRIED = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Reservation:
    address: str  # the relay's multiaddress with its peer id
    renew: float  # when to renew, in trio's time
    until: float  # when it ends, in trio's time


class Circuits:
    """Makes reservations at relays while this node cannot be dialled, and reaches peers through their relays.

    Args:
        host: the library's host.
        book: known peers.
        ask: asks a member a question.
        reach: connects to a peer without a relay.
        members: returns the connected peers.
        banned: whether a peer is banned now.
        listen: our listen addresses.
        clock: returns seconds since the epoch.
    """

    def __init__(
        self,
        host: Any,
        book: AddressBook,
        ask: Ask,
        reach: Callable[[PeerId], Awaitable[bool]],
        members: Callable[[], Collection[Peer]],
        banned: Callable[[PeerId], bool],
        listen: Sequence[Endpoint],
        clock: Callable[[], float],
    ) -> None:
        self._host, self._network, self._book = host, host.get_network(), book
        self._ask, self._reach, self._members = ask, reach, members
        self._banned, self._clock = banned, clock
        self._ports = {endpoint.kind: endpoint.port for endpoint in listen}
        self.hole_punching = HolePunching(host, listen, lambda: self._seen_at)
        # Our addresses as members see them.
        self._seen_at: Sequence[str] = ()
        self._dialable: bool | None = None  # None if no member could tell
        self._reserved: dict[PeerId, _Reservation] = {}
        # Peer -> its relays.
        self._announced: Latest[PeerId, Sequence[str]] = Latest(1024)
        self._under_way: WeakValueDictionary[PeerId, trio.Lock] = WeakValueDictionary()
        self._inbound = 0

    def addresses(self) -> list[str]:
        """Return our addresses through relays."""
        return [f"{held.address}/p2p-circuit" for held in self._reserved.values()]

    def reached_at(self) -> str:
        """Return a public address at which members have dialled us, else one through a relay, else ""."""
        direct = sorted(self._seen_at) if self._dialable else []
        return next(filter(on_internet, [*direct, *self.addresses()]), "")

    def note(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remember a peer's relays, from addresses that the peer or other nodes report."""
        if relays := [address.split("/p2p-circuit")[0] for address in addresses if "/p2p-circuit" in address][
            :RESERVATIONS
        ]:
            self._announced[peer] = relays

    async def reach(self, peer: PeerId) -> bool:
        """Connect to a peer, directly or through a relay. Return whether it is connected.

        If we have never dialled the peer, relays are tried first: a relay answers at once whether it can
        reach the peer, while a dial that is not answered takes seconds.
        """
        dialled = peer in self._book.known and bool(self._book.known[peer].proved)
        if not dialled:
            await self._through_a_relay(peer)
        return await self._reach(peer) or (dialled and await self._through_a_relay(peer))

    async def _through_a_relay(self, peer: PeerId) -> bool:
        async with self._under_way.setdefault(peer, trio.Lock()):
            if self._banned(peer):
                return False
            if self._network.get_connections(ID.from_string(peer)):
                return True
            ours = self._relays()[:RELAYS_TRIED]
            for relay in ours:
                if await self._connect(peer, relay):
                    return True
            # The announced relays come last: we must dial them first, and any node can announce a relay.
            for text in self._announced.get(peer, ()):
                with contextlib.suppress(BadAddress):
                    relay, endpoint = parse_bootstrap(text)
                    if relay not in (*ours, self._book.me) and is_public(endpoint.host):
                        self._book.add(relay, [str(endpoint)], self._clock(), teller=peer)
                        if await self._reach(relay) and await self._connect(peer, relay):
                            return True
        return False

    def _relays(self) -> list[PeerId]:
        """Return connected relays that we dialled over the internet, so that other nodes can dial them too.

        Relays that the operator named come first. The rest is sorted by the age of the connection, because an
        attacker can choose its peer id, but not that age.
        """
        found = []
        for peer in self._network.get_connections_map():
            dialled, name = self._dialled(peer), PeerId(str(peer))
            named = name in self._book.known and bool(self._book.known[name].pinned)
            if dialled and (named or group_of_host(remote_host(dialled[0])) != LOCAL) and self._speaks(peer):
                found.append((not named, dialled[0]._created_at, name))
        return [name for _, _, name in sorted(found)]

    def _dialled(self, peer: Any) -> list[Any]:
        """Return the connections that we dialled. Their remote address is one that other nodes can dial."""
        near = direct(self._network.get_connections(peer))
        return [connection for connection in near if connection.direction.name == "OUTBOUND"]

    def _speaks(self, peer: Any) -> bool:
        with contextlib.suppress(PeerStoreError):
            # PeerStoreError: the peer has not sent its protocols yet.
            return str(HOP) in self._host.get_peerstore().get_protocols(peer)
        return False

    async def _connect(self, peer: PeerId, relay: PeerId) -> bool:
        target = ID.from_string(peer)
        found = await hail(
            self._host,
            ID.from_string(relay),
            HOP,
            HopMessage(type=HopMessage.CONNECT, peer=PeerMessage(id=target.to_bytes())),
        )
        if found is None:
            return False
        (stream, _), connected = found, False
        try:
            with trio.fail_after(MESSAGE_TIMEOUT_S):
                await self._network.upgrade_outbound_raw_conn(Circuit(stream, True, relay), target)
            connected = True
        except Exception as error:
            # The peer behind the relay does not prove its id.
            log.debug("no circuit to %s through %s: %r", peer, relay, error)
        finally:
            if not connected:
                await end(stream)
        return connected

    async def take_in(self, stream: Any) -> None:
        """Handle a STOP stream: accept a peer through a relay, if we have a reservation at that relay."""
        relay = PeerId(str(stream.muxed_conn.peer_id))
        if relay not in self._reserved or self._inbound >= INBOUND_CIRCUITS or circuit(stream) is not None:
            await stream.reset()
            return
        self._inbound += 1
        try:
            message = await receive(stream, StopMessage)
            source = ID(message.peer.id)
            fine = message.type == StopMessage.CONNECT and not self._banned(PeerId(str(source)))
            status = StatusCode.OK if fine else StatusCode.PERMISSION_DENIED
            await send(stream, StopMessage(type=StopMessage.STATUS, status=to_proto_status(status)))
            if fine:
                await self._welcome(Circuit(stream, False, relay), source)
        finally:
            self._inbound -= 1
            await end(stream)

    async def _welcome(self, raw: Circuit, source: Any) -> None:
        muxed = await self._network.upgrade_inbound_raw_conn(raw, multiaddr.Multiaddr(raw.address))
        if muxed.peer_id == source:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.hole_punching.begin, source)
                await muxed.event_closed.wait()
                nursery.cancel_scope.cancel()
            return
        for connection in self._network.get_connections(muxed.peer_id):
            if circuit(connection) is raw:
                await close_socket(connection)

    async def keep(self) -> None:
        """Find out whether we can be dialled, and keep reservations if not. Run until cancelled."""
        due, asked = trio.current_time() + ASK_FIRST_S, -math.inf
        while True:
            await trio.sleep(min(TICK_S, max(0.0, due - trio.current_time())))
            if not self._members():
                # The machine may have moved to another network, so the old results do not count.
                self._dialable, self._seen_at = None, ()
            if trio.current_time() >= due:
                due = trio.current_time() + ASK_AGAIN_S
                if (
                    self._dialable is None
                    or trio.current_time() - asked >= ASK_EVERY_S
                    or self._met_by_another_kind()
                ):
                    asked, told = trio.current_time(), await self._ask_members()
                    # If no member could tell this time, keep the old result, so that we lose no reservation.
                    self._dialable = self._dialable if told is None else told
            before = self.addresses()
            await self._reserve_where_due(wanted=self._dialable is False)
            if self.addresses() != before:
                log.info(
                    "relays through which peers can reach this node: %s",
                    ", ".join(self.addresses()) or "none",
                )
                await self._host.announce_through(self.addresses())

    def _met_by_another_kind(self) -> bool:
        """Return whether a member is connected by IPv4 or IPv6, but we do not know our address of that kind.

        The members that we ask first may all be connected by IPv4, where hole punching may be impossible.
        """
        met = {address.split("/")[1] for member in self._members() if (address := member.address)}
        return bool(met & self._ports.keys() - {address.split("/")[1] for address in self._seen_at})

    async def _ask_members(self) -> bool | None:
        """Ask members to dial us. Return whether they can; None if none of them could tell."""
        replies = (await ask_members(self._ask, who_dials_back(self._members(), self._ports))).values()
        seen = dict.fromkeys(reply.seen_at for reply in replies if reply.seen_at is not None)
        self._seen_at = [
            f"/ip{address.version}/{address}/tcp/{port}"
            for address in seen
            if (port := self._ports.get(f"ip{address.version}"))
        ]
        return can_be_dialled(replies)

    async def _reserve_where_due(self, wanted: bool) -> None:
        now = trio.current_time()
        self._reserved = {
            relay: held
            for relay, held in self._reserved.items()
            if wanted and held.until > now and direct(self._network.get_connections(ID.from_string(relay)))
        }
        due = [relay for relay, held in self._reserved.items() if held.renew <= now]
        new = [relay for relay in self._relays() if relay not in self._reserved] if wanted else []
        for relay in [*due, *new]:
            # If a relay is full, the loop goes on to the next one.
            room = relay in self._reserved or len(self._reserved) < RESERVATIONS
            if room and (reservation := await self._reserve(relay)) is not None:
                self._reserved[relay] = reservation

    async def _reserve(self, relay: PeerId) -> _Reservation | None:
        peer = ID.from_string(relay)
        if (found := await hail(self._host, peer, HOP, HopMessage(type=HopMessage.RESERVE))) is None:
            return None
        stream, answer = found
        await end(stream)
        held, lasts = self._dialled(peer), reserved_for(answer.reservation.expire, self._clock())
        if lasts <= 0 or not held:
            return None
        now = trio.current_time()
        return _Reservation(f"{remote_address(held[0])}/p2p/{relay}", now + RENEW_AFTER * lasts, now + lasts)


def reserved_for(expire: float, now: float) -> float:
    """Return the seconds that a reservation lasts, at most MAX_RESERVATION_S.

    The limit is needed because the relay may lie, or a clock may be wrong, and we would renew too late.
    """
    return min(MAX_RESERVATION_S, expire - now)
