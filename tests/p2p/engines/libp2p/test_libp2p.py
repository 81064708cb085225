"""Attacks and failures that only the libp2p engine has to withstand.

Their causes are bad input from the operator and from peers, and faults of the library.
"""

import contextlib
import itertools
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import multiaddr
import pytest
import trio
import trio.testing
from libp2p import new_host
from libp2p.crypto import rsa, secp256k1
from libp2p.crypto.ed25519 import Ed25519PrivateKey
from libp2p.crypto.exceptions import MissingDeserializerError
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.secp256k1 import create_new_key_pair
from libp2p.crypto.serialization import deserialize_public_key
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.kad_dht.utils import maybe_consume_signed_record
from libp2p.network.exceptions import SwarmException
from libp2p.peer.envelope import consume_envelope, seal_record
from libp2p.peer.id import ID
from libp2p.peer.peer_record import PeerRecord
from libp2p.peer.peerinfo import PeerInfo, info_from_p2p_addr
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from multiaddr.resolvers import DNSResolver

from p2p.address import parse_bootstrap, parse_listen
from p2p.admission import inbound_slots
from p2p.engines.libp2p import connections
from p2p.engines.libp2p import engine as libp2p_engine
from p2p.engines.libp2p import network as libp2p_network
from p2p.engines.libp2p.engine import Libp2pEngine
from p2p.engines.libp2p.metering import MAX_LINE_BYTES
from p2p.engines.libp2p.relay import HOP
from p2p.engines.libp2p.rpcs import MAX_BYTES
from p2p.engines.libp2p.stack import MAX_STREAMS, Host, Stack, open_stack
from p2p.engines.libp2p.streams import GREETING, PROTOCOL
from p2p.engines.request_response import SERVED_EACH
from p2p.identity import Identity
from p2p.member import Member
from p2p.netgroup import LOCAL
from p2p.peers.listen import has_route
from p2p.types import Handlers, PeerId, Unanswered, Verdict
from tests.doubles import TIMEOUT_S, until
from tests.p2p.hostile import hostile_peer
from tests.p2p.real import QUIET, SECONDS, TOPIC, heard, real_engine, real_member

pytestmark = pytest.mark.net


def engine(n: int, handlers: Handlers = QUIET, **options: Any) -> Libp2pEngine:
    found = real_engine("libp2p", n, handlers, **options)
    assert isinstance(found, Libp2pEngine)
    return found


async def started(nursery: trio.Nursery, n: int, *bootstrap: str) -> tuple[Member, Libp2pEngine, str]:
    """Start a member; return it, its engine and its address."""
    found = real_member("libp2p", n, bootstrap=bootstrap)
    assert isinstance(found.engine, Libp2pEngine)
    (address,) = await nursery.start(found.run)
    return found, found.engine, address


def stack_of(engine: Libp2pEngine) -> Stack:
    assert engine._stack is not None
    return engine._stack


async def test_the_peer_that_reported_an_address_is_recorded(nursery: trio.Nursery) -> None:
    """b and c know only a; c learns of b from a, through the DHT."""
    a, _, address = await started(nursery, 1)
    b, _, _ = await started(nursery, 2, address)
    await until(b.peers)
    _, c_engine, _ = await started(nursery, 3, address)
    await until(lambda: b.identity.peer_id in c_engine._book.known)
    assert c_engine._book.known[b.identity.peer_id].source == LOCAL
    told = c_engine._book._tellers._buckets
    assert set(told) <= {a.identity.peer_id, c_engine.me} and (
        told or c_engine._book.known[b.identity.peer_id].itself
    )


async def test_a_peer_that_returns_after_a_power_cut_is_heard(nursery: trio.Nursery) -> None:
    """Its old connection still looks alive to the other member, because it was never closed."""
    a, a_engine, address = await started(nursery, 1)
    left_open: list[Any] = []
    for _ in range(2):
        async with trio.open_nursery() as inner:
            b, b_engine, _ = await started(inner, 2, address)
            await heard(a, b)
            await heard(b, a)
            network = stack_of(b_engine).host.get_network()
            left_open += network.get_connections()

            async def leave_open() -> None:
                pass

            network.close_sockets = leave_open
            inner.cancel_scope.cancel()
    assert len(left_open) >= 2 and a_engine.restarts == 0


