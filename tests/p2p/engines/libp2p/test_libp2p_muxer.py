"""The muxer carries many streams over one connection, and neither side's reading waits for the other side."""

import itertools
import struct
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_FIN,
    FLAG_SYN,
    HEADER_SIZE,
    TYPE_DATA,
    TYPE_PING,
    TYPE_WINDOW_UPDATE,
    YAMUX_HEADER_FORMAT,
)

import p2p.engines.libp2p.stack  # noqa: F401  sets the levels of the library's loggers
from p2p.engines.libp2p.network import (
    MAX_BUFFERED_BYTES,
    MAX_HALF_CLOSED_STREAMS,
    MAX_OWED_BYTES,
    MAX_UNREAD_BYTES,
    WINDOW_BYTES,
    WITHHELD_BYTES,
    WRITE_TIMEOUT_S,
    Muxer,
)
from p2p.engines.traffic import Traffic
from tests.doubles import until

WINDOW = 256 * 1024  # bytes that a stream may send before the receiver reports that it has read them


class Secured:
    """One end of a connection without a buffer: a write waits until the other side reads."""

    def __init__(self, stream: Any, is_initiator: bool) -> None:
        self._stream, self.is_initiator = stream, is_initiator
        self.conn = self.read_writer = self
        self.updates: list[int] = []  # bytes that each window update grants
        self.frames: list[tuple[int, int, int]] = []  # (kind, flags, length) of each frame
        self.least = HEADER_SIZE  # bytes of the smallest write

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(n))

    async def write(self, data: bytes) -> None:
        frames, self.least = data, min(self.least, len(data))
        while frames:
            _, kind, flags, _, length = struct.unpack(YAMUX_HEADER_FORMAT, frames[:HEADER_SIZE])
            self.frames.append((kind, flags, length))
            if (kind, flags) == (TYPE_WINDOW_UPDATE, 0):
                self.updates.append(length)
            frames = frames[HEADER_SIZE + (length if kind == TYPE_DATA else 0) :]
        await self._stream.send_all(data)

    async def close(self) -> None:
        await trio.aclose_forcefully(self._stream)


async def opened(nursery: trio.Nursery, ours: Any, theirs: Any, initiator: bool = False) -> tuple[Muxer, Any]:
    """Start a muxer; return it and the other end of its connection."""
    muxer = Muxer(Secured(ours, initiator), ID(b"peer"), is_initiator=initiator)
    nursery.start_soon(muxer.start)
    await muxer.event_started.wait()
    return muxer, theirs


async def both(nursery: trio.Nursery, traffic: Traffic | None = None) -> tuple[list[Secured], list[Muxer]]:
    """Start both ends of a connection. traffic: rate limits of the first end, which has dialled."""
    ends = [Secured(end, n == 0) for n, end in enumerate(trio.testing.memory_stream_pair())]
    muxers = [
        Muxer(end, ID(b"peer"), is_initiator=end.is_initiator, traffic=traffic if end.is_initiator else None)
        for end in ends
    ]
    for muxer in muxers:
        nursery.start_soon(muxer.start)
        await muxer.event_started.wait()
    return ends, muxers


