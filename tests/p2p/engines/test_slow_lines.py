"""Connections of the libp2p engine if one of the nodes has a rate limit.

They are slow, but no node is cut off.

The hosts and the relay are real. They use memory instead of sockets, so that the clock can jump.
"""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.custom_types import TProtocol
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as PeerMessage
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode, to_proto_status
from multiaddr import Multiaddr

from p2p.engines.libp2p.connections import PING_AFTER_S
from p2p.engines.libp2p.relay import HOP, STOP, Relay, RelayLimits, receive, send
from p2p.engines.libp2p.stack import make_host
from p2p.engines.libp2p.streams import Circuit, CountedSocket
from p2p.engines.traffic import Traffic
from p2p.identity import Identity
from p2p.rate_limit import MAX_PIECE
from tests.doubles import until
from tests.p2p.real import SECONDS

SINK = TProtocol("/test/sink/1")
SLOW = 10_000.0  # bytes a second; the lowest limit that a configuration may set
SIZE = 400_000  # bytes: more than a stream's window
NAMES = ("relay", "home", "one", "two")


class Wire:
    """A replacement in memory for the library's sockets."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(n))

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def close(self) -> None:
        await trio.aclose_forcefully(self._stream)

    def get_remote_address(self) -> tuple[str, int]:
        return "127.0.0.1", 4001


class Swarm:
    """Hosts that are connected to a relay, at which the host "home" has a reservation.

    limits: rate limits by host name. relay: the relay's limits.
    """

    def __init__(
        self, stack: AsyncExitStack, nursery: trio.Nursery, relay: RelayLimits, limits: dict[str, Traffic]
    ) -> None:
        self._stack, self._nursery, self._relay = stack, nursery, relay
        self.hosts = {
            name: make_host(Identity(bytes([n + 1]) * 32), limits.get(name)) for n, name in enumerate(NAMES)
        }
        self._limits = limits
        self.came: dict[str, int] = dict.fromkeys(NAMES, 0)  # bytes that arrived, by sender

    def id(self, name: str) -> Any:
        return self.hosts[name].get_id()

    async def begin(self) -> None:
        for host in self.hosts.values():
            await self._stack.enter_async_context(host.run(listen_addrs=[]))
            self._stack.push_async_callback(host.get_network().close_sockets)
            host.set_stream_handler(SINK, self._sink)
        relay = self.hosts["relay"]
        relay.set_stream_handler(HOP, Relay(relay, lambda peer: False, time.time, self._relay).handle)
        self.hosts["home"].set_stream_handler(STOP, self._come_in)
        for name in NAMES[1:]:
            ours, theirs = map(Wire, trio.testing.memory_stream_pair())
            self._nursery.start_soon(
                relay.get_network()._handle_inbound_connection, theirs, Multiaddr("/ip4/127.0.0.1/tcp/4001")
            )
            socket = CountedSocket(ours, self._limits.get(name) or Traffic())
            await (
                self.hosts[name]
                .get_network()
                .upgrade_outbound_raw_conn(RawConnection(socket, True), self.id("relay"))
            )
        await self._hop("home", HopMessage(type=HopMessage.RESERVE))

    async def _hop(self, name: str, message: HopMessage) -> Any:
        stream = await self.hosts[name].new_stream(self.id("relay"), [HOP])
        await send(stream, message)
        assert (await receive(stream, HopMessage)).status == StatusCode.OK
        return stream

    async def _come_in(self, stream: Any) -> None:
        await receive(stream, StopMessage)
        await send(stream, StopMessage(type=StopMessage.STATUS, status=to_proto_status(StatusCode.OK)))
        through = Circuit(stream, False, self.id("relay"))
        muxed = (
            await self.hosts["home"]
            .get_network()
            .upgrade_inbound_raw_conn(through, Multiaddr(through.address))
        )
        await muxed.event_closed.wait()

    async def _sink(self, stream: Any) -> None:
        sender = next(name for name in NAMES if self.id(name) == stream.muxed_conn.peer_id)
        while data := await stream.read(1 << 16):
            self.came[sender] += len(data)

    async def reach_home(self, name: str) -> Any:
        """Connect a host to home through the relay; return the stream that carries the circuit."""
        stream = await self._hop(
            name, HopMessage(type=HopMessage.CONNECT, peer=PeerMessage(id=self.id("home").to_bytes()))
        )
        await (
            self.hosts[name]
            .get_network()
            .upgrade_outbound_raw_conn(Circuit(stream, True, self.id("relay")), self.id("home"))
        )
        return stream

    async def give(self, name: str, to: str, size: int = SIZE) -> None:
        await (await self.hosts[name].new_stream(self.id(to), [SINK])).write(bytes(size))


@asynccontextmanager
async def swarm(others_may: RelayLimits | None = None, **limits: Traffic) -> AsyncIterator[Swarm]:
    async with trio.open_nursery() as nursery:
        async with AsyncExitStack() as stack:
            found = Swarm(stack, nursery, others_may or RelayLimits(), limits)
            await found.begin()
            yield found
        nursery.cancel_scope.cancel()


TO_HOME = ("one", "home")


@pytest.mark.parametrize(
    ("slow", "limit", "besides"),
    [
        ("one", {"up": SLOW}, [("one", "relay")]),
        ("relay", {"up": SLOW}, [TO_HOME, ("two", "home")]),
        ("home", {"down": SLOW}, []),
    ],
)
async def test_a_rate_limit_does_not_end_a_circuit(
    slow: str, limit: dict[str, float], besides: list[tuple[str, str]], autojump_clock: Any
) -> None:
    """One of the ends or the relay is slow, and also has other bytes to send."""
    async with swarm(**{slow: Traffic(**limit)}) as those:
        for name in ("one", "two"):
            await those.reach_home(name)
        begun, size = trio.current_time(), SIZE * (1 + len(besides))
        async with trio.open_nursery() as giving:
            for pair in [TO_HOME, *besides]:
                giving.start_soon(those.give, *pair)
        await until(lambda: sum(those.came.values()) == size, size / SLOW, every=1.0)
        assert trio.current_time() - begun >= size / SLOW - 10


async def test_a_circuit_is_not_idle_while_its_bytes_wait_for_the_relays_rate(autojump_clock: Any) -> None:
    """A circuit is idle only if both ends are silent."""
    limits = RelayLimits(size=SIZE, rate=SLOW, idle=5.0)
    async with swarm(limits) as those:
        for name in ("one", "two"):
            await those.reach_home(name)
        begun = trio.current_time()
        await those.give("one", "home", SIZE - 10_000)  # the whole burst
        await those.give("two", "home", 100_000)
        await until(lambda: those.came["two"] == 100_000, 20.0, every=0.1)
        assert trio.current_time() - begun > limits.idle
        await until(
            lambda: not those.hosts["home"].get_network().get_connections(those.id("two")), 2 * limits.idle
        )


async def test_circuits_share_a_rate_and_a_waiting_circuit_still_ends_in_time(
    autojump_clock: Any,
) -> None:
    limits = RelayLimits(size=SIZE, rate=1.0, seconds=100.0)
    async with swarm(limits) as those:
        await those.reach_home("one")
        await those.reach_home("two")
        begun = trio.current_time()
        await those.give("one", "home", SIZE - 10_000)  # the whole burst
        await until(lambda: those.came["one"] == SIZE - 10_000)
        await those.give("two", "home", 100_000)
        home = those.hosts["home"].get_network()
        await trio.sleep(limits.seconds - 2)
        # The rest of the burst was used, and one piece went into debt.
        assert home.get_connections(those.id("two")) and those.came["two"] <= 10_000 + MAX_PIECE
        await until(lambda: not home.get_connections(those.id("two")), SECONDS, every=0.1)
        assert trio.current_time() - begun <= limits.seconds + 1


async def test_a_connection_that_waits_to_be_read_is_not_treated_as_silent(
    autojump_clock: Any, nursery: trio.Nursery
) -> None:
    """Otherwise a node would drop a peer that it reads slowly because of its own limit."""
    ours, theirs = map(Wire, trio.testing.memory_stream_pair())
    socket = CountedSocket(ours, Traffic(down=SLOW))
    await theirs.write(bytes(SIZE))
    nursery.start_soon(socket.read, SIZE)
    await trio.sleep(SIZE / SLOW - 2)
    assert socket.heard_at >= trio.current_time() > PING_AFTER_S
    await trio.sleep(2)
    assert socket.heard_at <= trio.current_time()
