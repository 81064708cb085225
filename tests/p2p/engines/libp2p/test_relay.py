"""Limits on each peer's use of the libp2p engine's relay, with real hosts on loopback.

tests/p2p/nat tests relays across NATs; tests/p2p/engines/test_slow_lines.py tests the relay's rate.
"""

import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import multiaddr
import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.autonat import AutoNATService
from libp2p.host.autonat.pb.autonat_pb2 import Message
from libp2p.identity.identify import identify
from libp2p.peer.peerinfo import PeerInfo
from libp2p.relay.circuit_v2 import CircuitV2Protocol
from libp2p.relay.circuit_v2 import RelayLimits as TheirLimits
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as PeerMessage
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode, to_proto_status
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils.varint import read_length_prefixed_protobuf

from p2p.address import parse_listen
from p2p.engines.libp2p import circuits, relay
from p2p.engines.libp2p.circuits import (
    INBOUND_CIRCUITS,
    MAX_RESERVATION_S,
    RESERVATIONS,
    Circuits,
    reserved_for,
)
from p2p.engines.libp2p.network import direct
from p2p.engines.libp2p.relay import (
    DCUTR,
    HOP,
    MAX_DIALLED,
    REQUESTS_AT_ONCE,
    STOP,
    HolePunching,
    Relay,
    RelayLimits,
    dialable,
    receive,
    send,
)
from p2p.engines.libp2p.stack import make_host
from p2p.engines.libp2p.streams import Circuit
from p2p.identity import Identity
from p2p.peers.addressbook import AddressBook
from p2p.peers.dial_back import Outcome
from p2p.types import Peer, PeerId
from tests.doubles import until
from tests.p2p.hostile import hostile_peer
from tests.p2p.real import SECONDS, real_engine

pytestmark = pytest.mark.net
REFUSED, FULL, NONE, OK = (
    StatusCode.RESERVATION_REFUSED,
    StatusCode.RESOURCE_LIMIT_EXCEEDED,
    StatusCode.NO_RESERVATION,
    StatusCode.OK,
)


SEEDS = itertools.count(1)


class Net:
    """A relay with these limits, and hosts connected to it."""

    def __init__(self, stack: AsyncExitStack, limits: RelayLimits) -> None:
        self._stack, self._limits, self._seeds = stack, limits, SEEDS
        self.now, self.banned = time.time(), set[str]()

    async def begin(self) -> None:
        self.host = await self.relay()

    async def relay(self) -> Any:
        host = await self._run()
        relay = Relay(host, self.banned.__contains__, lambda: self.now, self._limits)
        host.set_stream_handler(HOP, relay.handle)
        return host

    async def _run(self, source: str | None = None) -> Any:
        host = make_host(Identity(next(self._seeds).to_bytes(32, "big")))
        if source is not None:
            (tcp,) = host.get_network().transport_manager.get_transports()
            tcp.dial = lambda where: tcp.dial_with_source(where, (source, 0))
        await self._stack.enter_async_context(
            host.run(listen_addrs=[multiaddr.Multiaddr("/ip4/127.0.0.1/tcp/0")])
        )
        self._stack.push_async_callback(host.get_network().close_sockets)
        return host

    async def peer(self, source: str | None = None, echoes: bool = True) -> Any:
        """Start a host that echoes bytes from a circuit. source: the address that it dials from."""
        host = await self._run(source)

        async def echo(stream: Any) -> None:
            await receive(stream, StopMessage)
            await send(stream, StopMessage(type=StopMessage.STATUS, status=to_proto_status(OK)))
            with suppress(BaseLibp2pError):  # the relay closed the circuit
                while data := await stream.read(1 << 16):
                    if echoes:
                        await stream.write(data)

        host.set_stream_handler(STOP, echo)
        await host.connect(PeerInfo(self.host.get_id(), self.host.get_transport_addrs()))
        return host

    async def ask(self, host: Any, message: HopMessage) -> tuple[StatusCode, Any]:
        stream = await host.new_stream(self.host.get_id(), [HOP])
        await send(stream, message)
        return StatusCode((await receive(stream, HopMessage)).status), stream

    async def reserve(self, host: Any, name: Any = None) -> StatusCode:
        named = {"peer": PeerMessage(id=name.to_bytes())} if name is not None else {}
        return (await self.ask(host, HopMessage(type=HopMessage.RESERVE, **named)))[0]

    async def connect(self, host: Any, target: Any) -> tuple[StatusCode, Any]:
        return await self.ask(
            host, HopMessage(type=HopMessage.CONNECT, peer=PeerMessage(id=target.get_id().to_bytes()))
        )

    async def join(self, asker: Any, home: Any) -> None:
        """Connect the two through the relay; the asker dials."""
        relay = self.host.get_id()

        async def come_in(stream: Any) -> None:
            await receive(stream, StopMessage)
            await send(stream, StopMessage(type=StopMessage.STATUS, status=to_proto_status(OK)))
            through = Circuit(stream, False, relay)
            muxed = await home.get_network().upgrade_inbound_raw_conn(
                through, multiaddr.Multiaddr(through.address)
            )
            await muxed.event_closed.wait()

        home.set_stream_handler(STOP, come_in)
        await self.reserve(home)
        _, stream = await self.connect(asker, home)
        await asker.get_network().upgrade_outbound_raw_conn(Circuit(stream, True, relay), home.get_id())
        await until(lambda: home.get_network().get_connections(asker.get_id()), SECONDS)


