"""The request/response protocol: its bytes, and limits on the resources that a hostile peer can hold."""

import struct
from collections import Counter
from typing import Any

import pytest
import trio
import trio.testing

from p2p.engines.request_response import (
    AT_ONCE,
    IDLE_AT_ONCE,
    IDLE_EACH,
    IDLE_S,
    KEPT_S,
    MAX_KEPT,
    MESSAGE_TIMEOUT_S,
    SERVED_AT_ONCE,
    SERVED_EACH,
    Broken,
    KeptStreams,
    Responder,
    ask,
)
from p2p.engines.traffic import Line, Traffic
from p2p.identity import Identity
from p2p.types import MAX_QUESTION_BYTES, PeerId, Unanswered

PEERS = [Identity(bytes([n]) * 32).peer_id for n in range(20)]


class End:
    """One end of a stream in memory. Implements `ByteStream`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    async def read(self) -> bytes:
        try:
            return bytes(await self.stream.receive_some(65536))
        except trio.BrokenResourceError:
            raise Broken("reset") from None

    async def write(self, data: bytes) -> None:
        try:
            await self.stream.send_all(data)
        except trio.BrokenResourceError:
            raise Broken("reset") from None


def pair() -> tuple[Any, End]:
    theirs, ours = trio.testing.memory_stream_pair()
    return theirs, End(ours)


def responder(answer: Any = lambda peer, question: question[::-1]) -> Responder:
    return Responder(answer, lambda peer: peer != PEERS[13], Traffic().upload)


@pytest.mark.parametrize("step", [1, 3, 10_000])
async def test_the_bytes_match_the_document_however_they_are_split(step: int) -> None:
    theirs, ours = pair()
    done: list[bool] = []

    async def serve() -> None:
        done.append(await responder().serve(PEERS[0], ours))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        question = b"\x00\x00\x00\x05hello"
        for at in range(0, len(question), step):
            await theirs.send_all(question[at : at + step])
        answer = b""
        while len(answer) < 9:
            answer += await theirs.receive_some(step)
        await theirs.aclose()
    assert answer == b"\x00\x00\x00\x05olleh" and done == [True]


async def test_a_question_gets_its_answer() -> None:
    for question in (b"", b"x" * MAX_QUESTION_BYTES):
        theirs, ours = pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(responder().serve, PEERS[0], ours)
            assert await ask(End(theirs), question, len(question)) == question[::-1]
            await theirs.aclose()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\x00",
        b"\x00\x00\x00\x05hell",
        b"\x00\x00\x00\x06hello!",
        b"\xff\xff\xff\xffhello",
        b"\x00\x00\x00\x05hello!",
    ],
    ids=["nothing", "no length", "cut short", "over the limit", "far over it", "more than announced"],
)
async def test_a_malformed_answer_is_an_error(answer: bytes) -> None:
    theirs, ours = pair()
    async with trio.open_nursery() as nursery:

        async def lie() -> None:
            await theirs.receive_some(100)
            await theirs.send_all(answer)
            await theirs.aclose()

        nursery.start_soon(lie)
        with pytest.raises(Broken):
            await ask(ours, b"?", 5)


async def test_no_more_than_the_limit_of_an_answer_is_read() -> None:
    theirs, ours = pair()
    await theirs.send_all(struct.pack(">I", 2**30))
    with trio.fail_after(1), pytest.raises(Broken, match="limit 5"):
        await ask(ours, b"?", 5)


@pytest.mark.parametrize(
    "question",
    [struct.pack(">I", MAX_QUESTION_BYTES + 1), b"\x00\x00\x00\x01??", b""],
    ids=["too long", "more", "none"],
)
async def test_a_malformed_question_is_cut_off(question: bytes) -> None:
    theirs, ours = pair()
    await theirs.send_all(question)
    if not question:
        await theirs.aclose()

    def answer(peer: PeerId, question: bytes) -> bytes:
        raise AssertionError(question)

    assert not await responder(answer).serve(PEERS[0], ours)


async def test_slow_peers_are_cut_off(autojump_clock: Any) -> None:
    """A peer that is slow to ask or to read the answer holds a place for at most twice the timeout."""
    served = responder(lambda peer, question: b"x" * 1_000_000)
    full = trio.testing.lockstep_stream_pair  # a write blocks until the other end reads

    async def drip(stream: Any) -> None:
        for n in range(100):
            await stream.send_all(struct.pack(">I", 1000) if n == 0 else b"x")
            await trio.sleep(1.0)

    async def take_nothing(stream: Any) -> None:
        await stream.send_all(b"\x00\x00\x00\x01?")

    async def drip_later(stream: Any) -> None:
        await stream.send_all(b"\x00\x00\x00\x01?")
        left = 1_000_004
        while left:
            left -= len(await stream.receive_some(left))
        await drip(stream)

    for attack in (drip, take_nothing, drip_later):
        theirs, ours = full()
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attack, theirs)
            assert not await served.serve(PEERS[0], End(ours))
            nursery.cancel_scope.cancel()
        assert trio.current_time() - began <= 2 * MESSAGE_TIMEOUT_S + 0.01
    assert not served._open


async def test_places_are_limited_and_freed_again(autojump_clock: Any) -> None:
    served, turned_away = responder(), 0

    async def come(peer: PeerId) -> None:
        nonlocal turned_away
        began = trio.current_time()
        assert not await served.serve(peer, pair()[1])  # a stream without a question
        turned_away += trio.current_time() == began

    async with trio.open_nursery() as nursery:
        for peer in PEERS[:9]:  # each asks 10 times: 90 questions
            for _ in range(10):
                nursery.start_soon(come, peer)
        await trio.testing.wait_all_tasks_blocked()
        counts = asked(served)
        assert counts.total() == SERVED_AT_ONCE and max(counts.values()) == SERVED_EACH
        assert turned_away == 90 - SERVED_AT_ONCE
    assert not served._open
    assert not await served.serve(PEERS[13], pair()[1])  # rejected: no place is left


def asked(served: Responder) -> Counter[Any]:
    return Counter(line.connection for line in served._open.values())


async def test_a_machine_with_many_connections_loses_places_to_other_machines(autojump_clock: Any) -> None:
    """Network groups take turns, then machines in a group, then connections of a machine."""
    served = responder()
    ended = Counter[Line]()

    async def come(line: Line) -> None:
        await served.serve(PeerId(str(line.connection)), pair()[1], line)  # a stream without a question
        ended[line] += 1

    async with trio.open_nursery() as nursery:
        crowd = [Line("1.1", "1.1.1.1", f"hostile {n}") for n in range(16)]
        for line in crowd * 5:
            nursery.start_soon(come, line)
        await trio.testing.wait_all_tasks_blocked()
        assert ended.total() == 16 and len(served._open) == SERVED_AT_ONCE
        others = [
            Line("8.8", "8.8.8.8", "of another group"),
            Line("1.1", "1.1.2.2", "of another machine"),
            Line("1.1", "1.1.1.1", "of the same machine"),
        ]
        for line in others * 2:
            nursery.start_soon(come, line)
            await trio.testing.wait_all_tasks_blocked()
        assert [asked(served)[line.connection] for line in others] == [2, 2, 2]
        assert ended.total() == 16 + 6 and max(ended.values()) <= 2
        nursery.cancel_scope.cancel()


async def test_an_answer_waits_for_the_upload_limit_until_its_peer_leaves(autojump_clock: Any) -> None:
    traffic = Traffic(up=1000.0)
    served = Responder(lambda peer, question: bytes(5000), lambda peer: True, traffic.upload)

    async def serve(line: Line, taken: list[float]) -> None:
        theirs, ours = pair()
        await theirs.send_all(question(b"?"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served.serve, PeerId(str(line.connection)), ours, line)
            with trio.move_on_after(MESSAGE_TIMEOUT_S + 1):
                await theirs.receive_some(5000)
                taken.append(trio.current_time())
            nursery.cancel_scope.cancel()

    begun, crowd, other = trio.current_time(), list[float](), list[float]()
    async with trio.open_nursery() as nursery:
        for n in range(8):
            nursery.start_soon(serve, Line("1.1", "1.1.1.1", n), crowd)
        nursery.start_soon(serve, Line("8.8", "8.8.8.8", "other"), other)
    # The limit is 8,000 bytes at once and 500 a second, so most peers leave before their turn.
    assert 1 <= len(crowd) <= 2 and other == [begun] and not served._open


async def test_a_failing_answer_frees_its_place() -> None:
    def fail(peer: PeerId, question: bytes) -> bytes:
        raise RuntimeError

    theirs, ours = pair()
    served = responder(fail)
    await theirs.send_all(b"\x00\x00\x00\x01?")
    with pytest.raises(RuntimeError):
        await served.serve(PEERS[0], ours)
    assert not served._open


def question(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


async def test_a_stream_carries_one_question_after_another() -> None:
    theirs, ours = pair()
    asked = End(theirs)
    allowed = list(range(5))
    admits = lambda peer: bool(allowed and allowed.pop())  # noqa: E731
    served = Responder(lambda peer, question: question[::-1], admits, Traffic().upload)
    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            assert not await served.serve(PEERS[0], ours)
            await ours.stream.aclose()

        nursery.start_soon(serve)
        for n in range(4):
            assert await ask(asked, b"%d!" % n, 10) == b"!%d" % n
            await trio.testing.wait_all_tasks_blocked()
            assert served._idle == {PEERS[0]: 1} and not served._open
        with pytest.raises(Broken):  # every question is checked, not only the first
            await ask(asked, b"once more", 10)
    assert not served._idle and not served._open


async def test_idle_streams_hold_no_place_and_end_soon(autojump_clock: Any) -> None:
    served, ends = responder(), list[tuple[PeerId, bool, float]]()
    streams: list[tuple[PeerId, Any]] = []

    async def serve(peer: PeerId, stream: End) -> None:
        ends.append((peer, await served.serve(peer, stream), trio.current_time() - began))

    async with trio.open_nursery() as nursery:
        began = trio.current_time()
        nobody = [Identity(bytes([n, 1]) * 16).peer_id for n in range(IDLE_AT_ONCE // IDLE_EACH + 1)]
        for peer in nobody:
            for _ in range(IDLE_EACH + (peer == nobody[0])):
                theirs, ours = pair()
                nursery.start_soon(serve, peer, ours)
                for _ in range(1 + (peer == nobody[1])):
                    assert await ask(End(theirs), b"?", 1) == b"?"
                streams.append((peer, theirs))
            await trio.testing.wait_all_tasks_blocked()
        assert served._idle.total() == IDLE_AT_ONCE and max(served._idle.values()) == IDLE_EACH
        # These streams wait for the peer to send a question, so they hold places.
        assert asked(served) == {nobody[0]: 1, nobody[-1]: IDLE_EACH}
        theirs, ours = pair()
        nursery.start_soon(serve, PEERS[0], ours)
        assert await ask(End(theirs), b"?", 1) == b"?"  # there are free places
        await theirs.aclose()
        await streams[-1][1].aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert ends == [(PEERS[0], True, 0.0), (nobody[-1], True, 0.0)]
    assert [end[1:] for end in ends[2:4]] == [
        (False, pytest.approx(MESSAGE_TIMEOUT_S))
    ] * 2  # the end that did not close the stream
    assert [end[1:] for end in ends[4:]] == [(True, pytest.approx(IDLE_S))] * IDLE_AT_ONCE
    assert not served._idle and not served._open


class Asked(End):
    """A stream for questions, answered at its other end, which is cut off at a given byte."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.ended: bool | None = None

    async def end(self, well: bool) -> None:
        assert self.ended is None
        self.ended = well
        await trio.aclose_forcefully(self.stream)


