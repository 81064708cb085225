"""What only the libp2p engine has to withstand: bad input from the operator, from peers, and from its own library."""

import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import multiaddr
import psutil
import pytest
import trio
from libp2p.peer.peerinfo import PeerInfo

from p2p.address import parse_bootstrap, parse_listen
from p2p.admission.host_bans import PEERS
from p2p.engines.common import discovery
from p2p.engines.common.request_response import SERVED_EACH
from p2p.engines.libp2p import connections
from p2p.engines.libp2p import network as libp2p_network
from p2p.engines.libp2p.engine import Libp2pEngine
from p2p.engines.libp2p.network import Network
from p2p.engines.libp2p.stack import STREAMS, Stack, open_stack
from p2p.engines.libp2p.streams import GREETING, PROTOCOL
from p2p.identity import Identity
from p2p.member import Member
from p2p.netgroup import LOCAL
from p2p.peers import outbound, shard_peers
from p2p.types import Handlers, PeerId, Verdict
from swarmd.testing import until
from tests.p2p.hostile import hostile_stack
from tests.p2p.real import QUIET, SECONDS, TOPIC, heard, real_engine, real_member

pytestmark = [pytest.mark.trio, pytest.mark.net]


MULTISTREAM = b"\x13/multistream/1.0.0\n"  # the first bytes of an answer to a connection that is let in


def engine(n: int, handlers: Handlers = QUIET, **options: Any) -> Libp2pEngine:
    found = real_engine("libp2p", n, handlers, **options)
    assert isinstance(found, Libp2pEngine)
    return found


def member(n: int, **options: Any) -> tuple[Member, Libp2pEngine]:
    found = real_member("libp2p", n, **options)
    assert isinstance(found.engine, Libp2pEngine)
    return found, found.engine


async def test_who_told_of_a_peer_is_noted() -> None:
    """b and c know only a; c hears of b from a, by the DHT."""
    a, _ = member(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a.run)
        b, _ = member(2, bootstrap=addresses[:1])
        c, c_engine = member(3, bootstrap=addresses[:1])
        await nursery.start(b.run)
        await until(b.peers)
        await nursery.start(c.run)
        await until(lambda: b.identity.peer_id in c_engine._book)
        assert c_engine._book[b.identity.peer_id].source == LOCAL
        told = c_engine._book._tellers._buckets
        assert set(told) <= {a.identity.peer_id, c.identity.peer_id} and (told or c_engine._book[b.identity.peer_id].itself)
        nursery.cancel_scope.cancel()


async def test_a_peer_that_lost_its_power_is_heard_when_it_is_back() -> None:
    """Its old connection still looks alive to us: nobody closed it."""
    a, a_engine = member(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a.run)
        left_open: list[Any] = []
        for _ in range(2):
            b, b_engine = member(2, bootstrap=addresses[:1])
            async with trio.open_nursery() as inner:
                await inner.start(b.run)
                await heard(a, b)
                await heard(b, a)
                assert b_engine._stack is not None
                network = b_engine._stack.host.get_network()
                left_open += network.get_connections()

                async def leave_open() -> None:
                    pass

                network.close_sockets = leave_open
                inner.cancel_scope.cancel()
        assert len(left_open) >= 2 and a_engine.restarts == 0
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("service", ["router", "pubsub", "network"])
async def test_it_starts_again_when_the_library_breaks(service: str, caplog: pytest.LogCaptureFixture) -> None:
    """Same identity, same port; the peers find it again."""
    a, a_engine = member(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a.run)
        b, _ = member(2, bootstrap=addresses[:1])
        await nursery.start(b.run)
        await heard(b, a)
        assert a_engine._stack is not None
        broken = {"router": a_engine._stack.router, "pubsub": a_engine._stack.pubsub, "network": a_engine._stack.host.get_network()}[
            service
        ]

        async def fail() -> None:
            raise RuntimeError("the library broke")

        broken.manager.run_daemon_task(fail)
        await until(lambda: a_engine.restarts == 1 and a.addresses())
        assert a.addresses() == addresses and "the library broke" in caplog.text
        port, mine = int(addresses[0].split("/")[4]), psutil.Process().net_connections()
        assert sum(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in mine) == 1
        await heard(b, a)
        await heard(a, b)
        nursery.cancel_scope.cancel()


