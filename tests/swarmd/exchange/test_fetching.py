"""Fetching blobs from holders that are slow, have none, are gone or lie; and serving blobs."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.blobs.blobs import ID_BYTES, MISSING, BlobStore, content_id
from p2p.types import PeerId, Reason, Unanswered
from swarmd.exchange import offers
from swarmd.exchange.events import Ask, Cancel, Output, Report
from swarmd.exchange.fetching import (
    ASK_AGAIN_S,
    HOLDER_TIMEOUT_S,
    MAX_HOLDERS,
    Fetch,
    Fetcher,
    HolderReply,
)
from swarmd.exchange.offers import Offered
from swarmd.types import TaskRef

BLOB = b"blob" * 100
NAME = content_id(BLOB)
ASKED = b"\1" + NAME
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


@settings(derandomize=True, max_examples=200)
@given(st.binary(max_size=2 * ID_BYTES))
def test_a_malformed_request_gets_no_blob(message: bytes) -> None:
    reply = BlobStore().answer(A, message)
    assert reply == (MISSING if message[:1] == b"\1" and len(message) == 1 + ID_BYTES else b"")


def test_a_requested_blob_is_served_and_counted() -> None:
    store = BlobStore()
    store.put(BLOB)
    assert [store.answer(peer, ASKED) for peer in (A, B)] == [BLOB, BLOB] and store.sent == 2 * len(BLOB)


def test_a_fetch_without_an_open_question_ends_even_if_none_may_be_asked() -> None:
    item = Offered(A, TaskRef("bf", 1), NAME, len(BLOB), A)
    fetch = Fetch(item, len(BLOB), [A, B], since=0.0, ends=9.0)
    assert fetch.due(room=False) == 9.0 and fetch.due(room=True) == -math.inf


class Peers:
    """Drives a Fetcher for one blob at a time, with the given reactions of peers; records who was asked."""

    def __init__(self, **does: Callable[[], object]) -> None:
        self.does, self.asked, self.blamed = does, list[PeerId](), list[tuple[PeerId, Reason]]()
        self._outputs: list[Output] = []
        self.fetcher = Fetcher(self._outputs.append)
        self._scopes: dict[int, trio.CancelScope] = {}
        self.limits: list[int] = []

    async def ask(self, peer: PeerId, question: bytes) -> bytes:
        found = self.does[peer]()
        if hasattr(found, "__await__"):
            found = await found
        assert isinstance(found, bytes)
        return found

    async def fetch(
        self, holders: Sequence[PeerId], replies: dict[PeerId, HolderReply] | None = None, blob: bytes = BLOB
    ) -> bytes | None:
        item = Offered(A, TaskRef("bf", 1), content_id(blob), len(blob), A)
        fetch = Fetch(item, len(blob), holders, trio.current_time())
        fetch.replies = {} if replies is None else replies
        self.fetcher.begin(fetch)
        answers, answered = trio.open_memory_channel[tuple[int, bytes | None]](100)

        async def ask(question: Ask) -> None:
            reply = None
            with self._scopes[question.number]:
                with suppress(Unanswered):
                    reply = await self.ask(question.peer, question.question)
                answers.send_nowait((question.number, reply))

        def perform() -> None:
            for output in self._outputs:
                match output:
                    case Ask(number, peer, question, limit):
                        assert (question, limit) == (b"\1" + item.id, fetch.size)
                        self.asked.append(peer)
                        self._scopes[number] = trio.CancelScope()
                        nursery.start_soon(ask, output)
                    case Cancel(number):
                        self._scopes[number].cancel()
                    case Report(peer, reason):
                        self.blamed.append((peer, reason))
            self._outputs.clear()

        async with trio.open_nursery() as nursery:
            while True:
                over = self.fetcher.advance(trio.current_time())
                perform()
                if over:
                    return None
                assert self.fetcher.due > trio.current_time()
                with trio.move_on_at(self.fetcher.due):
                    number, reply = await answered.receive()
                    answer = None if reply is None else offers.decode_blob(reply)
                    found = self.fetcher.answered(number, answer, trio.current_time())
                    if found is not None:
                        perform()
                        return found[1].data


def gone() -> bytes:
    raise Unanswered("gone")


async def silent() -> bytes:
    await trio.sleep_forever()
    return b""


def has() -> bytes:
    return BLOB


async def test_no_further_holder_is_asked_after_the_blob_was_found(
    autojump_clock: trio.testing.MockClock,
) -> None:
    peers = Peers(a=has, b=has)
    assert await peers.fetch([A, B]) == BLOB and peers.asked == [A]


async def test_holders_without_the_blob_are_skipped_at_once(autojump_clock: trio.testing.MockClock) -> None:
    peers = Peers(a=gone, b=lambda: MISSING, c=has)
    assert await peers.fetch([A, B, A, C]) == BLOB and peers.asked == [A, B, C] and not peers.blamed
    assert trio.current_time() < 0.1  # without waiting for a peer


async def test_the_reply_of_each_holder_is_reported(autojump_clock: trio.testing.MockClock) -> None:
    peers, replies = (
        Peers(a=silent, b=gone, c=lambda: MISSING, d=lambda: b"", e=has),
        dict[PeerId, HolderReply](),
    )
    holders = [A, B, C, PeerId("d"), PeerId("e"), PeerId("f")]
    assert await peers.fetch(holders, replies) == BLOB
    expected = [HolderReply.NOTHING, HolderReply.FAILED, HolderReply.NO, HolderReply.NOTHING, HolderReply.YES]
    assert replies == dict(zip(holders, expected, strict=False))


async def test_the_next_holder_is_asked_instead_of_a_slow_one(autojump_clock: trio.testing.MockClock) -> None:
    peers = Peers(a=silent, b=has)
    assert await peers.fetch([A, B]) == BLOB and trio.current_time() < 1


@pytest.mark.parametrize("lie", [b"other", b"\1", BLOB + b"x", BLOB[:-1]])
async def test_a_holder_that_answers_with_another_blob_is_blamed(
    lie: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    peers = Peers(a=lambda: lie, b=has)
    assert await peers.fetch([A, B]) == BLOB and peers.blamed == [(A, Reason.NOT_ASKED_FOR)]


async def test_a_fetch_ends_if_no_holder_has_the_blob(autojump_clock: trio.testing.MockClock) -> None:
    peers = Peers(a=silent, b=gone, **{str(n): lambda: b"" for n in range(40)})
    assert await peers.fetch([A, B, *(PeerId(str(n)) for n in range(40))]) is None
    assert (
        len(peers.asked) == MAX_HOLDERS + 1
        and peers.asked.count(B) == 2
        and trio.current_time() <= HOLDER_TIMEOUT_S + 1
    )


async def test_the_only_holder_is_asked_again_after_a_failed_request(
    autojump_clock: trio.testing.MockClock,
) -> None:
    tries = iter([gone, has])
    peers = Peers(a=lambda: next(tries)(), b=lambda: MISSING)
    assert await peers.fetch([A, B]) == BLOB and peers.asked == [A, B, A]
    assert ASK_AGAIN_S <= trio.current_time() < ASK_AGAIN_S + 0.1
    for last, often in ((gone, 2), (lambda: MISSING, 1)):
        peers = Peers(a=last)
        assert await peers.fetch([A]) is None and peers.asked == often * [A]


async def test_each_blob_is_requested_separately_with_its_offered_size_as_limit(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """So a blob that is larger than offered does not affect other blobs."""
    large = Peers(a=gone)  # the engine truncates the answer
    assert await large.fetch([A]) is None and large.asked == [A, A] and not large.fetcher.received
    small = Peers(a=has)
    assert await small.fetch([A]) == BLOB and small.fetcher.received == len(BLOB)


async def test_a_refusal_of_the_most_likely_holder_shortens_the_wait_for_the_next(
    autojump_clock: trio.testing.MockClock,
) -> None:
    peers = Peers(a=lambda: MISSING, **{str(n): silent for n in range(10)}, b=has)
    start = trio.current_time()
    assert (
        await peers.fetch([A, *(PeerId(str(n)) for n in range(10)), B]) == BLOB
        and trio.current_time() - start < 1
    )
    peers = Peers(a=lambda: MISSING, b=silent)
    start = trio.current_time()
    # A silent holder does not keep its place.
    assert await peers.fetch([A, B]) is None and trio.current_time() - start < 1.5


async def test_a_late_refusal_of_the_most_likely_holder_also_shortens_the_wait(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def late() -> bytes:
        await trio.sleep(3)
        return MISSING

    peers = Peers(a=late, b=silent)
    start = trio.current_time()
    assert await peers.fetch([A, B]) is None and trio.current_time() - start < 3 + ASK_AGAIN_S + 0.1


async def test_if_the_most_likely_holder_is_gone_the_next_holders_get_their_full_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def late() -> bytes:
        await trio.sleep(5)
        return BLOB

    assert await Peers(a=gone, b=late).fetch([A, B]) == BLOB