@asynccontextmanager
async def net(**limits: Any) -> AsyncIterator[Net]:
    async with AsyncExitStack() as stack:
        found = Net(stack, replace(RelayLimits(), **limits))
        await found.begin()
        yield found


async def moved(stream: Any, size: int) -> int:
    """Send `size` bytes through a circuit; return how many come back before it ends."""
    there = 0
    with trio.fail_after(SECONDS):
        try:
            while there < size:
                await stream.write(bytes(min(1000, size - there)))
                there += len(await stream.read(1000))
        except Exception:
            return there
    return there


async def test_a_circuit_carries_bytes_both_ways_within_its_limit() -> None:
    async with net(size=20_000) as those:
        home, asker = await those.peer(), await those.peer()
        assert (await those.connect(asker, home))[0] is NONE and await those.reserve(home) is OK
        status, stream = await those.connect(asker, home)
        assert status is OK and await moved(stream, 5000) == 5000
        assert 4000 <= await moved(stream, 100_000) <= 5000  # each byte counts twice, once in each direction


async def test_a_reservation_is_only_for_the_asking_peer_and_ends_with_its_connection() -> None:
    async with net() as those:
        home, other, asker = await those.peer(), await those.peer(), await those.peer()
        assert await those.reserve(other, name=home.get_id()) is OK
        assert (await those.connect(asker, home))[0] is NONE and (await those.connect(asker, other))[0] is OK
        found = those.host.get_network().slots
        assert [found.reserved(host.get_id()) for host in (home, other)] == [False, True]
        await other.disconnect(those.host.get_id())
        await until(lambda: not those.host.get_network().get_connections(other.get_id()), SECONDS)
        assert (await those.connect(asker, other))[0] is NONE and await those.reserve(home) is OK
        those.now += RelayLimits().lasts
        assert (await those.connect(asker, home))[0] is NONE


class At:
    """A host that reports these addresses."""

    def __init__(self, host: Any, addresses: Sequence[str]) -> None:
        self._host, self._addresses = host, addresses

    def get_addrs(self) -> list[multiaddr.Multiaddr]:
        return [multiaddr.Multiaddr(f"{address}/p2p/{self.get_id()}") for address in self._addresses]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


