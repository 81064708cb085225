"""Reading GossipSub RPCs: they arrive complete, and unfinished RPCs and checks are bounded."""

from collections import Counter

import pytest
import trio
from libp2p.network.stream.exceptions import StreamEOF, StreamError, StreamReset
from libp2p.peer.id import ID
from libp2p.pubsub.rpc_queue import RpcQueue
from libp2p.utils import encode_varint_prefixed
from libp2p.utils.varint import encode_uvarint, read_varint_prefixed_bytes_limited
from trio.testing import MockClock, wait_all_tasks_blocked

from p2p.engines.libp2p import rpcs
from p2p.engines.libp2p.rpcs import (
    CHECKS_BURST,
    CHECKS_PER_S,
    FINISH_S,
    MAX_RPC_BYTES,
    CheckQueue,
    Queues,
    RpcStream,
)
from tests.doubles import TIMEOUT_S


class Incoming:
    """A peer's bytes, in pieces."""

    def __init__(self, peer: str) -> None:
        self.send, self._receive = trio.open_memory_channel[bytes](100_000)
        self.muxed_conn = self
        self.peer_id = peer

    async def read(self, _: int) -> bytes:
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            raise StreamEOF from None


class World:
    def __init__(self) -> None:
        self.cut: list[tuple[ID, str]] = []
        self.check_queue = CheckQueue()

    def stream(self, peer: str) -> tuple[Incoming, RpcStream]:
        incoming = Incoming(peer)
        return incoming, RpcStream(
            incoming,
            lambda _: None,
            lambda who, why: self.cut.append((who, why)),
            self.check_queue.drained,
        )


async def rpc(stream: RpcStream) -> bytes:
    return bytes(await read_varint_prefixed_bytes_limited(stream, MAX_RPC_BYTES))


@pytest.mark.parametrize("piece", [1, 3, 1000, 10**6])
async def test_rpcs_arrive_as_they_were_sent_however_they_are_split(piece: int) -> None:
    sent = [b"", b"a", bytes(127), bytes(128), b"b" * 20_000, b"c" * 5]
    incoming, stream = World().stream("a")
    written = b"".join(map(encode_varint_prefixed, sent))
    for at in range(0, len(written), piece):
        incoming.send.send_nowait(written[at : at + piece])
    incoming.send.close()
    assert [await rpc(stream) for _ in sent] == sent
    with pytest.raises(StreamEOF):
        await rpc(stream)


async def test_an_rpc_must_arrive_within_ten_seconds_but_silence_is_not_limited(
    autojump_clock: MockClock,
) -> None:
    world = World()
    incoming, stream = world.stream("slow")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dribble, incoming)
        assert await rpc(stream) == b"hello"  # after an hour of silence
        begun = trio.current_time()
        with pytest.raises(StreamReset):
            await rpc(stream)
        took = trio.current_time() - begun
    assert FINISH_S <= took <= FINISH_S + 1.5 and [peer for peer, _ in world.cut] == ["slow"]


async def dribble(incoming: Incoming) -> None:
    await trio.sleep(3600)
    await incoming.send.send(encode_varint_prefixed(b"hello") + encode_uvarint(100))
    for _ in range(20):
        await trio.sleep(1)
        incoming.send.send_nowait(b".")


@pytest.mark.parametrize("hostile", [encode_uvarint(MAX_RPC_BYTES + 1), b"\xff" * 10])
async def test_an_rpc_over_the_limit_is_not_read(hostile: bytes) -> None:
    world = World()
    incoming, stream = world.stream("large")
    incoming.send.send_nowait(hostile)
    with pytest.raises(StreamError):
        await rpc(stream)
    assert [peer for peer, _ in world.cut] == ["large"]


async def test_checks_take_turns_and_a_waiting_connection_is_not_read(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    """A connection of another group than the crowd's waits for at most two turns."""
    world, checked = World(), Counter[str]()
    incoming, stream = world.stream("c0")

    async def enter(group: str, peer: str) -> None:
        await world.check_queue.enter((group, peer), 0)
        checked[peer] += 1

    nursery.start_soon(world.check_queue.run)
    for n in range(3 * int(CHECKS_BURST)):
        nursery.start_soon(enter, "1.2", f"c{n % 20}")
    await wait_all_tasks_blocked()
    assert checked.total() == CHECKS_BURST
    await incoming.send.send(encode_varint_prefixed(b"more"))
    since = trio.current_time()
    await enter("9.0", "honest")
    assert trio.current_time() - since < 3 / CHECKS_PER_S
    assert await rpc(stream) == b"more" and checked["c0"] == 3 * CHECKS_BURST / 20
    # Trio starts the tasks in any order, so c0 may have had a few more or fewer turns at the start.
    assert trio.current_time() - since > 1.5 * CHECKS_BURST / CHECKS_PER_S


async def test_a_crowd_that_fills_the_check_queue_loses_its_own_messages(
    autojump_clock: MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections with new keys send 600 messages each, and end before one of the messages is checked."""
    monkeypatch.setattr(rpcs, "MAX_WAITING_BYTES", 10 * rpcs.TASK_BYTES)
    queue, checked = CheckQueue(), list[tuple[str, bool]]()

    async def enter(group: str, peer: str) -> None:
        checked.append((peer, await queue.enter((group, peer), 0)))

    for _ in range(int(CHECKS_BURST)):
        assert await queue.enter(("1.2", "c"), 0)
    nursery.start_soon(enter, "9.0", "honest")
    await wait_all_tasks_blocked()
    for n in range(50):
        nursery.start_soon(enter, "1.2", f"c{n}")
    await wait_all_tasks_blocked()
    assert [fine for _, fine in checked] == [False] * 41
    nursery.start_soon(queue.run)
    await wait_all_tasks_blocked()
    await trio.sleep(1)
    assert [fine for _, fine in checked[41:]] == [True] * 10 and ("honest", True) in checked
    with trio.fail_after(TIMEOUT_S):
        for n in range(50):
            await queue.drained(f"c{n}")
    nursery.cancel_scope.cancel()


async def test_a_second_queue_for_a_neighbour_ends_the_task_of_the_first() -> None:
    """The library creates two queues if two connections to a peer begin at the same time."""
    queues, first, second = Queues(b"me"), RpcQueue(), RpcQueue()
    queues["peer"] = first
    queues["peer"] = second
    with trio.fail_after(TIMEOUT_S):
        assert await first.pop() is None
    assert queues["peer"] is second and not second._closed