async def test_a_broken_dht_stops_nothing() -> None:
    a, a_engine = member(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a.run)
        b, _ = member(2, bootstrap=addresses[:1])
        await nursery.start(b.run)
        assert a_engine._stack is not None

        async def fail() -> None:
            raise RuntimeError("the DHT broke")

        await until(lambda: a_engine._stack and hasattr(a_engine._stack.dht, "_manager"))
        a_engine._stack.dht.manager.run_daemon_task(fail)
        await heard(b, a)
        assert a_engine.restarts == 0
        nursery.cancel_scope.cancel()


async def garbage_on_every_protocol(stack: Stack, target: Any) -> None:
    protocols = ["/meshsub/1.1.0", "/ipfs/kad/1.0.0", "/ipfs/id/1.0.0", "/ipfs/id/push/1.0.0", "/ipfs/ping/1.0.0"]
    payloads = [b"\x05hello", b"\xff" * 40, b"\x00", bytes(300), b"\xff\xff\xff\xff\x7f", os.urandom(2000), b"\x02\x0a\xff"]
    for protocol, payload in itertools.product(protocols, payloads):
        with trio.move_on_after(2):
            try:
                stream = await stack.host.new_stream(target, [protocol])
                await stream.write(payload)
                await stream.close()
            except Exception:  # the victim may hang up: that is its right
                continue


async def messages_the_library_raises_on(stack: Stack, target: Any) -> None:
    from libp2p.pubsub.pb import rpc_pb2

    queue = stack.pubsub.peer_queues[target]
    topic = str(TOPIC)
    for message in (
        rpc_pb2.Message(data=b"x", topicIDs=[topic], from_id=b"\x00", seqno=b"1", signature=b"s", key=b"\xff\xff"),
        rpc_pb2.Message(data=b"x", topicIDs=[topic], from_id=b"", seqno=b"", signature=b"s", key=b"k"),
        rpc_pb2.Message(data=b"x", topicIDs=[topic] * 100, from_id=stack.pubsub.my_id.to_bytes(), signature=bytes(64)),
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
async def test_what_a_peer_sends_breaks_nothing(attack: Callable[[Stack, Any], Any]) -> None:
    (a, a_engine), (b, b_engine) = member(1), member(2)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a.run)
        b, b_engine = member(2, bootstrap=addresses[:1])
        await nursery.start(b.run)
        await heard(b, a)

        async def attack_and_wait(stack: Stack, target: Any) -> None:
            await attack(stack, target)
            await stack.pubsub.publish(str(TOPIC), b"no frame")  # comes last
            await until(lambda: a.rejected or not stack.host.get_network().get_connections(target))

        await hostile_stack(TOPIC, addresses, attack_and_wait)
        assert a_engine.restarts == b_engine.restarts == 0
        assert b.identity.peer_id in {peer.id for peer in a.peers()}  # the honest connection stood
        await heard(b, a)
        await heard(a, b)
        nursery.cancel_scope.cancel()


async def test_a_stream_that_breaks_does_not_unsubscribe_the_peer() -> None:
    a, _ = member(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a.run)

        async def break_one(stack: Stack, target: Any) -> None:
            me = str(stack.host.get_id())
            await until(lambda: me in {peer.id for peer in a.peers()})
            for _ in range(3):
                stream = await stack.host.new_stream(target, ["/meshsub/1.1.0"])
                await stream.write(b"\xff\xff\xff\x7f")  # announces far too much
                with trio.move_on_after(5), contextlib.suppress(Exception):
                    while await stream.read(1000):  # until it is reset
                        pass
                assert me in {peer.id for peer in a.peers()}

        await hostile_stack(TOPIC, addresses, break_one)
        nursery.cancel_scope.cancel()


