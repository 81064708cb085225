"""What the libp2p engine leaves out of its library's work to save time, and that nothing is lost by it."""

import os
import struct
import time
from typing import Any

import multiaddr
import pytest
import trio
from libp2p.host.ping import PingService
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.stream_muxer.yamux.yamux import HEADER_SIZE, TYPE_DATA, TYPE_WINDOW_UPDATE, YAMUX_HEADER_FORMAT

from p2p.engines.libp2p import discovery as libp2p_discovery
from p2p.engines.libp2p.network import WITHHELD, Muxer, Stream
from p2p.engines.libp2p.stack import Router
from p2p.member import Member
from tests.p2p.test_libp2p import TOPIC, member
from tests.p2p.waiting import SECONDS, heard, until

pytestmark = [pytest.mark.trio, pytest.mark.net]
WINDOW = 256 * 1024  # bytes that a stream may send before it hears that they were read


async def two_that_hear_each_other(nursery: trio.Nursery) -> tuple[Member, Any, Member]:
    """A member, its engine, and another member."""
    a, a_engine = member(1)
    addresses = await nursery.start(a.run)
    b, _ = member(2, bootstrap=addresses[:1])
    await nursery.start(b.run)
    await heard(a, b)
    return a, a_engine, b


async def test_a_stream_goes_on_beyond_its_window_with_fewer_updates_than_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int, int]] = []  # connection, stream, bytes
    told: list[tuple[int, int, int]] = []  # and bytes that its peer may send more
    reads, written = Stream._auto_tune_and_send_window_update, Muxer.__mro__[1]._write_frame

    async def note_read(self: Any, *, bytes_read: int = 0) -> None:
        read.append((id(self.conn), self.stream_id, bytes_read))
        await reads(self, bytes_read=bytes_read)

    async def note_written(self: Any, data: bytes) -> None:
        frames = data
        while frames:
            _, kind, flags, stream, length = struct.unpack(YAMUX_HEADER_FORMAT, frames[:HEADER_SIZE])
            if (kind, flags) == (TYPE_WINDOW_UPDATE, 0):
                told.append((id(self), stream, length))
            frames = frames[HEADER_SIZE + (length if kind == TYPE_DATA else 0) :]
        await written(self, data)

    monkeypatch.setattr(Muxer, "rtt", lambda self: 1000.0)  # the library's reason to let a window grow
    monkeypatch.setattr(Stream, "_auto_tune_and_send_window_update", note_read)
    monkeypatch.setattr(Muxer.__mro__[1], "_write_frame", note_written)
    async with trio.open_nursery() as nursery:
        a, _, b = await two_that_hear_each_other(nursery)
        total = 0
        with trio.fail_after(SECONDS):
            while total < 6 * WINDOW:  # over the one stream that pubsub keeps open
                body = os.urandom(20_000)
                a.publish("rollouts", body)
                got: list[bytes] = []
                await until(lambda got=got: got.extend(e.body for e in b.received()) or got)  # type: ignore[misc]
                assert body in got
                total += len(body)
        nursery.cancel_scope.cancel()
    assert told and len(told) <= len(read) / 2 and WITHHELD < WINDOW / 2
    assert min(more for *_, more in told) >= WITHHELD
    for stream in {which[:2] for which in read}:
        came, granted = (sum(entry[2] for entry in entries if entry[:2] == stream) for entries in (read, told))
        assert 0 <= came - granted < WITHHELD


async def test_who_is_silent_is_pinged_and_who_does_not_answer_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_discovery, "PING_AFTER", 0.5)
    monkeypatch.setattr(libp2p_discovery, "PING_TIMEOUT", 3.0)
    pinged: list[str] = []
    real = PingService.ping

    async def ping(self: Any, peer: Any, amount: int = 1) -> Any:
        pinged.append(str(peer))
        if str(peer) == dead:
            await trio.sleep_forever()
        return await real(self, peer, amount)

    monkeypatch.setattr(PingService, "ping", ping)
    dead = ""
    async with trio.open_nursery() as nursery:
        a, a_engine, b = await two_that_hear_each_other(nursery)
        await until(lambda: pinged.count(b.identity.peer_id) > 2)
        assert [peer.id for peer in a.peers()] == [b.identity.peer_id]
        assert a_engine._stack is not None
        peer = ID.from_string(b.identity.peer_id)
        often = pinged.count(peer.to_string())
        for _ in range(20):
            a_engine._stack.pubsub.heard_at[peer] = trio.current_time() + 1000  # as one who goes on speaking
            await trio.sleep(0.1)
        assert pinged.count(peer.to_string()) <= often + 1  # one may have been under way
        a_engine._stack.pubsub.heard_at[peer], dead = trio.current_time(), b.identity.peer_id
        await until(lambda: not a.peers())
        nursery.cancel_scope.cancel()


async def test_whatever_comes_of_a_peer_shows_that_it_is_alive() -> None:
    async with trio.open_nursery() as nursery:
        a, a_engine, b = await two_that_hear_each_other(nursery)
        assert a_engine._stack is not None
        before = trio.current_time()  # no ping is due for a while
        await heard(b, a)
        assert a_engine._stack.pubsub.heard_at[ID.from_string(b.identity.peer_id)] >= before
        nursery.cancel_scope.cancel()


async def test_where_a_member_says_it_is_now_is_noted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not only when it is time to note again what it said before."""
    monkeypatch.setattr(libp2p_discovery, "NOTED_FOR", 1000.0)
    async with trio.open_nursery() as nursery:
        _, a_engine, b = await two_that_hear_each_other(nursery)
        me, there = b.identity.peer_id, "/ip4/127.0.0.1/tcp/4321"
        await until(lambda: me in a_engine._discovery._noted)
        assert there not in a_engine._book[me].addresses
        a_engine._stack.host.get_peerstore().add_addrs(ID.from_string(me), [multiaddr.Multiaddr(there)], 1000)
        await until(lambda: there in a_engine._book[me].addresses)
        nursery.cancel_scope.cancel()


async def test_messages_carry_no_addresses_and_who_was_pruned_is_let_in_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    real = Router.__mro__[1].send_rpc
    monkeypatch.setattr(
        Router.__mro__[1], "send_rpc", lambda self, peer, rpc, priority=False: (sent.append(rpc), real(self, peer, rpc, priority))
    )
    async with trio.open_nursery() as nursery:
        (_, a_engine, b), topic = await two_that_hear_each_other(nursery), str(TOPIC)
        assert any(rpc.publish for rpc in sent) and not any(rpc.HasField("senderRecord") for rpc in sent)
        assert a_engine._stack is not None
        router, peer = a_engine._stack.router, ID.from_string(b.identity.peer_id)
        router.mesh[topic].discard(peer)
        router.graft_flood_tracking[peer][topic] = time.time()  # as after a PRUNE, whose back-off is over
        router.back_off.clear()
        await router.handle_graft(rpc_pb2.ControlGraft(topicID=topic), peer)
        assert peer in router.mesh[topic]
        nursery.cancel_scope.cancel()
