"""What the libp2p engine leaves out of its library's work to save time, and that nothing is lost by it."""

import os
import struct
import time
from typing import Any

import pytest
import trio
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.stream_muxer.yamux.yamux import HEADER_SIZE, TYPE_DATA, TYPE_WINDOW_UPDATE, YAMUX_HEADER_FORMAT

from p2p.engines.libp2p_network import WITHHELD, Muxer
from p2p.engines.libp2p_stack import Router
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
    asked: list[tuple[int, int, int]] = []  # connection, stream, bytes that its peer may send more
    sent: list[tuple[int, int, int]] = []
    real, written = Muxer._write_frame, Muxer.__mro__[1]._write_frame

    def updates(of: object, frames: bytes) -> list[tuple[int, int, int]]:
        found = []
        while frames:
            _, kind, flags, stream, length = struct.unpack(YAMUX_HEADER_FORMAT, frames[:HEADER_SIZE])
            if (kind, flags) == (TYPE_WINDOW_UPDATE, 0):
                found.append((id(of), stream, length))
            frames = frames[HEADER_SIZE + (length if kind == TYPE_DATA else 0) :]
        return found

    async def asks(self: Muxer, data: bytes) -> None:
        asked.extend(updates(self, data))
        await real(self, data)

    async def writes(self: Any, data: bytes) -> None:
        sent.extend(updates(self, data))
        await written(self, data)

    monkeypatch.setattr(Muxer, "rtt", lambda self: 1000.0)  # the library's reason to let a window grow
    monkeypatch.setattr(Muxer, "_write_frame", asks)
    monkeypatch.setattr(Muxer.__mro__[1], "_write_frame", writes)
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
    assert sent and len(sent) <= len(asked) / 2 and WITHHELD < WINDOW / 2
    assert min(more for *_, more in sent) >= WITHHELD
    for stream in {update[:2] for update in asked}:
        granted, told = (sum(update[2] for update in which if update[:2] == stream) for which in (asked, sent))
        assert 0 <= granted - told < WITHHELD


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