async def test_a_relay_names_local_addresses_only_if_it_has_no_public_one() -> None:
    local, public = ["/ip4/127.0.0.1/tcp/4001", "/ip6/::1/tcp/4001"], ["/ip6/2611::1/tcp/4001"]
    async with net() as those:
        home = await those.peer()
        circuit = f"/ip4/11.0.0.9/tcp/4001/p2p/{home.get_id()}/p2p-circuit"
        for addresses, named in ((local, local), ([*local, *public, circuit], public)):
            at = At(those.host, addresses)
            those.host.set_stream_handler(HOP, Relay(at, those.banned.__contains__, time.time).handle)
            stream = await home.new_stream(those.host.get_id(), [HOP])
            await send(stream, HopMessage(type=HopMessage.RESERVE))
            told = (await receive(stream, HopMessage)).reservation.addrs
            assert [str(multiaddr.Multiaddr(address)).split("/p2p/")[0] for address in told] == named


@pytest.mark.parametrize("limit", ["reservations", "reservations_of_machine"])
async def test_reservations_are_limited(limit: str) -> None:
    async with net(**{limit: 1}) as those:
        one, other = await those.peer(), await those.peer()
        # The second reservation renews the first.
        assert [await those.reserve(host) for host in (one, one, other)] == [OK, OK, REFUSED]
        await one.disconnect(those.host.get_id())
        await until(lambda: not those.host.get_network().get_connections(one.get_id()), SECONDS)
        assert await those.reserve(other) is OK


@pytest.mark.parametrize(
    "limit", ["circuits", "circuits_to_peer", "circuits_of_machine", "circuits_of_machine_to_peer"]
)
async def test_circuits_are_limited_and_an_ended_circuit_frees_its_place(limit: str) -> None:
    async with net(**{limit: 2}) as those:
        home, asker, another = [await those.peer() for _ in range(3)]
        await those.reserve(home)
        (_, first), (_, second) = await those.connect(asker, home), await those.connect(asker, home)
        assert (await those.connect(another, home))[0] is FULL and await moved(second, 1000) == 1000
        await first.reset()
        with trio.fail_after(SECONDS):
            while (found := await those.connect(another, home))[0] is FULL:
                await trio.sleep(0.01)
        assert found[0] is OK


async def test_one_machine_cannot_use_all_circuits_to_a_peer() -> None:
    assert RESERVATIONS * RelayLimits().circuits_of_machine_to_peer < INBOUND_CIRCUITS
    async with net(circuits_of_machine_to_peer=1) as those:
        home, other, asker = [await those.peer() for _ in range(3)]
        for host in (home, other):
            await those.reserve(host)
        assert [(await those.connect(asker, host))[0] for host in (home, home, other)] == [OK, FULL, OK]


def test_a_reservation_counts_for_an_hour_at_most_even_if_the_relay_says_more() -> None:
    now = 1_800_000_000.0
    assert reserved_for(now + 60, now) == 60 and reserved_for(now - 1, now) < 0
    assert reserved_for(2**64 - 1, now) == MAX_RESERVATION_S <= RelayLimits().lasts


@pytest.mark.parametrize("limit", ["seconds", "idle"])
async def test_an_idle_circuit_ends(limit: str) -> None:
    async with net(**{limit: 0.2}) as those:
        home, asker = await those.peer(), await those.peer()
        await those.reserve(home)
        _, stream = await those.connect(asker, home)
        # The reset's error has the library's text.
        with trio.fail_after(SECONDS), pytest.raises(Exception, match=r".*"):
            assert not await stream.read(1)
            raise EOFError


async def silent_from(stream: Any, kind: Any, cancel: Callable[[], object], ended: trio.Event) -> None:
    """Do not answer a message of this kind, but cancel when it arrives; record the stream's end."""
    message = await receive(stream, kind)
    if message.type == StopMessage.CONNECT and kind is StopMessage:
        await send(stream, StopMessage(type=StopMessage.STATUS, status=to_proto_status(OK)))
        await stream.read(1)  # until the handshake through the circuit has begun
    cancel()
    try:
        while await stream.read(1 << 16):
            pass
    finally:
        ended.set()


