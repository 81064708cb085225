"""Fetching blobs from holders that are slow, empty, gone or lying, and serving them."""

from collections.abc import Callable, Sequence

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.blobs.blobs import ID_BYTES, BlobStore, content_id
from p2p.blobs.fetch import (
    ASK_AGAIN_S,
    HOLDER_TIMEOUT_S,
    MAX_HOLDERS,
    MISSING,
    BlobServer,
    Fetcher,
    HolderReply,
    Want,
)
from p2p.types import PeerId, Reason, Unanswered

BLOB = b"blob" * 100
NAME = content_id(BLOB)
ASKED = b"\1" + NAME
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


@settings(derandomize=True, max_examples=200)
@given(st.binary(max_size=2 * ID_BYTES))
def test_what_is_no_question_gets_nothing(message: bytes) -> None:
    reply = BlobServer(BlobStore())(A, message)
    assert reply == (MISSING if message[:1] == b"\1" and len(message) == 1 + ID_BYTES else b"")


def test_a_blob_is_given_and_counted() -> None:
    store = BlobStore()
    store.put(BLOB)
    server = BlobServer(store)
    assert [server(peer, ASKED) for peer in (A, B)] == [BLOB, BLOB] and server.sent == 2 * len(BLOB)


class Peers:
    """What each peer does when it is asked, and who was."""

    def __init__(self, **does: Callable[[], object]) -> None:
        self.does, self.asked, self.blamed = does, [], []  # type: ignore[var-annotated]
        self.store = BlobStore()
        self.fetcher = Fetcher(self.ask, self.store, lambda peer, reason: self.blamed.append((peer, reason)))

    async def ask(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        assert question == ASKED and limit == len(BLOB)
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
    return BLOB


async def test_no_holder_is_asked_after_one_has_the_blob(
    autojump_clock: trio.testing.MockClock,
) -> None:
    peers = Peers(a=has, b=has)
    assert await peers.fetch([A, B]) == BLOB and peers.asked == [A] and peers.store.get(NAME) == BLOB
    assert await peers.fetch([B]) == BLOB and peers.asked == [A]  # it is at hand now


async def test_holders_without_the_blob_are_passed_over(autojump_clock: trio.testing.MockClock) -> None:
    peers = Peers(a=gone, b=lambda: MISSING, c=has)
    assert await peers.fetch([A, B, A, C]) == BLOB and peers.asked == [A, B, C] and not peers.blamed
    assert trio.current_time() < 0.1  # nobody was waited for


async def test_the_reply_of_each_holder_is_reported(autojump_clock: trio.testing.MockClock) -> None:
    peers, replies = (
        Peers(a=silent, b=gone, c=lambda: MISSING, d=lambda: b"", e=has),
        dict[PeerId, HolderReply](),
    )
    holders = [A, B, C, PeerId("d"), PeerId("e"), PeerId("f")]
    assert await peers.fetcher.fetch(Want(NAME, len(BLOB), holders), replies) == BLOB
    expected = [HolderReply.NOTHING, HolderReply.FAILED, HolderReply.NO, HolderReply.NOTHING, HolderReply.YES]
    assert replies == dict(zip(holders, expected, strict=False))


async def test_a_slow_holder_is_overtaken_and_hung_up_on(autojump_clock: trio.testing.MockClock) -> None:
    peers = Peers(a=silent, b=has)
    assert await peers.fetch([A, B]) == BLOB and trio.current_time() < 1


@pytest.mark.parametrize("lie", [b"other", b"\1", BLOB + b"x", BLOB[:-1]])
async def test_a_holder_that_answers_with_something_else_is_blamed(
    lie: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    peers = Peers(a=lambda: lie, b=has)
    assert await peers.fetch([A, B]) == BLOB and peers.blamed == [(A, Reason.NOT_ASKED_FOR)]


async def test_a_fetch_ends_where_nobody_has_the_blob(autojump_clock: trio.testing.MockClock) -> None:
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
    peers = Peers(a=lambda: next(tries)(), b=lambda: MISSING)
    assert await peers.fetch([A, B]) == BLOB and peers.asked == [A, B, A]
    assert ASK_AGAIN_S <= trio.current_time() < ASK_AGAIN_S + 0.1
    for last, often in ((gone, 2), (lambda: MISSING, 1)):
        peers = Peers(a=last)
        assert await peers.fetch([A]) is None and peers.asked == often * [A]


async def test_a_holder_is_asked_for_each_blob_alone_and_for_no_more_than_was_offered(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Therefore a blob that is larger than its offer says costs nothing else."""
    large, small = b"large" * 20_000, b"small"
    held = {content_id(blob): blob for blob in (large, small)}
    limits: list[int] = []

    async def ask(_peer: PeerId, question: bytes, limit: int) -> bytes:
        limits.append(limit)
        await trio.sleep(0.1)
        reply = held[question[1:]]
        if len(reply) > limit:
            raise Unanswered("replies too much")
        return reply

    fetcher, found = Fetcher(ask, BlobStore(), lambda *_: None), dict[bytes, bytes | None]()

    async def fetch(blob: bytes, size: int) -> None:
        found[blob] = await fetcher.fetch(Want(content_id(blob), size, [A]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetch, large, 10)
        nursery.start_soon(fetch, small, len(small))
    assert found == {large: None, small: small} and sorted(limits) == [5, 10, 10]


async def test_a_refusal_of_the_likeliest_shortens_the_wait_for_others(
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
    # A silent one does not keep the place
    assert await peers.fetch([A, B]) is None and trio.current_time() - start < 1.5


async def test_a_late_refusal_of_the_likeliest_shortens_the_wait_too(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def late() -> bytes:
        await trio.sleep(3)
        return MISSING

    peers = Peers(a=late, b=silent)
    start = trio.current_time()
    assert await peers.fetch([A, B]) is None and trio.current_time() - start < 3 + ASK_AGAIN_S + 0.1


async def test_a_likeliest_holder_that_is_gone_leaves_the_others_their_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def late() -> bytes:
        await trio.sleep(5)
        return BLOB

    assert await Peers(a=gone, b=late).fetch([A, B]) == BLOB
