"""Fetching blobs from holders that are slow, empty, gone or lying, and serving them."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.blobs.blobs import ID_BYTES, MAX_HOLDERS, BlobStore, content_id
from p2p.blobs.fetch import (
    ASK_AGAIN_S,
    HOLDER_TIMEOUT_S,
    MAX_ANSWER_BYTES,
    MAX_ASKED,
    BlobServer,
    Fetcher,
    HolderReply,
    Want,
    answer,
    answered,
    asked,
    question,
)
from p2p.types import MAX_QUESTION_BYTES, PeerId, Reason, Unanswered

BLOB = b"blob" * 100
NAME = content_id(BLOB)
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
IDS = st.binary(min_size=ID_BYTES, max_size=ID_BYTES)
Blobs = Sequence[bytes | None]


@settings(derandomize=True, max_examples=50)
@given(st.lists(IDS, min_size=1, max_size=MAX_ASKED))
def test_questions_come_back(ids: list[bytes]) -> None:
    assert list(asked(question(ids))) == ids and len(question(ids)) <= MAX_QUESTION_BYTES


@settings(derandomize=True, max_examples=200)
@given(st.binary(max_size=200))
def test_what_is_no_question_asks_nothing(message: bytes) -> None:
    ids = asked(message)
    assert not ids or question(ids) == message


def test_nobody_is_asked_for_nothing_or_too_much() -> None:
    for ids in ([], [NAME] * (MAX_ASKED + 1), [NAME[:-1]]):
        with pytest.raises(ValueError, match="ids"):
            question(ids)


@settings(derandomize=True, max_examples=50)
@given(st.lists(st.one_of(st.none(), st.binary(min_size=1, max_size=50)), min_size=1, max_size=5))
def test_answers_come_back(blobs: list[bytes | None]) -> None:
    assert answered(answer(blobs), len(blobs)) == blobs
    assert answered(answer(blobs) + b"x", len(blobs)) is None
    assert answered(answer(blobs)[:-1], len(blobs)) is None


def test_an_answer_has_an_end() -> None:
    large = bytes(200_000)
    blobs = answered(answer([large] * 10), 10)
    assert (
        blobs is not None
        and blobs.count(large) == 5
        and blobs.count(None) == 5
        and len(answer([large] * 10)) <= MAX_ANSWER_BYTES
    )


def test_a_peer_gets_its_share_of_our_upload_and_others_theirs() -> None:
    store, now = BlobStore(), [0.0]
    store.put(BLOB)
    server = BlobServer(store, lambda: now[0], rate=10.0, burst=500.0)
    assert server(A, question([NAME])) == answer([BLOB])
    assert server(A, question([NAME])) == answer([BLOB])  # the last of it
    assert server(A, question([NAME])) == b"" and server(B, question([NAME])) == answer([BLOB])
    now[0] += 400 / 10 + 1
    assert server(A, question([NAME])) == answer([BLOB])
    assert server(C, question([bytes(ID_BYTES)])) == answer([None])
    assert server(C, b"what?") == b""


class Peers:
    """What each peer does when it is asked, and who was."""

    def __init__(self, **does: Callable[[], object]) -> None:
        self.does, self.asked, self.blamed = does, [], []  # type: ignore[var-annotated]
        self.store = BlobStore()
        self.fetcher = Fetcher(self.ask, self.store, lambda peer, reason: self.blamed.append((peer, reason)))

    async def ask(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        assert list(asked(question)) == [NAME] and limit == 4 + len(BLOB)
        self.asked.append(peer)
        found = self.does[peer]()
        if hasattr(found, "__await__"):
            found = await found  # type: ignore[misc]
        assert isinstance(found, bytes)
        return found

    async def fetch(self, holders: Sequence[PeerId]) -> bytes | None:
        return await self.fetcher.fetch(Want(NAME, len(BLOB), holders))


def gone() -> bytes:
    raise Unanswered("gone")


async def silent() -> bytes:
    await trio.sleep_forever()
    return b""


def has() -> bytes:
    return answer([BLOB])


async def test_the_first_that_has_it_is_the_last_that_is_asked(
    autojump_clock: trio.testing.MockClock,
) -> None:
    peers = Peers(a=has, b=has)
    assert await peers.fetch([A, B]) == BLOB and peers.asked == [A] and peers.store.get(NAME) == BLOB
    assert await peers.fetch([B]) == BLOB and peers.asked == [A]  # it is at hand now


async def test_holders_that_have_it_not_are_passed_over(autojump_clock: trio.testing.MockClock) -> None:
    peers = Peers(a=gone, b=lambda: answer([None]), c=has)
    assert await peers.fetch([A, B, A, C]) == BLOB and peers.asked == [A, B, C] and not peers.blamed
    assert trio.current_time() < 0.1  # nobody was waited for


async def test_what_each_holder_said_is_told(autojump_clock: trio.testing.MockClock) -> None:
    peers, replies = (
        Peers(a=silent, b=gone, c=lambda: answer([None]), d=lambda: b"", e=has),
        dict[PeerId, HolderReply](),
    )
    holders = [A, B, C, PeerId("d"), PeerId("e"), PeerId("f")]
    assert await peers.fetcher.fetch(Want(NAME, len(BLOB), holders), replies) == BLOB
    expected = [HolderReply.NOTHING, HolderReply.FAILED, HolderReply.NO, HolderReply.NOTHING, HolderReply.YES]
    assert replies == dict(zip(holders, expected, strict=False))


async def test_a_slow_holder_is_overtaken_and_hung_up_on(autojump_clock: trio.testing.MockClock) -> None:
    peers = Peers(a=silent, b=has)
    assert await peers.fetch([A, B]) == BLOB and trio.current_time() < 1


@pytest.mark.parametrize(
    "lie", [answer([b"other"]), b"no answer", b"\0", b"\xff\xff\xff\xffx", answer([BLOB, BLOB])]
)
async def test_who_answers_with_something_else_is_blamed(
    lie: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    peers = Peers(a=lambda: lie, b=has)
    assert await peers.fetch([A, B]) == BLOB and peers.blamed == [(A, Reason.NOT_ASKED_FOR)]


async def test_where_nobody_has_it_there_is_an_end(autojump_clock: trio.testing.MockClock) -> None:
    peers = Peers(a=silent, b=gone, **{str(n): lambda: b"" for n in range(40)})
    assert await peers.fetch([A, B, *(PeerId(str(n)) for n in range(40))]) is None
    assert (
        len(peers.asked) == MAX_HOLDERS + 1
        and peers.asked.count(B) == 2
        and trio.current_time() <= HOLDER_TIMEOUT_S + 1
    )


async def test_the_only_holder_is_asked_once_more_where_it_could_not_be_asked(
    autojump_clock: trio.testing.MockClock,
) -> None:
    tries = iter([gone, has])
    peers = Peers(a=lambda: next(tries)(), b=lambda: answer([None]))
    assert await peers.fetch([A, B]) == BLOB and peers.asked == [A, B, A]
    assert ASK_AGAIN_S <= trio.current_time() < ASK_AGAIN_S + 0.1
    for last, often in ((gone, 2), (lambda: answer([None]), 1)):
        peers = Peers(a=last)
        assert await peers.fetch([A]) is None and peers.asked == often * [A]


class Holders:
    """Holders of several blobs: what each was asked for, with what limit, and who is blamed.

    changed: makes a reply something else.
    """

    def __init__(
        self,
        *blobs: bytes,
        seconds: float = 0.0,
        changed: Callable[[PeerId, Blobs], Blobs] = lambda peer, found: found,
    ) -> None:
        self.blobs = {content_id(blob): blob for blob in blobs}
        self.questions, self.blamed = list[tuple[PeerId, int, int]](), list[PeerId]()
        self.fetcher = Fetcher(self._ask, BlobStore(), lambda peer, reason: self.blamed.append(peer))
        self.found: dict[bytes, bytes | None] = {}
        self.asked: Sequence[bytes] = ()  # the ids of the latest question
        self._seconds, self._changed = seconds, changed

    async def _ask(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        self.asked = asked(question)
        self.questions.append((peer, len(self.asked), limit))
        await trio.sleep(self._seconds)
        reply = answer(self._changed(peer, [self.blobs.get(name) for name in asked(question)]))
        if len(reply) > limit:
            raise Unanswered("replies too much")
        return reply

    async def fetch(self, blob: bytes, *holders: PeerId, size: int | None = None) -> None:
        self.found[blob] = await self.fetcher.fetch(Want(content_id(blob), size or len(blob), holders))


async def test_what_is_wanted_of_one_holder_at_one_moment_is_one_question(
    autojump_clock: trio.testing.MockClock,
) -> None:
    blobs = [bytes([n]) * 3_000 for n in range(6)]
    holders = Holders(*blobs[:-1], seconds=0.1)
    async with trio.open_nursery() as nursery:
        for blob in blobs[1:]:
            nursery.start_soon(holders.fetch, blob, B if blob is blobs[2] else A)
        await trio.sleep(0.05)  # the others have been asked for and have not come
        nursery.start_soon(holders.fetch, blobs[0], A)
    assert (
        holders.found == {blob: blob if blob is not blobs[5] else None for blob in blobs}
        and not holders.blamed
    )
    assert sorted(holders.questions) == [(A, 1, 4 + 3_000), (A, 4, MAX_ANSWER_BYTES), (B, 1, 4 + 3_000)]


async def test_an_answer_to_several_is_not_too_long(autojump_clock: trio.testing.MockClock) -> None:
    blobs = [bytes([n]) * 50_000 for n in range(5)]
    holders = Holders(*blobs)
    async with trio.open_nursery() as nursery:
        for blob in blobs:
            nursery.start_soon(holders.fetch, blob, A)
    assert sorted(count for _, count, _ in holders.questions) == [1, 2, 2] and not holders.blamed


async def test_a_fetch_given_up_takes_nothing_from_those_who_joined_its_question(
    autojump_clock: trio.testing.MockClock,
) -> None:
    blobs = (b"first", b"second", b"third")
    holders, scopes = Holders(*blobs, seconds=0.1), {blob: trio.CancelScope() for blob in blobs}

    async def fetch(blob: bytes) -> None:
        with scopes[blob]:
            await holders.fetch(blob, A)

    async with trio.open_nursery() as nursery:
        for blob in blobs:
            nursery.start_soon(fetch, blob)
        while not holders.questions:
            await trio.lowlevel.checkpoint()
        assert holders.questions[0][1] == 3
        given_up = holders.blobs[holders.asked[0]]  # whoever wants the first id asks for all
        scopes[given_up].cancel()
    assert len(holders.questions) == 2 and holders.found == {blob: blob for blob in blobs if blob != given_up}
    assert holders.fetcher._unsent == {} and not holders.blamed


async def test_a_lie_about_one_of_several_is_blamed_once_and_all_are_had_elsewhere(
    autojump_clock: trio.testing.MockClock,
) -> None:
    holders = Holders(
        b"first", b"second", changed=lambda peer, found: [found[0], b"other!"] if peer == A else found
    )
    async with trio.open_nursery() as nursery:
        for blob in (b"first", b"second"):
            nursery.start_soon(holders.fetch, blob, A, B)
    assert holders.found == {b"first": b"first", b"second": b"second"} and holders.blamed == [A]


async def test_an_offer_that_belittles_a_blob_does_not_cost_us_those_asked_for_with_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    large, small = b"large" * 20_000, b"small"
    holders = Holders(large, small)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(holders.fetch, large, A, size=10))
        nursery.start_soon(holders.fetch, small, A)
    assert holders.found == {large: None, small: small} and not holders.blamed


async def test_where_the_likeliest_has_it_not_the_others_are_hardly_waited_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    peers = Peers(a=lambda: answer([None]), **{str(n): silent for n in range(10)}, b=has)
    start = trio.current_time()
    assert (
        await peers.fetch([A, *(PeerId(str(n)) for n in range(10)), B]) == BLOB
        and trio.current_time() - start < 1
    )
    peers = Peers(a=lambda: answer([None]), b=silent)
    start = trio.current_time()
    # A silent one does not keep the place
    assert await peers.fetch([A, B]) is None and trio.current_time() - start < 1.5


async def test_nor_where_the_likeliest_says_so_after_all_were_asked(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def late() -> bytes:
        await trio.sleep(3)
        return answer([None])

    peers = Peers(a=late, b=silent)
    start = trio.current_time()
    assert await peers.fetch([A, B]) is None and trio.current_time() - start < 3 + ASK_AGAIN_S + 0.1