@pytest.mark.parametrize("silent", ["relay", "peer behind it"])
async def test_a_cancelled_request_leaves_no_stream_open(silent: str) -> None:
    """A connection allows 256 streams, and each stream that is left open counts for ever."""
    async with net() as those:
        home, asker = await those.peer(), await those.peer()
        await those.reserve(home)
        relay = PeerId(str(those.host.get_id()))
        book, at = AddressBook(PeerId(str(asker.get_id())), bytes(16)), those.host.get_transport_addrs()[0]
        book.pin(relay, parse_listen(str(at)))

        async def reach(peer: PeerId) -> bool:
            return False

        asks = Circuits(asker, book, None, reach, list, lambda peer: False, [], time.time)  # type: ignore[arg-type]
        ended = trio.Event()
        await until(lambda: asks._relays(), SECONDS)
        with trio.CancelScope() as scope:
            host, protocol, kind = (
                (those.host, HOP, HopMessage) if silent == "relay" else (home, STOP, StopMessage)
            )
            host.set_stream_handler(protocol, lambda stream: silent_from(stream, kind, scope.cancel, ended))
            await asks.reach(PeerId(str(home.get_id())))
        assert scope.cancelled_caught
        with trio.fail_after(SECONDS):
            await ended.wait()


async def test_banned_peers_and_too_frequent_requests_are_rejected() -> None:
    async with net() as those:
        home = await those.peer()
        assert [await those.reserve(home) for _ in range(int(REQUESTS_AT_ONCE))] == [OK] * int(
            REQUESTS_AT_ONCE
        )
        assert await those.reserve(home) is FULL
        those.banned.add(str(home.get_id()))
        assert await those.reserve(home) is StatusCode.PERMISSION_DENIED
        assert (await those.ask(home, HopMessage(type=HopMessage.STATUS)))[0] is StatusCode.PERMISSION_DENIED


@asynccontextmanager
async def behind_nat(
    monkeypatch: pytest.MonkeyPatch, home: Any, *relays: Any, says: Callable[[], Outcome]
) -> AsyncIterator[Circuits]:
    """Run the circuits of a host that knows these relays. says: the members' answers to dial-backs."""
    for name, seconds in {
        "ASK_FIRST_S": 0.0,
        "ASK_AGAIN_S": 0.05,
        "ASK_EVERY_S": 0.05,
        "TICK_S": 0.05,
    }.items():
        monkeypatch.setattr(circuits, name, seconds)

    async def ask(peer: PeerId, question: bytes, limit: int) -> bytes:
        return bytes([says(), 11, 0, 0, 1])

    async def reach(peer: PeerId) -> bool:
        return False

    book = AddressBook(PeerId(str(home.get_id())), bytes(16))
    for host in relays:
        info = PeerInfo(host.get_id(), host.get_transport_addrs())
        book.pin(PeerId(str(info.peer_id)), parse_listen(str(info.addrs[0])))
        await home.connect(info)
    listen = [parse_listen("/ip4/127.0.0.1/tcp/4001")]

    def members() -> list[Peer]:
        near = home.get_network().get_connections_map()
        return [
            Peer(PeerId(str(peer)), "/ip4/127.0.0.1/tcp/1", "outbound", 0.0) for peer in near if near[peer]
        ]

    found = Circuits(home, book, ask, reach, members, lambda peer: False, listen, time.time)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.keep)
        await until(found.addresses, SECONDS)
        yield found
        nursery.cancel_scope.cancel()


async def test_refusing_relays_do_not_stop_requests_to_further_relays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The two relays that the node knew first are full."""
    async with net() as free, net(reservations=0) as full:
        home, second = await full.peer(), await full.relay()
        relays = (full.host, second, free.host)
        async with behind_nat(monkeypatch, home, *relays, says=lambda: Outcome.NOT_REACHED) as found:
            assert str(free.host.get_id()) in found.addresses()[0]


async def test_a_relay_is_kept_while_members_cannot_say_whether_the_node_can_be_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Members dial back few nodes at a time, and refuse other requests."""
    said = [Outcome.NOT_REACHED]

    def says() -> Outcome:
        said.append(Outcome.REFUSED)
        return said[-2]

    async with net() as those:
        home = await those.peer()
        async with behind_nat(monkeypatch, home, those.host, says=says) as found:
            await until(lambda: len(said) > 5, SECONDS)
            assert found.addresses()