async def test_a_connection_that_ended_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would keep it for good, and let nobody in after the 160th."""
    monkeypatch.setattr(Network, "max_inbound", 3)
    a, a_engine = member(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a.run)

        async def come_and_go(stack: Stack, target: Any) -> None:
            for _ in range(8):
                await stack.host.disconnect(target)
                await until(lambda: not network.inbound)
                stack.host.get_network().unblock_peer(target)
                await stack.host.connect(PeerInfo(target, [multiaddr.Multiaddr(addresses[0].split("/p2p/")[0])]))
            await until(lambda: len(network.get_connections()) == sum(map(len, network.inbound.values())) == 1)

        assert a_engine._stack is not None
        network = a_engine._stack.host.get_network()
        await hostile_stack(TOPIC, addresses, come_and_go)
        nursery.cancel_scope.cancel()


async def refused(stream: trio.SocketStream, say: bytes = b"") -> bool:
    """Whether the other end hangs up at once, instead of answering."""
    with trio.move_on_after(5):
        try:
            await stream.send_all(say)
            return await stream.receive_some(1) == b""
        except trio.BrokenResourceError:
            return True
    return False


async def test_a_crowd_that_comes_in_leaves_room_for_those_we_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Network, "max_inbound", 3)
    a, _ = member(1)
    async with trio.open_nursery() as nursery:
        bootstrap = await nursery.start(a.run)
        b, b_engine = member(2, bootstrap=bootstrap[:1])
        addresses = await nursery.start(b.run)
        _, endpoint = parse_bootstrap(addresses[0])
        crowd = [await trio.open_tcp_stream(endpoint.host, endpoint.port) for _ in range(3)]
        assert await refused(await trio.open_tcp_stream(endpoint.host, endpoint.port))
        await until(b.peers)
        assert b_engine._discovery is not None
        await until(lambda: b_engine._discovery and a.identity.peer_id in b_engine._discovery._outbound.links)
        await heard(a, b)
        assert len(crowd) == 3
        nursery.cancel_scope.cancel()


@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")
async def test_where_all_places_are_taken_a_smaller_group_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Network, "max_inbound", 4)
    monkeypatch.setattr(libp2p_network, "group_of_host", lambda host: ".".join(host.split(".")[:2]))
    a, a_engine = member(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a.run)
        assert a_engine._stack is not None
        network = a_engine._stack.host.get_network()
        _, endpoint = parse_bootstrap(addresses[0])

        async def come(source: str) -> trio.SocketStream:
            return await trio.open_tcp_stream(endpoint.host, endpoint.port, local_address=source)

        def taken() -> dict[str, int]:
            return {group: len(those) for group, those in network.inbound.items()}

        crowd = [await come("127.7.0.1") for _ in range(4)]
        await until(lambda: taken() == {"127.7": 4})
        assert await refused(await come("127.7.0.2"))  # of the same group
        others = [await come("127.8.0.1")]
        await until(lambda: taken() == {"127.7": 3, "127.8": 1})
        others.append(await come("127.8.0.1"))
        await until(lambda: taken() == {"127.7": 2, "127.8": 2})
        assert await refused(await come("127.8.0.1"))
        assert len(crowd) == 4 and a_engine.restarts == 0
        nursery.cancel_scope.cancel()


@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")
async def test_a_machine_that_sends_one_hostile_peer_after_another_is_not_let_in() -> None:
    """Not as somebody new either; those who are here already from the same address stay, and another address is let in."""
    a, a_engine = member(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a.run)
        _, endpoint = parse_bootstrap(addresses[0])

        async def greeted(source: str) -> bool:
            caller = await trio.open_tcp_stream(endpoint.host, endpoint.port, local_address=source)
            async with caller:
                if not await refused(caller, MULTISTREAM):
                    return True
            return False

        async def leave(stack: Stack, target: Any) -> None:
            await stack.host.disconnect(target)

        async def offend(stack: Stack, target: Any) -> None:
            (connection, *_) = stack.host.get_network().get_connections(target)
            a_engine.shut_out(PeerId(str(stack.host.get_id())), 60)
            await until(lambda: connection not in stack.host.get_network().get_connections(target))  # its DHT may dial again

        b, _ = member(2, bootstrap=addresses[:1])
        await nursery.start(b.run)
        await until(b.peers)
        for n in range(int(PEERS) + 1):  # others come and go: they do not count
            await hostile_stack(TOPIC, addresses, leave, 40 + n)
        for n in range(int(PEERS) + 1):
            assert await greeted("127.0.0.1")
            await hostile_stack(TOPIC, addresses, offend, 60 + n)
            await until(lambda: a_engine._stack and len(a_engine._stack.host.get_network().get_connections()) == 1)
        assert not await greeted("127.0.0.1") and await greeted("127.0.0.2")
        await heard(a, b)
        assert a_engine.restarts == 0
        nursery.cancel_scope.cancel()


async def test_who_asks_and_says_nothing_takes_no_place_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it opens without a word is cut off beyond a limit."""
    monkeypatch.setattr("p2p.engines.common.request_response.PATIENCE", 10 * SECONDS)  # for a slow machine
    a_engine = engine(1, Handlers(lambda frame, via, shard: Verdict.ACCEPT, lambda peer, question: question * 1000))
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a_engine.run)
        b_engine = engine(2, bootstrap=addresses[:1])
        await nursery.start(b_engine.run)
        await until(b_engine.peers)

        async def loiter(stack: Stack, target: Any) -> None:
            me = stack.host.get_id()
            network = stack.host.get_network()
            places = a_engine._responder._open
            for _ in range(SERVED_EACH + 5):
                stream = await network.new_stream(target)
                await stream.write(GREETING + b"\x00\x00\x00\x05")
            await until(lambda: places[PeerId(str(me))] == SERVED_EACH)
            assert a_engine._stack is not None
            handled = a_engine._stack.host._handled
            a_engine._stack.host.get_network().connection_config.inbound_stream_protocol_negotiation_timeout = 10 * SECONDS
            silent = [await network.new_stream(target) for _ in range(STREAMS + 20)]
            await until(lambda: sum(not stream.muxed_stream.reset_received for stream in silent) <= STREAMS - SERVED_EACH)
            await until(lambda: handled[me] <= STREAMS)
            assert places.total() == SERVED_EACH
            with trio.fail_after(SECONDS):
                assert await b_engine.request(a_engine.me, b"x", 1000) == b"x" * 1000

        await hostile_stack(TOPIC, addresses, loiter)
        await until(lambda: not a_engine._responder._open)
        assert a_engine.restarts == 0
        nursery.cancel_scope.cancel()