class _CutOff(trio.abc.Instrument):
    """Cancels `scope` before the n-th step of any task."""

    def __init__(self, steps: int) -> None:
        self.steps, self.scope = steps, trio.CancelScope()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps -= 1
        if self.steps == 0:
            self.scope.cancel()


# If it is cancelled while it binds, the library leaves its socket to the garbage collector.
@pytest.mark.filterwarnings("ignore:.*unclosed <socket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
async def test_a_start_that_is_cancelled_anywhere_releases_its_port() -> None:
    """A node that meets another node with its key leaves during its start, and starts again later."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    listen, whole = parse_listen(f"/ip4/127.0.0.1/tcp/{port}"), False
    for steps in itertools.count(1):
        cut_off = _CutOff(steps)
        trio.lowlevel.add_instrument(cut_off)
        with cut_off.scope:
            async with open_stack(
                Identity(bytes(32)), [TOPIC], lambda *_: Verdict.ACCEPT, [listen], time.time
            ):
                whole = True
        trio.lowlevel.remove_instrument(cut_off)
        with pytest.raises(OSError, match="attempts to connect"):
            await trio.open_tcp_stream("127.0.0.1", port)
        if whole:
            return


async def test_members_hear_each_other_with_a_broken_dht(nursery: trio.Nursery) -> None:
    a, a_engine, address = await started(nursery, 1)
    b, _, _ = await started(nursery, 2, address)

    async def fail() -> None:
        raise RuntimeError("the DHT broke")

    await until(lambda: a_engine._stack and hasattr(a_engine._stack.dht, "_manager"))
    a_engine._stack.dht.manager.run_daemon_task(fail)
    await heard(b, a)
    assert a_engine.restarts == 0


async def garbage_on_every_protocol(stack: Stack, target: Any) -> None:
    protocols = [
        "/ipfs/kad/1.0.0",
        "/ipfs/id/1.0.0",
        "/ipfs/id/push/1.0.0",
        "/ipfs/ping/1.0.0",
        "/meshsub/1.1.0",  # last, because the victim hangs up
    ]
    payloads = [
        b"\x05hello",
        b"\xff" * 40,
        b"\x00",
        bytes(300),
        b"\xff\xff\xff\xff\x7f",
        os.urandom(2000),
        b"\x02\x0a\xff",
        b"\x03\x0a\x01\xff",  # identify with an invalid public key
        b"\x08\x08\x04\x12\x01k\x5a\x01\xff",  # a question to the DHT with a malformed record
    ]
    for protocol, payload in itertools.product(protocols, payloads):
        with trio.move_on_after(2):
            try:
                stream = await stack.host.new_stream(target, [protocol])
                await stream.write(payload)
                await stream.close()
            except Exception:  # the victim may hang up
                continue


async def messages_the_library_raises_on(stack: Stack, target: Any) -> None:
    from libp2p.pubsub.pb import rpc_pb2

    queue = stack.pubsub.peer_queues[target]
    topic = str(TOPIC)
    for message in (
        rpc_pb2.Message(
            data=b"x", topicIDs=[topic], from_id=b"\x00", seqno=b"1", signature=b"s", key=b"\xff\xff"
        ),
        rpc_pb2.Message(data=b"x", topicIDs=[topic], from_id=b"", seqno=b"", signature=b"s", key=b"k"),
        rpc_pb2.Message(
            data=b"x", topicIDs=[topic] * 100, from_id=stack.pubsub.my_id.to_bytes(), signature=bytes(64)
        ),
    ):
        queue.push(rpc_pb2.RPC(publish=[message]))
    control = rpc_pb2.ControlMessage(
        ihave=[rpc_pb2.ControlIHave(topicID=topic, messageIDs=[b"\xff" * 9])],
        graft=[rpc_pb2.ControlGraft(topicID="nowhere")],
        prune=[rpc_pb2.ControlPrune(topicID="nowhere", backoff=2**60)],
    )
    queue.push(rpc_pb2.RPC(control=control))
    queue.push(rpc_pb2.RPC(senderRecord=b"\xff\xff\xff"))


@pytest.mark.parametrize("attack", [garbage_on_every_protocol, messages_the_library_raises_on])
async def test_malformed_bytes_break_no_other_connection_and_do_not_fill_the_log(
    attack: Callable[[Stack, Any], Any], nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    a, a_engine, address = await started(nursery, 1)
    b, b_engine, _ = await started(nursery, 2, address)
    await heard(b, a)
    async with hostile_peer(address) as (stack, target):
        await attack(stack, target)
        await stack.pubsub.publish(str(TOPIC), b"no frame")  # sent last
        await until(lambda: a.rejected or not stack.host.get_network().get_connections(target))
    assert a_engine.restarts == b_engine.restarts == 0
    assert b.identity.peer_id in {peer.id for peer in a.peers()}  # the honest connection was kept
    await heard(b, a)
    await heard(a, b)
    assert not [r for r in caplog.records if r.name.startswith("libp2p.") and r.levelno > logging.INFO]


class Line:
    """A stream on which a peer announces a line of this length, and then sends as fast as possible."""

    def __init__(self, length: int) -> None:
        self.left, self.given = bytes([length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14]), 0

    async def read(self, n: int | None = None) -> bytes:
        size = min(n or 65_536, 65_536)
        data, self.left = (self.left[:size] or b"x" * size), self.left[size:]
        self.given += len(data)
        return data


async def test_a_negotiation_rejects_long_lines() -> None:
    line = Line(2_000_000)
    with pytest.raises(MultiselectCommunicatorError):
        await MultiselectCommunicator(line).read()
    assert line.given <= MAX_LINE_BYTES


async def test_a_message_requested_a_thousand_times_is_not_copied_a_thousand_times(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """A large one once filled the memory: all copies were made before the queue accepted a few of them."""
    from libp2p.pubsub.pb import rpc_pb2

    sent, victim = list[int](), engine(1)
    (address,) = await nursery.start(victim.run)
    router = stack_of(victim).router
    send = router.send_rpc

    def note(peer: Any, rpc: Any, priority: bool = False) -> None:
        sent.append(rpc.ByteSize())
        send(peer, rpc, priority)

    async with hostile_peer(address) as (stack, target):
        await stack.pubsub.publish(str(TOPIC), bytes(40_000))
        await until(lambda: router.mcache.msgs, SECONDS)
        monkeypatch.setattr(router, "send_rpc", note)
        control = rpc_pb2.ControlMessage(
            iwant=[rpc_pb2.ControlIWant(messageIDs=[*router.mcache.msgs] * 1000)]
        )
        stack.pubsub.peer_queues[target].push(rpc_pb2.RPC(control=control))
        await until(lambda: max(sent, default=0) > 40_000, SECONDS)
        assert max(sent) < MAX_BYTES + 1000


async def test_only_the_newest_gossip_stream_of_a_peer_is_kept(nursery: trio.Nursery) -> None:
    a, _, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        me = str(stack.host.get_id())
        await until(lambda: me in {peer.id for peer in a.peers()})
        # As if this stream had broken; the library opens a new one.
        await stack.pubsub.peers[target].reset()
        for n in range(2):
            refused = sum(a.rejected.values())
            await until(lambda: me in {peer.id for peer in a.peers()})
            await until(lambda: stack.pubsub.peers)
            with trio.fail_after(TIMEOUT_S):
                while sum(a.rejected.values()) == refused:  # until its bytes arrive
                    await stack.pubsub.publish(str(TOPIC), b"no frame" + os.urandom(4))
                    await trio.sleep(0.1)
            if n == 0:
                streams = [await stack.host.new_stream(target, ["/meshsub/1.1.0"]) for _ in range(5)]
                for stream in streams[:-1]:
                    with trio.fail_after(TIMEOUT_S), pytest.raises(Exception, match=r".*"):  # a reset
                        while await stream.read(1000):
                            pass
                        raise EOFError


async def test_a_connection_that_ended_frees_its_slot(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """The library would keep the slot, and accept no peer after the 160th connection."""
    monkeypatch.setattr(inbound_slots, "MOST", 3)
    _, a_engine, address = await started(nursery, 1)
    network = stack_of(a_engine).host.get_network()

    def taken() -> tuple[int, int]:
        """Return the numbers of inbound connections and of slots taken."""
        came = [
            connection for connection in network.get_connections() if connection.direction.name == "INBOUND"
        ]
        return len(came), len(network.slots.held)

    async with hostile_peer(address) as (stack, target):
        for _ in range(8):
            await stack.host.disconnect(target)
            await until(lambda: not network.slots.held)
            stack.host.get_network().unblock_peer(target)
            await stack.host.connect(info_from_p2p_addr(multiaddr.Multiaddr(address)))
        await until(lambda: bool(network.get_connections()) and taken() in ((1, 1), (0, 0)))


async def test_peers_that_left_use_no_memory(nursery: trio.Nursery) -> None:
    _, engine, address = await started(nursery, 1)
    network = stack_of(engine).host.get_network()
    for n in (66, 67):
        async with hostile_peer(address, n):
            pass
        await until(lambda: not network.get_connections())
    # Without the engine's fix, the library would have recorded at least the first peer.
    assert not network.auto_connector._recent_disconnects


async def refused(stream: trio.SocketStream, say: bytes = b"") -> bool:
    """Return whether the other end hangs up at once, instead of answering."""
    with trio.move_on_after(SECONDS):
        try:
            await stream.send_all(say)
            return await stream.receive_some(1) == b""
        except trio.BrokenResourceError:
            return True
    return False


async def test_a_crowd_of_inbound_connections_leaves_room_for_dialled_peers(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(inbound_slots, "MOST", 3)
    a, _, first = await started(nursery, 1)
    b, b_engine, address = await started(nursery, 2, first)
    _, endpoint = parse_bootstrap(address)
    crowd = [await trio.open_tcp_stream(endpoint.host, endpoint.port) for _ in range(3)]
    assert await refused(await trio.open_tcp_stream(endpoint.host, endpoint.port))
    await until(b.peers)
    assert b_engine._discovery is not None
    await until(lambda: b_engine._discovery and a.identity.peer_id in b_engine._discovery._outbound.links)
    await heard(a, b)
    assert len(crowd) == 3


async def test_members_meet_through_a_node_with_fewer_slots_than_members(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """Otherwise the first peers of a bootstrap node would keep their slots for ever."""
    machines = itertools.count()
    monkeypatch.setattr(inbound_slots, "MOST", 2)
    monkeypatch.setattr(inbound_slots, "SERVED_S", 0.0)
    monkeypatch.setattr(inbound_slots, "machine_of_host", lambda _: f"machine {next(machines)}")
    _, a_engine, address = await started(nursery, 1)
    found = stack_of(a_engine).host.get_network().slots
    found.reserved = lambda _: False
    for n in (2, 3, 4, 5):
        member, _, _ = await started(nursery, n, address)
        await until(member.peers)
        assert len(found.held) <= 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")
async def test_a_smaller_group_gets_a_slot_when_all_are_taken(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(inbound_slots, "MOST", 4)
    monkeypatch.setattr(inbound_slots, "group_of_host", lambda host: ".".join(host.split(".")[:2]))
    _, a_engine, address = await started(nursery, 1)
    network = stack_of(a_engine).host.get_network()
    _, endpoint = parse_bootstrap(address)

    async def come(source: str) -> trio.SocketStream:
        return await trio.open_tcp_stream(endpoint.host, endpoint.port, local_address=source)

    def taken() -> dict[str, int]:
        return Counter(place.group for place in network.slots.held.values())

    crowd = [await come("127.7.0.1") for _ in range(4)]
    await until(lambda: taken() == {"127.7": 4})
    assert await refused(await come("127.7.0.1"))  # from the same machine
    others = [await come("127.8.0.1")]
    await until(lambda: taken() == {"127.7": 3, "127.8": 1})
    others.append(await come("127.8.0.1"))
    await until(lambda: taken() == {"127.7": 2, "127.8": 2})
    assert await refused(await come("127.8.0.1"))
    assert len(crowd) == 4 and a_engine.restarts == 0


async def test_a_stream_whose_opener_is_cancelled_is_still_returned(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nothing could end the stream. The stream is opened with a dial, as for lookups."""
    _, _, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        network, opener, cut = stack.host.get_network(), trio.lowlevel.current_task(), trio.CancelScope()
        told = network.notify_opened_stream

        async def cut_off(stream: Any) -> None:
            if trio.lowlevel.current_task() is opener:
                cut.cancel()
            await told(stream)

        monkeypatch.setattr(network, "notify_opened_stream", cut_off)
        await network.close_peer(target)
        known = info_from_p2p_addr(multiaddr.Multiaddr(address)).addrs
        stack.host.get_peerstore().add_addrs(target, known, 60)
        with cut:
            stream = await network.new_stream(target)
        assert cut.cancel_called and not cut.cancelled_caught
        await stream.reset()


async def test_silent_streams_do_not_block_other_streams(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """Beyond a limit, streams that a peer opens without sending anything are cut off."""
    # Long enough for a slow machine.
    monkeypatch.setattr("p2p.engines.request_response.MESSAGE_TIMEOUT_S", 10 * SECONDS)
    a_engine = engine(1, Handlers(lambda frame, via: Verdict.ACCEPT, lambda peer, question: question * 1000))
    (address,) = await nursery.start(a_engine.run)
    b_engine = engine(2, bootstrap=[address])
    await nursery.start(b_engine.run)
    await until(b_engine.peers)
    async with hostile_peer(address) as (stack, target):
        me = stack.host.get_id()
        network = stack.host.get_network()
        places = a_engine._responder._open
        for _ in range(SERVED_EACH + 5):
            stream = await network.new_stream(target)
            await stream.write(GREETING + b"\x00\x00\x00\x05")
        await until(lambda: [line.connection for line in places.values()] == [str(me)] * SERVED_EACH)
        host = stack_of(a_engine).host
        host.get_network().connection_config.inbound_stream_protocol_negotiation_timeout = 10 * SECONDS
        silent = [await network.new_stream(target) for _ in range(MAX_STREAMS + 20)]
        await until(
            lambda: (
                sum(not stream.muxed_stream.reset_received for stream in silent) <= MAX_STREAMS - SERVED_EACH
            )
        )
        await until(lambda: host._handled[me] <= MAX_STREAMS)
        assert len(places) == SERVED_EACH
        with trio.fail_after(SECONDS):
            assert await b_engine.request(a_engine.me, b"x", 1000) == b"x" * 1000
    await until(lambda: not a_engine._responder._open)
    assert a_engine.restarts == 0


async def test_giving_up_on_a_silent_peer_is_quick_and_leaves_no_streams(
    nursery: trio.Nursery,
) -> None:
    _, a_engine, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, _):
        asked, given_up, in_time = 0, trio.CancelScope(), trio.CancelScope()

        async def handler(stream: Any) -> None:
            nonlocal asked
            asked += 1
            # Wait until the stream is known to be open; a stream given up before that is removed later.
            await trio.sleep(0.1)
            given_up.cancel()
            in_time.deadline = trio.current_time() + 9
            await trio.sleep_forever()

        stack.host.set_stream_handler(PROTOCOL, handler)
        me = PeerId(str(stack.host.get_id()))
        await until(lambda: me in {peer.id for peer in a_engine.peers()})
        (connection,) = stack_of(a_engine).host.get_network().get_connections(stack.host.get_id())
        before = len(connection.get_streams())
        for n in range(6):  # more questions than may be open at once
            given_up, in_time = trio.CancelScope(), trio.CancelScope(deadline=trio.current_time() + SECONDS)
            with in_time, given_up:
                await a_engine.request(me, b"x", 10)
            assert given_up.cancelled_caught and asked == n + 1
        await until(
            lambda: (
                len(connection.get_streams()) <= before and len(connection.muxed_conn.streams) <= before + 1
            )
        )
        assert connection.muxed_conn.stream_backlog_semaphore.value >= 250


async def test_a_peer_that_reads_nothing_does_not_block_callers(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """Its connection is ended, and a caller that waits for it can be cancelled at once."""
    monkeypatch.setattr(libp2p_network, "WRITE_TIMEOUT_S", 1.0)
    _, a_engine, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, _):
        me = PeerId(str(stack.host.get_id()))
        await until(lambda: me in {peer.id for peer in a_engine.peers()})
        network = stack_of(a_engine).host.get_network()
        (connection,) = network.get_connections(stack.host.get_id())

        async def stuck(data: bytes) -> None:
            await trio.sleep_forever()

        connection.muxed_conn.secured_conn.write = stuck
        with trio.fail_after(libp2p_network.WRITE_TIMEOUT_S), trio.move_on_after(0.2) as scope:
            await a_engine.request(me, b"x", 10)
        assert scope.cancelled_caught
        await until(lambda: connection not in network.get_connections())


async def test_connections_without_proof_of_identity_are_refused(nursery: trio.Nursery) -> None:
    """The test tries plaintext and secio, which the library would accept by default, and arbitrary bytes."""
    _, a_engine, address = await started(nursery, 1)
    _, endpoint = parse_bootstrap(address)
    for protocol in (b"/plaintext/2.0.0", b"/secio/1.0.0", b"/tls/1.0.0"):
        stream = await trio.open_tcp_stream(endpoint.host, endpoint.port)
        for line in (b"/multistream/1.0.0\n", protocol + b"\n"):
            await stream.send_all(bytes([len(line)]) + line)
        answer = b""
        with trio.move_on_after(SECONDS):
            while b"na\n" not in answer and (chunk := await stream.receive_some(1000)):
                answer += chunk
        assert b"na\n" in answer and protocol not in answer
        await stream.aclose()
    assert a_engine.restarts == 0


async def test_a_dns_name_is_dialled_over_ipv6_and_ipv4_in_turn() -> None:
    """If IPv6 does not work, as in many homes, two IPv6 addresses would use up all the time for a name."""

    class Resolver(trio.abc.HostnameResolver):
        async def getaddrinfo(self, host: Any, port: Any, *_: Any) -> Any:
            them = [
                (socket.AF_INET6, "2001:db8::1"),
                (socket.AF_INET6, "2001:db8::2"),
                (socket.AF_INET, "192.0.2.1"),
            ]
            return [(family, socket.SOCK_STREAM, 6, "", (ip, port)) for family, ip in them]

        async def getnameinfo(self, *_: Any) -> Any:
            raise NotImplementedError

    trio.socket.set_custom_hostname_resolver(Resolver())
    found = await connections._resolve("/dns/node.example/tcp/4001")
    assert found == [f"/{ip}/tcp/4001" for ip in ("ip6/2001:db8::1", "ip4/192.0.2.1", "ip6/2001:db8::2")]


@pytest.mark.skipif(not has_route(parse_listen("/ip6/::1/tcp/9")), reason="needs IPv6")
async def test_the_remote_address_of_an_ipv6_connection_is_known(nursery: trio.Nursery) -> None:
    """Bans, limits, network groups and dial-backs need the address, and the library only handles IPv4."""
    listen = ["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"]
    with trio.fail_after(SECONDS):
        first = real_member("libp2p", 1, listen=listen)
        four, six = await nursery.start(first.run)
        assert six.startswith("/ip6/::1/tcp/") and six.split("/")[4] == four.split("/")[4]
        second = real_member("libp2p", 2, listen=listen, bootstrap=[six])
        await nursery.start(second.run)
        await until(lambda: first.peers() and second.peers())
        assert [peer.address for peer in second.peers()] == [six.split("/p2p/")[0]]
        assert [peer.address.startswith("/ip6/::1/tcp/") for peer in first.peers()] == [True]
        third = real_member("libp2p", 3, listen=["/ip6/::/tcp/0"])
        listens = (await nursery.start(third.run))[0].split("/")
        fourth = real_member("libp2p", 4, bootstrap=["/".join(["", "ip4", "127.0.0.1", *listens[3:]])])
        await nursery.start(fourth.run)
        await until(third.peers)
        assert [peer.address.startswith("/ip4/127.0.0.1/tcp/") for peer in third.peers()] == [True]
        nursery.cancel_scope.cancel()


async def test_a_peer_with_a_key_of_another_type_is_rejected(nursery: trio.Nursery) -> None:
    """No member has such a key, since a member's id is an Ed25519 key."""
    _, a_engine, address = await started(nursery, 1)
    stranger = new_host(key_pair=create_new_key_pair())
    async with stranger.run(listen_addrs=[]):
        with contextlib.suppress(Exception):  # the library may report a connection until it reads
            await stranger.connect(info_from_p2p_addr(multiaddr.Multiaddr(address)))
        await until(lambda: not stranger.get_network().get_connections())
    assert not stack_of(a_engine).host.get_network().get_connections() and a_engine.restarts == 0


@pytest.mark.parametrize("kind", [rsa, secp256k1])
def test_signatures_by_keys_of_another_type_are_not_verified(kind: Any) -> None:
    """Verification with an RSA key whose exponent is as long as the key takes 5 ms, in each message."""
    keys = kind.create_new_key_pair()
    record = PeerRecord(ID.from_pubkey(keys.public_key), [], seq=1)
    with pytest.raises(MissingDeserializerError):
        consume_envelope(seal_record(record, keys.private_key).marshal_envelope(), "libp2p-peer-record")
    with pytest.raises(MissingDeserializerError):
        deserialize_public_key(keys.public_key.serialize())


async def test_a_peer_that_finds_us_during_the_start_is_answered(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """A peer is told only once that this node relays, so the protocols must be known from the start."""
    spoken: list[Any] = []

    @contextlib.asynccontextmanager
    async def slow(*arguments: Any) -> AsyncIterator[Stack]:
        async with open_stack(*arguments) as stack:
            (address,) = stack.host.get_transport_addrs()
            async with hostile_peer(f"{address}/p2p/{stack.host.get_id()}", meet=False) as (theirs, us):
                for protocol in (PROTOCOL, HOP):
                    with contextlib.suppress(Exception):  # the protocol is not known yet
                        await theirs.host.new_stream(us, [protocol])
                        spoken.append(protocol)
            yield stack

    monkeypatch.setattr(libp2p_engine, "open_stack", slow)
    await nursery.start(engine(1).run)
    assert spoken == [PROTOCOL, HOP]


async def test_no_identify_task_outlives_the_engine(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library runs identify as a system task of trio, which waits for ten seconds."""
    _, silent, address = await started(nursery, 1)
    asked, ended, identify = trio.Event(), trio.Event(), Host._identify_task_entry

    async def say_nothing(_: Any) -> None:
        asked.set()
        await trio.sleep_forever()

    async def identified(host: Host, peer: Any, reason: str) -> None:
        try:
            await identify(host, peer, reason)
        finally:
            if host is not stack_of(silent).host:
                ended.set()

    stack_of(silent).host.set_stream_handler(IDENTIFY, say_nothing)
    async with hostile_peer(address, meet=False) as (stack, target):
        await stack.host.disconnect(target)
        monkeypatch.setattr(Host, "_identify_task_entry", identified)
        await stack.host.connect(info_from_p2p_addr(multiaddr.Multiaddr(address)))
        await asked.wait()
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert ended.is_set()


async def test_a_question_asked_while_the_engine_ends_is_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment the engine's tasks have ended but the engine has not, so no task can be started."""
    ended = trio.Event()

    class Requests:
        def __init__(self, network: Any, reach: Any, tasks: trio.Nursery) -> None:
            tasks.start_soon(self.last_task)

        async def ask(self, peer: PeerId, question: bytes, limit: int) -> bytes:
            return b"asked"

        async def last_task(self) -> None:
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.testing.wait_all_tasks_blocked()
                    with pytest.raises(Unanswered):
                        await a.request(a.me, b"", 1)
                ended.set()

    monkeypatch.setattr(libp2p_engine, "Libp2pRequests", Requests)
    a = engine(1)
    async with trio.open_nursery() as life:
        await life.start(a.run)
        life.cancel_scope.cancel()
    assert ended.is_set()


async def test_a_restart_within_a_second_reuses_no_message_id() -> None:
    listen, numbers = [parse_listen("/ip4/127.0.0.1/tcp/0")], list[int]()
    now = iter((1_700_000_000.0, 1_700_000_000.1)).__next__  # read once at each start
    for _ in range(2):
        async with open_stack(
            Identity(bytes(32)), [TOPIC], lambda frame, via, topics: Verdict.ACCEPT, listen, now
        ) as stack:
            numbers += [int.from_bytes(stack.pubsub._next_seqno(), "big") for _ in range(1000)]
    assert numbers == sorted(set(numbers))


async def test_the_librarys_errors_appear_in_the_engines_log(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("libp2p.host").warning("something of note")
    logging.getLogger("libp2p.host").info("chatter")
    assert "something of note" in caplog.text and "chatter" not in caplog.text
    caplog.clear()

    class Gone:
        async def write(self, _: str) -> None:
            raise MultiselectCommunicatorError("the peer is gone")

    with pytest.raises(MultiselectClientError):
        await MultiselectClient().handshake(Gone())
    assert not caplog.records


async def test_a_dial_that_finds_another_key_is_not_logged_as_an_error(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, address = await started(nursery, 1)
    _, b, _ = await started(nursery, 2)
    host, elsewhere = stack_of(b).host, address.partition("/p2p/")[0]
    target = f"{elsewhere}/p2p/{Identity(b'k' * 32).peer_id}"
    with pytest.raises(SwarmException):
        await host.connect(info_from_p2p_addr(multiaddr.Multiaddr(target)))
    assert not maybe_consume_signed_record(Message(senderRecord=b"from before its last start"), host)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


class Forger(Ed25519PrivateKey):  # type: ignore[misc]  # the library has no types
    def sign(self, data: bytes) -> bytes:
        return b"no signature"


async def test_a_peer_that_forges_its_proof_does_not_fill_the_log(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    _, engine, address = await started(nursery, 1)
    key = Forger.new(bytes(32))
    forger = new_host(key_pair=KeyPair(key, key.get_public_key()))
    ours = stack_of(engine).host
    async with forger.run(listen_addrs=[multiaddr.Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        caplog.clear()
        with pytest.raises(SwarmException):
            await forger.connect(info_from_p2p_addr(multiaddr.Multiaddr(address)))
        with pytest.raises(SwarmException):
            await ours.connect(PeerInfo(forger.get_id(), forger.get_addrs()))
    assert not [r for r in caplog.records if r.name.startswith("libp2p.") and r.levelno > logging.INFO]


@pytest.mark.parametrize("where", ["/ip4/192.0.2.1/udp/4001/quic-v1", "/dnsaddr/nowhere.example/tcp/4001"])
async def test_addresses_that_cannot_be_dialled_do_not_fill_the_log(
    where: str, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library dials the addresses in DHT answers, even without a transport or with unknown names."""

    async def nowhere(*_: Any) -> list[multiaddr.Multiaddr]:
        return []

    monkeypatch.setattr(DNSResolver, "resolve", nowhere)
    _, engine, _ = await started(nursery, 1)
    host, named = stack_of(engine).host, ID.from_string(Identity(b"k" * 32).peer_id)
    host.get_peerstore().add_addrs(named, [multiaddr.Multiaddr(where)], 60)
    with pytest.raises(SwarmException):
        await host.get_network().new_stream(named)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_connection_that_is_cut_off_at_its_start_is_not_logged_as_an_error(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        network = stack.host.get_network()
        (begun,) = network.connections.pop(target)
        with trio.CancelScope() as cut:
            cut.cancel()
            await network.add_conn(begun.muxed_conn)
    assert cut.cancelled_caught
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
