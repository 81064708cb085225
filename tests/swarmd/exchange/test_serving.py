"""A peer that offers rollouts but does not serve them is set aside.

A peer that was restarted, left, is slow or is behind NAT is not set aside.
"""

import random
from collections.abc import Sequence

import pytest
import trio
import trio.testing

from p2p.engines.memory import MemorySwarm
from p2p.types import PeerId, Reason
from swarmd.exchange import offers
from swarmd.exchange.fetching import HolderReply
from swarmd.exchange.market import MIN_FETCH_S
from swarmd.exchange.offers import Offered
from swarmd.exchange.serving import FIRST_ASIDE_S, HARD, SOFT, STRANGERS_CREDIT, Serving
from swarmd.types import TaskRef
from tests.swarmd.exchange.test_gathering import Party, engine_of, join, joined, running, settled, slow
from tests.swarmd.exchange.test_offers import uniform

A, B = PeerId("a"), PeerId("b")


def offered(author: PeerId, *ns: int) -> list[Offered]:
    return [Offered(author, TaskRef("bf", n), f"{author} {n}".encode(), 10, author) for n in ns]


def fail(serving: Serving, author: PeerId, times: int, at: float, cost: int = HARD) -> list[bool]:
    return [serving.failed(author, cost, at + n, at + n + 0.5) for n in range(times)]


def chosen(serving: Serving, items: Sequence[Offered], count: int, now: float) -> set[PeerId]:
    return {item.author for item in serving.choose(items, count, random.Random(0), uniform, now)}


def test_a_serving_author_is_set_aside_after_three_refusals() -> None:
    serving = Serving(4)
    for n in range(3):
        serving.served(A, float(n))
    assert fail(serving, A, 3, 10.0) == [False, False, True] and not serving.serves(A)
    items = offered(A, *range(8)) + offered(B, *range(8))
    assert chosen(serving, items, 8, 13.0) == {B}
    assert chosen(serving, items, 16, 13.0 + FIRST_ASIDE_S) == {A, B}
    # Now it is set aside for twice as long.
    assert fail(serving, A, 1, 30.0) == [True] and chosen(serving, items, 16, 31.0 + FIRST_ASIDE_S) == {B}
    serving.served(A, 60.0)
    assert serving.serves(A) and not serving.doubtful(A) and chosen(serving, items, 16, 60.0) == {A, B}


def test_credit_does_not_change_the_choice_while_all_serve() -> None:
    serving, items = Serving(4), offered(A, *range(8)) + offered(B, *range(8))
    serving.served(A, 0.0)
    assert serving.choose(items, 4, random.Random(5), uniform, 1.0) == uniform(items, 4, random.Random(5))


def test_an_author_that_serves_one_in_four_requests_is_not_set_aside() -> None:
    """Two nodes behind NAT can fetch from each other only blobs that a third node has fetched.

    In a swarm of ten, five of them behind NAT, about 28 of 100 fetches succeed.
    """
    for seed in range(5):
        rng, serving, aside = random.Random(seed), Serving(4), 0
        serving.served(A, 0.0)
        for n in range(1, 1000):
            if not chosen(serving, offered(A, n), 1, n * 10.0):
                aside += 1
            elif rng.random() < 0.28:
                serving.served(A, n * 10.0)
            else:
                serving.failed(A, SOFT, n * 10.0 - 1, n * 10.0)
        assert aside < 400


def test_an_author_that_failed_is_tried_once_a_round_until_it_serves_again() -> None:
    serving, items = Serving(4), offered(A, *range(40)) + offered(B, *range(8))
    for author in (A, B):
        serving.served(author, 0.0)
    fail(serving, A, 1, 1.0)
    assert serving.doubtful(A) and not serving.doubtful(B)

    def authors(count: int, tried: int = 0) -> list[PeerId]:
        return [item.author for item in serving.choose(items, count, random.Random(0), uniform, 2.0, tried)]

    assert authors(4, tried=4) == [B] * 4
    assert authors(4) == [B] * 4 + [A] and authors(0) == []  # A is tried once a round
    # It also gets places that the other authors leave free.
    assert authors(10) == [B] * 8 + [A] * 2 and authors(10, tried=1) == [B] * 8 + [A]
    serving.next_round()
    assert authors(0) == [A]
    serving.served(A, 3.0)
    assert not serving.on_trial(A) and len(authors(4)) == 4


@pytest.mark.parametrize(("wanted", "quarter"), [(4, 1), (8, 2), (1, 1)])
def test_after_failures_new_authors_together_get_a_quarter_of_a_round(wanted: int, quarter: int) -> None:
    serving, new = Serving(wanted), [PeerId(f"n{n}") for n in range(100)]
    serving.served(A, 0.0)
    for name in new[:STRANGERS_CREDIT]:
        fail(serving, name, 1, 1.0)
    items = offered(A, *range(40)) + [
        item for name in new[STRANGERS_CREDIT:] for item in offered(name, *range(40))
    ]
    assert serving.doubtful(new[-1]) and not serving.doubtful(A)
    for _ in range(20):
        goes = [serving.choose(items, count, random.Random(1), uniform, 2.0) for count in (4, 1, 1, 4)]
        authors = [item.author for go in goes for item in go]
        assert len(authors) == 10 and authors.count(A) == 10 - quarter
        serving.next_round()
    serving.served(new[-1], 3.0)
    assert len(chosen(serving, items, 40, 4.0)) > 10  # new authors are trusted again
    fail(serving, new[-2], 1, 5.0)
    assert len(chosen(serving, items, 40, 6.0)) == 2 + quarter, (
        "another failure did not limit new authors again"
    )