async def test_the_reader_of_a_connection_never_waits_for_a_write(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ends = trio.testing.lockstep_stream_pair()
    muxers = [Muxer(Secured(end, n == 0), ID(b"peer"), is_initiator=n == 0) for n, end in enumerate(ends)]
    heard: list[bytes] = []

    async def read(stream: Any) -> None:
        while True:
            heard.append(await stream.read(5000))

    async def accept(muxer: Muxer) -> None:
        while True:
            nursery.start_soon(read, await muxer.accept_stream())

    async def open_one(muxer: Muxer) -> None:
        await (await muxer.open_stream()).write(b"x" * 5000)

    async with trio.open_nursery() as nursery:
        for muxer in muxers:
            nursery.start_soon(muxer.start)
            await muxer.event_started.wait()
            nursery.start_soon(accept, muxer)
        with trio.fail_after(WRITE_TIMEOUT_S / 2):
            async with trio.open_nursery() as opening:
                for muxer in muxers * 20:
                    opening.start_soon(open_one, muxer)
            await until(lambda: sum(map(len, heard)) >= 40 * 5000)
        nursery.cancel_scope.cancel()


async def test_a_peer_that_causes_replies_and_reads_none_is_cut_off(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    muxer, theirs = await opened(nursery, *trio.testing.lockstep_stream_pair())

    async def ping() -> None:
        for n in range(10 * MAX_OWED_BYTES // HEADER_SIZE):
            await theirs.send_all(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_PING, FLAG_SYN, 0, n))

    with trio.fail_after(WRITE_TIMEOUT_S / 2), pytest.raises(trio.BrokenResourceError):
        await ping()
    with trio.fail_after(1):
        await muxer.event_closed.wait()


async def test_replies_are_sent_before_later_writes(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    muxer, theirs = await opened(nursery, *trio.testing.lockstep_stream_pair())
    numbers = itertools.count(1)

    async def ping() -> None:
        await theirs.send_all(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_PING, FLAG_SYN, 0, next(numbers)))
        await trio.testing.wait_all_tasks_blocked()

    async def frames(count: int) -> list[tuple[int, int]]:
        """Read `count` frames; return their kinds and lengths (for pings: their counters)."""
        data = b""
        while len(data) < count * HEADER_SIZE:
            data += await theirs.receive_some(count * HEADER_SIZE - len(data))
        await trio.testing.wait_all_tasks_blocked()
        return [(kind, length) for _, kind, _, _, length in struct.iter_unpack(YAMUX_HEADER_FORMAT, data)]

    with trio.fail_after(0.4):  # before the muxer sends a ping
        for _ in range(3):  # the reply to the first is being written
            await ping()
        nursery.start_soon(muxer.open_stream)
        await trio.testing.wait_all_tasks_blocked()
        await ping()
        assert await frames(5) == [
            (TYPE_PING, 1),
            (TYPE_PING, 2),
            (TYPE_PING, 3),
            (TYPE_WINDOW_UPDATE, 0),
            (TYPE_PING, 4),
        ]
        await ping()
        assert await frames(1) == [(TYPE_PING, 5)]


async def test_a_stream_continues_beyond_its_window_with_few_window_updates(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    ends, (sender, receiver) = await both(nursery)
    out = await sender.open_stream()
    nursery.start_soon(out.write, b"x" * 6 * WINDOW)
    into, came, reads = await receiver.accept_stream(), 0, 0
    with trio.fail_after(WRITE_TIMEOUT_S):
        while came < 6 * WINDOW:
            came, reads = came + len(await into.read(5000)), reads + 1
            assert out.send_window <= WINDOW
    updates = ends[1].updates
    assert updates and min(updates) >= WITHHELD_BYTES and len(updates) <= reads / 2
    assert 0 <= came - sum(updates) < WITHHELD_BYTES < WINDOW / 2


async def test_writes_of_two_tasks_on_one_stream_do_not_mix(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """One such task sends recent messages to a new neighbour, another the regular messages."""
    _, (sender, receiver) = await both(nursery)
    out, came = await sender.open_stream(), b""
    for letter in (b"a", b"b"):
        nursery.start_soon(out.write, letter * WINDOW)
    into = await receiver.accept_stream()
    with trio.fail_after(WRITE_TIMEOUT_S):
        while len(came) < 2 * WINDOW:
            came += await into.read(WINDOW)
    assert [letter for letter, _ in itertools.groupby(came)] in ([97, 98], [98, 97])


async def test_a_slow_peer_that_reads_each_frame_in_time_is_kept(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """The connection is kept even if many frames wait."""
    muxer, theirs = await opened(nursery, *trio.testing.lockstep_stream_pair(), initiator=True)
    written: list[int] = []

    async def write() -> None:
        stream = await muxer.open_stream()
        await stream.write(b"x" * 1000)
        written.append(stream.stream_id)

    async with trio.open_nursery() as writing:
        for _ in range(4):
            writing.start_soon(write)
        while len(written) < 4:
            await trio.sleep(0.6 * WRITE_TIMEOUT_S)
            await theirs.receive_some(2000)


# With a rate limit that is used up: data frames wait, and the state of the connection does not change.


@pytest.fixture
async def limited(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> tuple[Secured, Any, Any, Muxer]:
    """Return the limited end of a connection, its stream, and the peer's stream and muxer."""
    traffic = Traffic(up=1000.0)
    ends, (ours, theirs) = await both(nursery, traffic)
    await traffic.sending.wait(1500)
    out = await ours.open_stream()
    return ends[0], out, await theirs.accept_stream(), theirs


async def test_replies_do_not_wait_for_the_rate_and_are_never_empty(
    limited: tuple[Secured, Any, Any, Muxer], nursery: trio.Nursery
) -> None:
    """Noise would send an empty write as a message, which the peer takes for the end of the connection."""
    ours, out, into, theirs = limited
    nursery.start_soon(out.write, b"x" * 500)
    await trio.testing.wait_all_tasks_blocked()
    begun = trio.current_time()
    opened = [await theirs.open_stream() for _ in range(3)]  # the ACKs to these streams are the replies
    await until(lambda: len(ours.frames) == 1 + len(opened), every=0.001)
    assert trio.current_time() - begun < 0.1
    assert len(await into.read(500)) == 500 and trio.current_time() - begun > 0.4
    await trio.sleep(0.1)
    assert ours.least == HEADER_SIZE and not theirs.event_shutting_down.is_set()


async def test_a_write_that_is_cancelled_while_it_waits_has_no_effect(
    limited: tuple[Secured, Any, Any, Muxer],
) -> None:
    ours, out, into, _ = limited
    before = out.send_window, list(ours.frames)
    with trio.move_on_after(0.1):
        await out.write(b"lost" * 100)
    assert (out.send_window, ours.frames) == before
    await out.write(b"kept")
    assert await into.read(500) == b"kept"


async def test_no_data_follows_the_end_of_its_stream(limited: tuple[Secured, Any, Any, Muxer]) -> None:
    ours, out, into, _ = limited

    async def write() -> None:
        with pytest.raises(MuxedStreamError):
            await out.write(b"x" * 100)

    async with trio.open_nursery() as writing:
        writing.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        await out.close()
    assert (TYPE_WINDOW_UPDATE, FLAG_FIN, 0) in ours.frames
    assert all(kind != TYPE_DATA for kind, _, _ in ours.frames)
    await into.close()


# A peer that ignores windows, and a peer that never ends a stream.


@pytest.mark.parametrize("all_together", [MAX_UNREAD_BYTES, 2 << 20])
async def test_a_peer_that_sends_beyond_its_windows_is_cut_off(
    all_together: int,
    nursery: trio.Nursery,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If all connections together have too many unread bytes, the peer with the most is cut off."""
    monkeypatch.setattr("p2p.engines.libp2p.network.MAX_UNREAD_BYTES", all_together)
    monkeypatch.setattr("p2p.engines.libp2p.network.UNREAD_EVERY_S", 0.0)
    most = min(MAX_BUFFERED_BYTES, all_together + WINDOW_BYTES)
    muxer, theirs = await opened(nursery, *trio.testing.memory_stream_pair())
    frame, flags, sent = bytes(WINDOW), FLAG_SYN, 0
    with pytest.raises(trio.BrokenResourceError):
        while sent < 2 * MAX_BUFFERED_BYTES:
            await theirs.send_all(
                struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_DATA, flags, 1, len(frame)) + frame
            )
            await trio.testing.wait_all_tasks_blocked()
            flags, sent = 0, sent + len(frame)
    assert most <= sent <= most + 2 * WINDOW and not muxer.stream_buffers
    assert not caplog.records  # a log line for each frame, of one byte or more, would fill the log


async def test_bytes_on_streams_that_the_node_reset_are_dropped(nursery: trio.Nursery) -> None:
    """Otherwise a peer would seem to exceed its windows if a node leaves many of its answers unread."""
    muxer, theirs = await opened(nursery, *trio.testing.memory_stream_pair())
    for stream in range(1, 4 * MAX_BUFFERED_BYTES // WINDOW, 2):
        await theirs.send_all(
            struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_DATA, FLAG_SYN, stream, WINDOW) + bytes(WINDOW)
        )
        await (await muxer.accept_stream()).reset()
        await theirs.send_all(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_DATA, 0, stream, 9) + bytes(9))
        await trio.testing.wait_all_tasks_blocked()
    assert not any(muxer.stream_buffers.values())
    nursery.cancel_scope.cancel()


async def test_a_reader_of_an_inbound_stream_that_is_reset_ends(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    muxer, theirs = await opened(nursery, *trio.testing.memory_stream_pair())
    ended = []

    async def read(stream: Any) -> None:
        with pytest.raises(MuxedStreamError):
            await stream.read(1)
        ended.append(stream)

    for n in (1, 3, 5):
        await theirs.send_all(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_WINDOW_UPDATE, FLAG_SYN, n, 0))
        stream = await muxer.accept_stream()
        nursery.start_soon(read, stream)
        await trio.testing.wait_all_tasks_blocked()
        await stream.reset()
    await trio.sleep(60)
    assert len(ended) == 3 and not muxer.streams and not muxer.stream_events
    nursery.cancel_scope.cancel()


async def test_a_peer_that_ends_none_of_its_streams_is_cut_off(nursery: trio.Nursery) -> None:
    muxer, theirs = await opened(nursery, *trio.testing.memory_stream_pair())
    closed = 0
    for stream in range(1, 4 * MAX_HALF_CLOSED_STREAMS, 2):
        await theirs.send_all(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_WINDOW_UPDATE, FLAG_SYN, stream, 0))
    with pytest.raises(MuxedConnUnavailable):
        while closed < 2 * MAX_HALF_CLOSED_STREAMS:
            await (await muxer.accept_stream()).close()
            closed += 1
    assert closed >= MAX_HALF_CLOSED_STREAMS - 10  # streams waiting to be accepted count, too
    with pytest.raises(trio.BrokenResourceError):
        await theirs.send_all(b"x")


async def test_a_reader_of_an_outbound_stream_that_is_reset_ends(nursery: trio.Nursery) -> None:
    """A node that ends a connection resets all its streams; otherwise each would leave a waiting task."""
    ours, theirs = trio.testing.memory_stream_pair()
    muxer, _ = await opened(nursery, ours, theirs, initiator=True)
    stream, ended = await muxer.open_stream(), trio.Event()

    async def read() -> None:
        with pytest.raises(MuxedStreamError):
            await stream.read(1)
        ended.set()

    nursery.start_soon(read)
    await trio.testing.wait_all_tasks_blocked()
    await stream.reset()
    await trio.testing.wait_all_tasks_blocked()
    assert ended.is_set()
    nursery.cancel_scope.cancel()