async def test_a_node_that_changed_its_network_does_not_name_its_old_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its offers and invitations would lead to the new owner of that address."""
    said = [Outcome.NOT_REACHED]
    async with net() as those:
        home = await those.peer()
        async with behind_nat(monkeypatch, home, those.host, says=lambda: said[-1]) as found:
            assert found.reached_at() == ""  # the relay's address does not count, because it is on loopback
            said.append(Outcome.REACHED)
            await until(lambda: found.reached_at() == "/ip4/11.0.0.1/tcp/4001", SECONDS)
            monkeypatch.setattr(circuits, "ASK_AGAIN_S", 600.0)  # no further dial-back requests
            await trio.sleep(0.1)
            await home.disconnect(those.host.get_id())
            await until(lambda: not found.reached_at(), SECONDS)


async def test_connections_through_a_relay_without_a_reservation_are_rejected(nursery: trio.Nursery) -> None:
    (address,) = await nursery.start(real_engine("libp2p", 1).run)
    async with hostile_peer(address) as (stack, victim):
        stream = await stack.host.new_stream(victim, [STOP])
        with pytest.raises(Exception, match=r".*"), trio.fail_after(SECONDS):
            await send(
                stream,
                StopMessage(type=StopMessage.CONNECT, peer=PeerMessage(id=stack.host.get_id().to_bytes())),
            )
            await receive(stream, StopMessage)


async def test_a_relay_rejects_requests_that_come_through_a_relay() -> None:
    """The address of such a peer is not known."""
    async with net() as those:
        home, asker = await those.peer(), await those.peer()
        inner = Relay(home, lambda peer: False, time.time)
        home.set_stream_handler(HOP, inner.handle)
        await those.join(asker, home)
        hop = await asker.new_stream(home.get_id(), [HOP])
        await send(hop, HopMessage(type=HopMessage.RESERVE))
        assert (await receive(hop, HopMessage)).status == StatusCode.PERMISSION_DENIED


async def test_hole_punching_is_rejected_without_a_dial_through_a_relay() -> None:
    async with net() as those:
        peer = await those.peer()
        punching = HolePunching(
            those.host, [parse_listen("/ip4/127.0.0.1/tcp/4001")], lambda: ["/ip4/11.0.0.1/tcp/4001"]
        )
        those.host.set_stream_handler(DCUTR, punching.handle)
        stream = await peer.new_stream(those.host.get_id(), [DCUTR])
        with pytest.raises(Exception, match=r".*"), trio.fail_after(SECONDS):
            await send(stream, HolePunch(type=HolePunch.CONNECT))
            await receive(stream, HolePunch)


async def test_identify_over_a_circuit_states_no_observed_address() -> None:
    """With `/p2p/<relay>/p2p-circuit`, js-libp2p gives up and never learns the node's protocols."""
    async with net() as those:
        home, asker = await those.peer(), await those.peer()
        await those.join(asker, home)
        for host, other in ((home, asker), (asker, home)):
            stream = await host.new_stream(other.get_id(), [identify.ID])
            with trio.fail_after(SECONDS):
                data = await read_length_prefixed_protobuf(stream, use_varint_format=True)
            assert not identify.Identify.FromString(data).observed_addr


@dataclass
class Follower:
    """Answers hole punching with this address, which can be dialled, but never dials."""

    address: Any
    begun: int = 0

    async def handle(self, stream: Any) -> None:
        self.begun += 1
        assert (await receive(stream, HolePunch)).type == HolePunch.CONNECT
        await send(stream, HolePunch(type=HolePunch.CONNECT, ObsAddrs=[self.address.to_bytes()]))
        assert (await receive(stream, HolePunch)).type == HolePunch.SYNC