class World:
    """Peers that answer each other's questions, and a record of each stream that was opened."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.responder = Responder(lambda peer, question: question[::-1], lambda peer: True, Traffic().upload)
        self.opened: list[tuple[PeerId, Asked]] = []
        self.reached: list[PeerId] = []
        self.away: set[PeerId] = set()
        self.asking = KeptStreams(self.reach, self.new)

    async def reach(self, peer: PeerId) -> bool:
        self.reached.append(peer)
        return peer not in self.away

    async def new(self, peer: PeerId) -> Asked:
        theirs, ours = pair()
        self._nursery.start_soon(self.serve, peer, ours)
        self.opened.append((peer, Asked(theirs)))
        return self.opened[-1][1]

    async def serve(self, peer: PeerId, stream: End) -> None:
        await self.responder.serve(peer, stream)
        await stream.stream.aclose()

    def ends(self) -> list[bool | None]:
        return [stream.ended for _, stream in self.opened]


@pytest.fixture
async def world(nursery: trio.Nursery) -> World:
    return World(nursery)


async def test_a_stream_is_kept_for_the_next_question(world: World, autojump_clock: Any) -> None:
    ask = world.asking.ask
    for n in range(3):
        assert await ask(PEERS[0], b"%d!" % n, 2) == b"!%d" % n
        await trio.sleep(KEPT_S)
    assert world.ends() == [None] and world.reached == [PEERS[0]] * 3
    await trio.sleep(0.1)
    # A new stream is used, because the other end may be closing the old one.
    assert await ask(PEERS[0], b"later", 5) == b"retal"
    assert world.ends() == [True, None]
    async with trio.open_nursery() as together:
        for _ in range(5 * AT_ONCE):
            together.start_soon(ask, PEERS[0], b"?", 1)
    assert world.ends() == [True] + [None] * AT_ONCE
    await trio.sleep(KEPT_S + 0.1)
    await ask(PEERS[1], b"?", 1)
    # An answer to a cancelled question is dropped.
    assert world.ends() == [True] + [True] * AT_ONCE + [None]
    for peer in (Identity(bytes([n, 2]) * 16).peer_id for n in range(MAX_KEPT)):
        await ask(peer, b"?", 1)
    assert world.ends()[1 + AT_ONCE :] == [True] + [None] * MAX_KEPT
    await world.asking.end()
    await ask(PEERS[0], b"?", 1)
    assert set(world.ends()) == {True}


async def test_a_stream_that_ended_in_the_meantime_is_replaced_only_once(
    world: World, autojump_clock: Any
) -> None:
    ask = world.asking.ask
    await ask(PEERS[0], b"?", 1)
    world.opened[0][1].stream.receive_stream.put_eof()  # the other end closed the stream
    assert await ask(PEERS[0], b"ab", 2) == b"ba"
    assert world.ends() == [False, None]
    for peer in (PEERS[0], PEERS[1]):
        with pytest.raises(Unanswered, match=f"{peer}: message too large: 2 bytes \\(limit 1\\)"):
            await ask(peer, b"ab", 1)
    assert world.ends() == [False, False, False, False]  # a failed stream is not reused
    world.away.add(PEERS[2])
    with pytest.raises(Unanswered, match=f"{PEERS[2]}: cannot be reached"):
        await ask(PEERS[2], b"?", 1)
    with pytest.raises(Unanswered, match="4,097"):
        await ask(PEERS[0], b"?" * (MAX_QUESTION_BYTES + 1), 1)
    assert len(world.opened) == 4


async def test_the_stream_of_a_cancelled_question_is_not_reused(world: World) -> None:
    given_up = trio.CancelScope()

    def answer(peer: PeerId, question: bytes) -> bytes:
        if question == b"give up":
            given_up.cancel()
        return question

    world.responder = Responder(answer, lambda peer: True, Traffic().upload)
    await world.asking.ask(PEERS[0], b"?", 1)
    with given_up:
        await world.asking.ask(PEERS[0], b"give up", 10)
    assert given_up.cancelled_caught and world.ends() == [False]
    assert await world.asking.ask(PEERS[0], b"!", 10) == b"!"  # not the cancelled answer
    assert world.ends() == [False, None]
    await world.asking.end()


async def test_questions_to_one_peer_at_a_time_are_limited_but_other_peers_are_asked(
    world: World, autojump_clock: Any
) -> None:
    now, most = Counter[PeerId](), Counter[PeerId]()

    async def reach(peer: PeerId) -> bool:
        now[peer] += 1
        most[peer] = max(most[peer], now[peer])
        await trio.sleep(1)
        now[peer] -= 1
        return False

    async def ask_in_vain(peer: PeerId) -> None:
        with pytest.raises(Unanswered):
            await asking.ask(peer, b"?", 1)

    asking, began = KeptStreams(reach, world.new), trio.current_time()
    async with trio.open_nursery() as several:
        for _ in range(5 * AT_ONCE):
            several.start_soon(ask_in_vain, PEERS[0])
            several.start_soon(ask_in_vain, PEERS[1])
    assert most == {PEERS[0]: AT_ONCE, PEERS[1]: AT_ONCE} and trio.current_time() - began == pytest.approx(5)
    assert not asking._turns
    for _ in range(2 * AT_ONCE):  # cancelled questions free their places
        with trio.move_on_after(0.5):
            await ask_in_vain(PEERS[0])
    began = trio.current_time()
    await ask_in_vain(PEERS[0])
    assert trio.current_time() - began == pytest.approx(1)