async def test_giving_up_on_one_who_does_not_answer_takes_no_time_and_leaves_nothing() -> None:
    a_engine = engine(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a_engine.run)

        async def never_answer(stack: Stack, target: Any) -> None:
            asked = 0

            async def handler(stream: Any) -> None:
                nonlocal asked
                asked += 1
                await trio.sleep_forever()

            stack.host.set_stream_handler(PROTOCOL, handler)
            me = PeerId(str(stack.host.get_id()))
            await until(lambda: me in {peer.id for peer in a_engine.peers()})
            (connection,) = a_engine._stack.host.get_network().get_connections(stack.host.get_id())  # type: ignore[union-attr]
            before = len(connection.get_streams())
            for _ in range(6):  # more than may be asked at once
                with trio.fail_after(4), trio.move_on_after(0.1) as scope:
                    await a_engine.request(me, b"x", 10)
                assert scope.cancelled_caught
            await until(lambda: asked == 6)
            await until(lambda: len(connection.get_streams()) <= before and len(connection.muxed_conn.streams) <= before + 1)
            assert connection.muxed_conn.stream_backlog_semaphore.value >= 250

        await hostile_stack(TOPIC, addresses, never_answer)
        nursery.cancel_scope.cancel()


async def test_a_peer_that_takes_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is ended; a caller that waits for it may leave at once."""
    monkeypatch.setattr(libp2p_network, "WRITE_TIMEOUT", 2.0)
    a_engine = engine(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a_engine.run)

        async def take_nothing(stack: Stack, target: Any) -> None:
            me = PeerId(str(stack.host.get_id()))
            await until(lambda: me in {peer.id for peer in a_engine.peers()})
            assert a_engine._stack is not None
            network = a_engine._stack.host.get_network()
            (connection,) = network.get_connections(stack.host.get_id())

            async def stuck(data: bytes) -> None:
                await trio.sleep_forever()

            connection.muxed_conn.secured_conn.write = stuck
            with trio.fail_after(libp2p_network.WRITE_TIMEOUT), trio.move_on_after(0.2) as scope:
                await a_engine.request(me, b"x", 10)
            assert scope.cancelled_caught
            await until(lambda: connection not in network.get_connections())

        await hostile_stack(TOPIC, addresses, take_nothing)
        nursery.cancel_scope.cancel()


async def test_members_of_a_shard_find_each_other_in_a_large_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large enough, that is, for its members not to know each other: here that is the case at one connection each."""
    monkeypatch.setattr(outbound, "TARGET", 1)
    monkeypatch.setattr(outbound, "GROUPS", 1)
    monkeypatch.setattr(shard_peers, "SETTLED", 0.2)
    monkeypatch.setattr(shard_peers, "LOOK_FIRST", 0.5)
    monkeypatch.setattr(discovery, "TICK", 0.1)
    monkeypatch.setattr(connections, "TICK", 0.1)
    real = Network.new_stream

    async def no_dial(self: Network, peer: Any) -> Any:  # or the library's DHT, which asks everybody, would connect us to all of them
        if not self.get_connections(peer):
            raise RuntimeError("not connected")
        return await real(self, peer)

    monkeypatch.setattr(Network, "new_stream", no_dial)
    hub, _ = member(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(hub.run)
        ends = [member(n, bootstrap=addresses[:1])[1] for n in (2, 3, 4)]
        for end in ends:
            await nursery.start(end.run)
        ends[0].subscribe({5})
        ends[1].subscribe({5})
        await until(lambda: ends[1].me in {peer.id for peer in ends[0].peers()})
        assert ends[2].me not in {peer.id for end in ends[:2] for peer in end.peers()}
        ends[0].subscribe({7})
        ends[1].subscribe({7})
        ends[2].subscribe({7})
        await until(lambda: ends[2].me in {peer.id for peer in ends[0].peers()})
        for end in ends:
            end.subscribe(())
        await until(lambda: not any(end._discovery and end._discovery._shard_peers._made for end in ends))
        nursery.cancel_scope.cancel()


async def test_connections_without_proof_of_identity_are_refused() -> None:
    """Plaintext and secio, which the library would accept by default, and a stranger's bytes."""
    a, a_engine = member(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a.run)
        _, endpoint = parse_bootstrap(addresses[0])
        for protocol in (b"/plaintext/2.0.0", b"/secio/1.0.0", b"/tls/1.0.0"):
            stream = await trio.open_tcp_stream(endpoint.host, endpoint.port)
            for line in (b"/multistream/1.0.0\n", protocol + b"\n"):
                await stream.send_all(bytes([len(line)]) + line)
            answer = b""
            with trio.move_on_after(10):
                while b"na\n" not in answer and (chunk := await stream.receive_some(1000)):
                    answer += chunk
            assert b"na\n" in answer and protocol not in answer
            await stream.aclose()
        assert a_engine.restarts == 0
        nursery.cancel_scope.cancel()


async def test_a_restart_within_a_second_repeats_no_message_id() -> None:
    listen, numbers = [parse_listen("/ip4/127.0.0.1/tcp/0")], list[int]()
    now = iter((1_700_000_000.0, 1_700_000_000.1)).__next__  # read once at each start
    for _ in range(2):
        async with open_stack(Identity.from_seed(bytes(32)), [TOPIC], lambda frame, via, topics: Verdict.ACCEPT, listen, now) as stack:
            numbers += [int.from_bytes(stack.pubsub._next_seqno(), "big") for _ in range(1000)]
    assert numbers == sorted(set(numbers))


async def test_the_librarys_log_comes_through_ours(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("libp2p.host").warning("something of note")
    logging.getLogger("libp2p.host").info("chatter")
    assert "something of note" in caplog.text and "chatter" not in caplog.text
