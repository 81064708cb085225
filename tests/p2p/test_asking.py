"""The protocol of questions and answers, byte by byte, and how little one who means ill can tie up."""

import struct
from typing import Any

import pytest
import trio
import trio.testing

from p2p.engines.asking import AT_ONCE, PATIENCE, SERVED_AT_ONCE, SERVED_EACH, Broken, Desk, Turns, ask
from p2p.identity import Identity
from p2p.types import MAX_QUESTION, PeerId, Unanswered

pytestmark = pytest.mark.trio
PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(20)]


class End:
    """One end of a stream in memory. Implements `asking.Stream`."""

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


def desk(answer: Any = lambda peer, question: question[::-1]) -> Desk:
    return Desk(answer, lambda peer: peer == PEERS[13])


@pytest.mark.parametrize("step", [1, 3, 10_000])
async def test_the_bytes_are_those_of_the_document_however_they_are_cut(step: int) -> None:
    theirs, ours = pair()
    done: list[bool] = []

    async def serve() -> None:
        done.append(await desk().serve(PEERS[0], ours))

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


async def test_what_is_asked_is_answered() -> None:
    for question in (b"", b"x" * MAX_QUESTION):
        theirs, ours = pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(desk().serve, PEERS[0], ours)
            assert await ask(End(theirs), question, len(question)) == question[::-1]
            await theirs.aclose()


@pytest.mark.parametrize(
    "answer",
    [b"", b"\x00\x00", b"\x00\x00\x00\x05hell", b"\x00\x00\x00\x06hello!", b"\xff\xff\xff\xffhello", b"\x00\x00\x00\x05hello!"],
    ids=["nothing", "no length", "cut short", "over the limit", "far over it", "more than announced"],
)
async def test_an_answer_that_is_none(answer: bytes) -> None:
    theirs, ours = pair()
    async with trio.open_nursery() as nursery:

        async def lie() -> None:
            await theirs.receive_some(100)
            await theirs.send_all(answer)
            await theirs.aclose()

        nursery.start_soon(lie)
        with pytest.raises(Unanswered):
            await ask(ours, b"?", 5)


async def test_no_more_than_the_limit_is_ever_waited_for() -> None:
    theirs, ours = pair()
    await theirs.send_all(struct.pack(">I", 2**30))
    with trio.fail_after(1), pytest.raises(Unanswered, match="over 5"):
        await ask(ours, b"?", 5)
    with pytest.raises(Unanswered, match="4097"):
        await ask(ours, b"?" * (MAX_QUESTION + 1), 5)


@pytest.mark.parametrize("question", [struct.pack(">I", MAX_QUESTION + 1), b"\x00\x00\x00\x01??", b""], ids=["too long", "more", "none"])
async def test_a_question_that_is_none_is_cut_off(question: bytes) -> None:
    theirs, ours = pair()
    await theirs.send_all(question)
    if not question:
        await theirs.aclose()

    def answer(peer: PeerId, question: bytes) -> bytes:
        raise AssertionError(question)

    assert not await desk(answer).serve(PEERS[0], ours)


async def test_who_is_slow_is_cut_off(autojump_clock: Any) -> None:
    """In asking, in taking the answer, in closing: a place is held for no longer than twice the patience."""
    served = desk(lambda peer, question: b"x" * 1_000_000)
    full = trio.testing.lockstep_stream_pair  # takes nothing that is not read

    async def drip(stream: Any) -> None:
        for n in range(100):
            await stream.send_all(struct.pack(">I", 1000) if n == 0 else b"x")
            await trio.sleep(1.0)

    async def take_nothing(stream: Any) -> None:
        await stream.send_all(b"\x00\x00\x00\x01?")

    async def stay(stream: Any) -> None:
        await stream.send_all(b"\x00\x00\x00\x01?")
        while await stream.receive_some(100_000):
            pass

    for attack in (drip, take_nothing, stay):
        theirs, ours = full()
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attack, theirs)
            assert not await served.serve(PEERS[0], End(ours))
            nursery.cancel_scope.cancel()
        assert trio.current_time() - began <= 2 * PATIENCE + 0.01
    assert not served._open


async def test_places_are_few_and_come_back(autojump_clock: Any) -> None:
    served, turned_away = desk(), 0

    async def come(peer: PeerId) -> None:
        nonlocal turned_away
        began = trio.current_time()
        assert not await served.serve(peer, pair()[1])  # asks nothing
        turned_away += trio.current_time() == began

    async with trio.open_nursery() as nursery:
        for peer in PEERS[:9]:  # 9 * 10 come
            for _ in range(10):
                nursery.start_soon(come, peer)
        await trio.testing.wait_all_tasks_blocked()
        assert served._open.total() == SERVED_AT_ONCE and max(served._open.values()) == SERVED_EACH
        assert turned_away == 90 - SERVED_AT_ONCE
    assert not served._open
    assert not await served.serve(PEERS[13], pair()[1])  # shut out


async def test_an_answer_that_fails_leaves_its_place() -> None:
    def fail(peer: PeerId, question: bytes) -> bytes:
        raise RuntimeError

    theirs, ours = pair()
    served = desk(fail)
    await theirs.send_all(b"\x00\x00\x00\x01?")
    with pytest.raises(RuntimeError):
        await served.serve(PEERS[0], ours)
    assert not served._open


async def test_one_peer_is_asked_a_few_questions_at_a_time() -> None:
    turns, now, most = Turns(), 0, 0

    async def one(peer: PeerId) -> None:
        nonlocal now, most
        async with turns.turn(peer):
            now += peer == PEERS[0]
            most = max(most, now)
            await trio.sleep(0.001)
            now -= peer == PEERS[0]

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(one, PEERS[0])
            nursery.start_soon(one, PEERS[1])
    with trio.move_on_after(0):
        await one(PEERS[0])
    assert most == AT_ONCE and not turns._peers