def test_while_no_author_serves_new_authors_are_not_limited() -> None:
    serving = Serving(4)
    for n in range(STRANGERS_CREDIT):
        fail(serving, PeerId(f"n{n}"), 1, 1.0)
    assert (
        len(chosen(serving, [item for n in range(20, 30) for item in offered(PeerId(str(n)), 1)], 4, 2.0))
        == 4
    )


def test_silence_counts_against_an_author_only_if_other_peers_answered() -> None:
    serving = Serving(4)
    assert (
        serving.cost(HolderReply.NOTHING, True, 5.0) == SOFT
        and serving.cost(HolderReply.NO, False, 5.0) == HARD
    )
    serving.served(A, 6.0)
    assert serving.cost(HolderReply.NOTHING, True, 10.0) == HARD
    assert serving.cost(HolderReply.FAILED, False, 10.0) == SOFT  # the author is not connected
    assert serving.cost(HolderReply.NOTHING, True, 66.0) == SOFT


# Tests with members over the memory engine.


async def serve(a: Party, b: Party) -> None:
    """Let b fetch a round's rollouts of a."""
    a.share(*range(900, 904))
    await settled(1)
    assert len(b.got) == 4
    b.got.clear()
    b.begin()


async def test_a_restart_counts_as_one_failure(autojump_clock: trio.testing.MockClock) -> None:
    swarm = MemorySwarm()
    a, b = join(swarm, 1), join(swarm, 2)
    async with running(b):
        await serve(a, b)
        a.share(*range(12))
        again = join(swarm, 1, sequence=100)  # the same key without the earlier blobs
        await settled(5)
        assert b.market.missed == 4 and not b.got and b.status["on_offer"] == 0
        shared = again.share(*range(20, 28))
        await settled(1)
        assert len(b.got) == 4 and all(rollout in shared for rollout in b.got)
    assert b.member.score(a.id) == 0 and not b.member.rejected


async def test_an_author_that_left_is_not_blamed(autojump_clock: trio.testing.MockClock) -> None:
    a, b, _ = joined(1, 2, 3)  # while another member is connected
    async with running(b):
        await serve(a, b)
        a.share(*range(60))
        engine_of(a).leave()
        await settled(100)
    assert b.market.missed > 20 and b.member.score(a.id) == 0 and not b.member.rejected


async def test_a_serving_author_that_refuses_its_offer_is_blamed_a_little(
    autojump_clock: trio.testing.MockClock,
) -> None:
    a, b = joined(1, 2)
    async with running(b):
        await serve(a, b)
        for n in range(3):
            a.member.publish(
                offers.KIND, offers._body(1, [(0, 10 * n + i, 100, bytes([n, i]) * 6) for i in range(8)])
            )
            await settled(1)
    assert b.member.rejected == {Reason.UNSERVED: 1} and b.tried[-1] == (a.id, False)
    assert -2 <= b.member.score(a.id) < 0  # but not lower


async def test_a_silent_author_is_blamed_if_another_serves(
    autojump_clock: trio.testing.MockClock,
) -> None:
    a, other, b = joined(1, 2, 3)
    async with running(b):
        await serve(a, b)
        slow(b, 100.0, of=a.id)
        for n in range(4):
            a.share(10 * n, 10 * n + 1)
            other.share(10 * n + 2, 10 * n + 3)
            await settled(MIN_FETCH_S + 1)
            b.begin()
        await settled(MIN_FETCH_S + 1)
    assert b.member.rejected == {Reason.UNSERVED: 1} and {r.author for r in b.got} == {other.id}


async def test_offering_another_authors_blob_harms_only_the_thief(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The thief offers an honest author's ids with sizes that are too small."""
    a, b, liar = joined(1, 2, 3)
    async with running(b):
        shared = []
        for n in range(4):
            shared += a.share(*range(10 * n, 10 * n + 8))
            names = list(a.member.blobs.held)[-8:]
            liar.member.publish(
                offers.KIND, offers._body(1, [(0, 1000 + 10 * n + i, 1, bytes([n, i]) * 6) for i in range(8)])
            )
            liar.member.publish(
                offers.KIND,
                offers._body(1, [(0, 2000 + 10 * n + i, 1, name) for i, name in enumerate(names)]),
            )
            await settled(6)
            b.begin()
            await settled(6)
    assert b.member.score(a.id) == 0
    assert sum(rollout.author == a.id for rollout in b.got) >= 16 and all(
        rollout in shared for rollout in b.got
    )