async def test_a_peer_that_came_through_a_relay_is_dialled_directly_if_possible(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """The peer does not dial, so a node that waited for the peer's dial would wait for ever."""
    monkeypatch.setattr(relay, "is_public", lambda host: True)
    async with net() as those:
        home, asker = await those.peer(), await those.peer()
        (listen,) = home.get_transport_addrs()
        follower = Follower(asker.get_transport_addrs()[0])
        asker.set_stream_handler(DCUTR, follower.handle)
        await those.join(asker, home)
        endpoint = parse_listen(str(listen).split("/p2p/")[0])
        nursery.start_soon(HolePunching(home, [endpoint], lambda: [str(endpoint)]).begin, asker.get_id())
        await until(lambda: direct(home.get_network().get_connections(asker.get_id())), SECONDS)
        assert follower.begun == 1
        nursery.cancel_scope.cancel()


async def test_hole_punching_waits_until_the_node_knows_its_address() -> None:
    known, asked = list[str](), trio.Event()

    def here() -> Sequence[str]:
        asked.set()
        return known

    async with net() as those:
        home, asker = await those.peer(), await those.peer()
        punching = HolePunching(asker, [parse_listen("/ip4/127.0.0.1/tcp/4001")], here)
        asker.set_stream_handler(DCUTR, punching.handle)
        await those.join(asker, home)
        stream = await home.new_stream(asker.get_id(), [DCUTR])
        await send(stream, HolePunch(type=HolePunch.CONNECT))
        await asked.wait()
        await trio.lowlevel.checkpoint()
        known.append("/ip4/11.0.0.1/tcp/4001")
        said = await receive(stream, HolePunch)
        assert said.type == HolePunch.CONNECT
        assert [str(multiaddr.Multiaddr(address)) for address in said.ObsAddrs] == known


def test_hole_punching_dials_only_a_few_public_addresses_that_a_peer_names() -> None:
    named = [
        "/ip4/11.0.0.2/tcp/22",
        "/ip4/192.168.1.1/tcp/4001",
        "/dns4/example.org/tcp/4001",
        "/ip4/11.0.0.2/udp/4001/quic-v1",
    ]
    fine = [f"/ip4/11.0.0.{n}/tcp/4001" for n in range(1, 9)]
    relayed = f"{fine[0]}/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp/p2p-circuit"
    raw = [multiaddr.Multiaddr(text).to_bytes() for text in [*named, relayed, fine[0], *fine]]
    assert dialable([b"junk", b"", *raw]) == fine[:MAX_DIALLED]


MENDED = "py-libp2p has fixed this: see whether its own can be used now (docs/p2p.md)"


async def test_the_librarys_relay_is_still_unusable() -> None:
    """One peer can take all places in other peers' names."""
    async with net() as those:
        limits = TheirLimits(duration=60, data=1 << 20, max_circuit_conns=8, max_reservations=2)
        theirs = CircuitV2Protocol(those.host, limits, allow_hop=True)
        home, attacker = await those.peer(), await those.peer()
        async with background_trio_service(theirs):
            await theirs.event_started.wait()
            for n in (100, 101):
                await those.reserve(attacker, name=make_host(Identity(bytes([n]) * 32)).get_id())
            assert await those.reserve(home) is FULL, MENDED


async def test_the_librarys_autonat_is_still_unusable() -> None:
    """The library's AutoNAT calls any address of a connected peer reachable, even without a listener."""
    async with net() as those:
        AutoNATService(those.host)
        status, address = await AutoNATService(peer := await those.peer()).query_server(
            those.host.get_id(), [multiaddr.Multiaddr("/ip4/127.0.0.1/tcp/1").to_bytes()]
        )
        assert peer.get_network().get_connections() and status == Message.OK and address, MENDED
