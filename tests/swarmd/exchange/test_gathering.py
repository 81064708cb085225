"""Offers and fetches between members: chosen rollouts arrive as long as one of their holders is connected."""

import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import pytest
import trio
import trio.testing

from p2p.blobs.blobs import MAX_BLOB_BYTES, pack
from p2p.engines.memory import MemoryEngine, MemorySwarm
from p2p.identity import public_key_of
from p2p.member import Member
from p2p.types import PeerId, Reason, Unanswered
from swarmd.config.config import RoundConfig
from swarmd.exchange import offers, wire
from swarmd.exchange.driver import Driver
from swarmd.exchange.events import RoundBegan
from swarmd.exchange.exchange import Exchange
from swarmd.exchange.fetching import ASK_AGAIN_S
from swarmd.exchange.market import LATE_S, MIN_FETCH_S, OTHER_AUTHORS, Market
from swarmd.experience.batch import OfferChoice
from swarmd.experience.strategies import TAKES, SharingSettings, Take, informative
from swarmd.tasks.curriculum import TINY_9, Curriculum
from swarmd.types import Author, Completion, Rollout, TaskRef
from tests.doubles import TOPIC, Clock, encoded, gossip, identity, offer


@dataclass
class Party:
    """A member with a driver, as in a daemon."""

    member: Member
    driver: Driver
    got: list[Rollout] = field(default_factory=list)
    tried: list[tuple[PeerId, bool]] = field(default_factory=list)  # (author, whether it served)

    @property
    def id(self) -> PeerId:
        return self.member.identity.peer_id

    def make(self, *ns: int, specialty: str = "bf") -> list[Rollout]:
        rng = random.Random(ns[0])
        texts = ["".join(rng.choices("abcdefgh ", k=400)) for _ in range(8)]
        return [
            Rollout(TaskRef(specialty, n), tuple(Completion(f"{n} {text}", True) for text in texts), self.id)
            for n in ns
        ]

    def share(self, *ns: int, specialty: str = "bf", curriculum: Curriculum = TINY_9) -> list[Rollout]:
        rollouts = self.make(*ns, specialty=specialty)
        offer(self.member, rollouts, curriculum=curriculum)
        return rollouts

    @property
    def market(self) -> Market:
        return self.driver.exchange.market

    @property
    def status(self) -> dict[str, int]:
        return msgspec.structs.asdict(self.market.figures())

    def begin(self) -> None:
        self.driver.put(RoundBegan(self.market.board.round + 1, {}))

    def exchange(self, curriculum: Curriculum, round: RoundConfig, sharing: SharingSettings) -> None:
        """Give the party another exchange."""
        self.driver.exchange = Exchange(curriculum, round, sharing, "m", random.Random(0))
        self._note()

    def _note(self) -> None:
        tried = self.market._tried

        def noting(author: PeerId, served: bool) -> None:
            self.tried.append((author, served))
            tried(author, served)

        self.market._tried = noting


class Uncapped(OfferChoice[offers.Offered]):
    """Chooses without caps, so that one author may fill a round. only: choose only this author's offers."""

    only: PeerId | None = None

    def __call__(
        self, offered: Sequence[offers.Offered], count: int, rng: random.Random
    ) -> Sequence[offers.Offered]:
        offered = [item for item in offered if self.only in (None, item.author)]
        return rng.sample(offered, min(count, len(offered)))


def join(swarm: MemorySwarm, number: int, wanted: int = 4, sequence: int = 1) -> Party:
    me, got = identity(number), list[Rollout]()
    exchange = Exchange(
        TINY_9, RoundConfig(external=wanted, max_age=2), SharingSettings(), "m", random.Random(number)
    )
    driver = Driver(exchange, lambda delivered: got.append(delivered.rollout), print)
    build, numbers = partial(swarm.join, me.peer_id), itertools.count(sequence)
    member = Member(me, TOPIC, build, sequence=numbers, clock=Clock(), admitted=driver.admitted)
    party = Party(member, driver, got)
    party.market.choice = Uncapped(SharingSettings(), wanted, lambda item: Author(item.author))
    driver.put(RoundBegan(1))
    party._note()
    return party


def joined(*numbers: int, wanted: int = 4) -> list[Party]:
    """Return connected members of one swarm."""
    swarm = MemorySwarm()
    return [join(swarm, number, wanted) for number in numbers]


def engine_of(party: Party) -> MemoryEngine:
    assert isinstance(party.member.engine, MemoryEngine)
    return party.member.engine


@asynccontextmanager
async def running(*parties: Party) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for party in parties:
            nursery.start_soon(party.driver.run, party.member)
        await trio.testing.wait_all_tasks_blocked()
        yield
        nursery.cancel_scope.cancel()


async def settled(seconds: float = 0.0) -> None:
    await trio.testing.wait_all_tasks_blocked()
    if seconds:
        await trio.sleep(seconds)
        await trio.testing.wait_all_tasks_blocked()


async def test_only_chosen_rollouts_are_fetched(autojump_clock: trio.testing.MockClock) -> None:
    a, b = joined(1, 2)
    async with running(b):
        shared = a.share(*range(8))
        await settled()
        got = b.got
        assert len(got) == 4 and all(rollout in shared for rollout in got)
        assert len(b.member.blobs.held) == 4  # no other blob was transferred
        assert {rollout.author for rollout in b.got} == {a.id} and b.tried == [(a.id, True)] * 4
        b.begin()
        await settled()
        assert sorted(r.ref for r in b.got) == sorted(r.ref for r in shared)


async def test_an_author_is_asked_at_the_address_in_its_offer(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a, b), told = joined(1, 2), list[tuple[PeerId, str]]()
    monkeypatch.setattr(engine_of(b), "told_of", lambda *where: told.append(where))
    at = "/ip4/11.0.0.7/tcp/4001"
    a.member.completes[offers.KIND] = lambda body: offers.addressed(body, at)
    async with running(b):
        a.share(*range(4))
        await settled()
    assert told == [(a.id, at)] * 4 and len(b.got) == 4


async def test_a_small_set_is_sent_without_a_fetch(autojump_clock: trio.testing.MockClock) -> None:
    a, b = joined(1, 2)
    small = [Rollout(TaskRef("bf", 1), (Completion("a", True), Completion("b", True)), a.id)]
    gossip(a.member, small)
    async with running(b):
        assert b.got == small and not b.member.rejected


async def test_rollouts_of_an_author_that_left_are_fetched_from_another_holder(
    autojump_clock: trio.testing.MockClock,
) -> None:
    a, b, late = joined(1, 2, 3, wanted=2)
    async with running(b):
        shared = a.share(1, 2)
        await settled()
        assert len(b.got) == 2
        engine_of(a).leave()
        async with running(late):
            await settled()
            assert sorted(r.ref for r in late.got) == sorted(r.ref for r in shared)


async def test_another_rollout_is_fetched_if_no_member_has_the_blob(
    autojump_clock: trio.testing.MockClock,
) -> None:
    a, b, c = joined(1, 2, 3, wanted=3)
    a.share(*range(8))
    engine_of(a).leave()
    async with running(c):
        await settled(3 * (ASK_AGAIN_S + 0.1))  # three fetches at a time
        assert not c.got and c.market.missed == 8
        shared = b.share(*range(20, 24))
        await settled(1)
        assert len(c.got) == 3 and all(rollout in shared for rollout in c.got)


def slow(party: Party, seconds: float, of: PeerId | None = None) -> None:
    """Delay the answers to this member by `seconds`. of: the delayed peer; by default all peers."""
    engine = engine_of(party)
    answer = engine.request

    async def request(peer: PeerId, question: bytes, limit: int) -> bytes:
        await trio.sleep(seconds if of in (None, peer) else 0)
        return await answer(peer, question, limit)

    engine.request = request  # type: ignore[method-assign]


async def test_a_new_round_does_not_wait_for_fetches_of_the_last(
    autojump_clock: trio.testing.MockClock,
) -> None:
    a, b = joined(1, 2)
    slow(b, 8.0)
    async with running(b):
        a.share(*range(8))
        await settled(MIN_FETCH_S + 0.1)
        # The time of the four fetches is over, and four more begin.
        b.begin()
        await settled(5)
        assert not b.got and b.market.missed == 4
        await settled(5)
        assert len(b.got) == 4


async def test_late_fetches_hold_no_place_and_open_fetches_are_bounded(
    autojump_clock: trio.testing.MockClock,
) -> None:
    *authors, b = joined(1, 2, 3, 4, 9)
    slow(b, 7.0)
    async with running(b):
        authors[0].share(*range(8))
        await settled(LATE_S / 2)
        for n, author in enumerate(authors[1:], 1):
            author.share(*range(10 * n, 10 * n + 8))
        await settled(LATE_S / 2 - 0.1)
        assert b.status["on_offer"] == 28
        await settled(0.2)
        assert b.status["on_offer"] == 24
        await settled(7.5)
        status = b.status
        assert (status["fetched"], status["missed"], status["on_offer"]) == (len(b.got), 0, 24)
        assert status["fetched"] == 8
        assert status["bytes_in"] == sum(each.member.blobs.sent for each in authors) > 0
        assert sum(rollout.author == authors[0].id for rollout in b.got) == 4


async def test_quick_rounds_do_not_cut_off_fresh_requests(
    autojump_clock: trio.testing.MockClock,
) -> None:
    a, b = joined(1, 2)
    slow(b, 0.5)
    async with running(b):
        await settled(MIN_FETCH_S)
        a.share(*range(8))
        for _ in range(2):
            await settled(0.1)
            b.begin()
        await settled(0.5)
        assert len(b.got) == 4 and b.market.missed == 0


async def test_a_fetched_rollout_has_its_offers_age_and_old_fetches_are_given_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    swarm = MemorySwarm()
    a, b = join(swarm, 1), join(swarm, 2, wanted=1)
    slow(b, 0.5)
    async with running(b):
        a.share(1, 2)  # the second is chosen one round after its offer
        heard = b.market.board.round
        for _ in range(2):
            await settled(0.6)
            b.begin()
        assert [rollout.heard for rollout in b.got] == [heard, heard]
        a.share(3)
        for _ in range(3):  # three rounds end before it can arrive, so it is older than max_age
            await settled(0.1)
            b.begin()
        await settled(1)
        assert len(b.got) == 2 and b.market.missed == 1
        assert b.tried == [(a.id, True)] * 2, "a fetch without time to be served counted as a failure"


@pytest.mark.parametrize("packed", [False, True], ids=["no zstd", "no rollouts"])
async def test_the_author_of_a_malformed_blob_is_blamed(
    packed: bool, autojump_clock: trio.testing.MockClock
) -> None:
    liar, b = joined(1, 2)
    blob = b"none at all"
    if packed:
        blob = pack(msgspec.msgpack.encode((public_key_of(liar.id), blob)))
    name = liar.member.blobs.put(blob)
    async with running(b):
        liar.member.publish(offers.KIND, msgspec.msgpack.encode([1, 1, [0], [5], [len(blob)], name]))
        await settled(1)
    assert not b.got and b.member.rejected == {Reason.UNDECODABLE: 1} and b.tried[-1] == (liar.id, False)


@pytest.mark.parametrize(
    "said, packed", [(("bf", 2), ["bf 1"]), (("arc_1d", 1), ["bf 1"]), (("bf", 1), ["bf 1", "bf 2"])]
)
async def test_the_author_of_a_blob_with_another_task_is_blamed_and_it_takes_no_place(
    said: tuple[str, int], packed: list[str], autojump_clock: trio.testing.MockClock
) -> None:
    liar, honest, b = joined(1, 2, 3, wanted=1)
    rollouts = [
        Rollout(TaskRef(name, int(n)), (Completion("a", True),), liar.id)
        for name, n in map(str.split, packed)
    ]
    name = liar.member.blobs.put(
        blob := pack(msgspec.msgpack.encode((public_key_of(liar.id), wire.encode(rollouts, 1, "m"))))
    )
    liar.member.publish(
        offers.KIND,
        msgspec.msgpack.encode([1, 1, [TINY_9.specialties.index(said[0])], [said[1]], [len(blob)], name]),
    )
    async with running(b):
        shared = honest.share(7)
        await settled(1)
    assert b.got == shared and b.member.rejected == {Reason.MISLABELLED: 1} and b.market.missed == 1


ANSWERS = (Completion("an answer", True), Completion("another", True))


@pytest.mark.parametrize("serves", [False, True])
async def test_the_thief_of_a_copied_offer_is_blamed_and_the_author_is_credited(
    serves: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """The thief's copy is heard and chosen before the author's offer is heard."""
    author, thief, b = joined(1, 2, 3, wanted=1)
    rollout = Rollout(TaskRef("bf", 7), ANSWERS, author.id)
    (body,), (blob,) = encoded([rollout], 1, "m", TINY_9.specialties)
    for holder in (author, thief) if serves else (author,):
        holder.member.blobs.put(blob)
    async with running(b):
        thief.member.publish(offers.KIND, body)
        thief.share(*range(20, 24))
        await settled(1)
        assert not b.got and b.member.rejected == {Reason.NOT_ITS_OWN: 1}
        assert b.status["on_offer"] == 0, "other offers of the thief were kept"
        assert b.status["set_aside"] == 1, "the thief did not lose credit as for an unserved blob"
        assert (thief.id, True) not in b.tried
        asked = b.market.fetcher.received
        author.member.publish(offers.KIND, body)
        await settled(1)
    assert b.got == [rollout] and b.member.score(author.id) == 0
    assert b.market.fetcher.received == asked, "the rollout was fetched again"


def only(party: Party, author: PeerId) -> None:
    """Let the party choose only this author's offers."""
    party.market.choice = Uncapped(SharingSettings(), 9, lambda item: Author(item.author))
    party.market.choice.only = author


@pytest.mark.parametrize("thieves", [1, OTHER_AUTHORS])
async def test_a_rollout_behind_copied_offers_counts_for_its_author(
    thieves: int, autojump_clock: trio.testing.MockClock
) -> None:
    """The thieves do not have the blob. One fetch exposes all of them, and they lose all their offers."""
    author, *others, b = joined(1, *range(3, 3 + thieves), 2, wanted=2)
    rollouts = [Rollout(TaskRef("bf", n), ANSWERS, author.id) for n in (7, 8)]
    (body,), blobs = encoded(rollouts, 1, "m", TINY_9.specialties)
    for blob in blobs:
        author.member.blobs.put(blob)
    only(b, b.id)
    # The node is not connected to the thieves or the author, so it asks the peers that offer the rollouts.
    engine_of(b).peers = list  # type: ignore[method-assign]
    async with running(b):
        for sender in (*others, author):
            sender.member.publish(offers.KIND, body)
        await settled()
        assert b.status["on_offer"] == 2 * (thieves + 1)
        b.market.serving._strangers = 3
        only(b, others[0].id)
        b.begin()
        await settled(1)
    assert b.market.serving._strangers == 4, "the author lost credit, or the thieves cost newcomers credit"
    assert sorted(r.ref for r in b.got) == [r.ref for r in rollouts]
    assert {rollout.author for rollout in b.got} == {author.id}
    assert all(b.member.score(thief.id) <= -9.9 for thief in others) and b.member.score(author.id) == 0
    assert b.status | {"on_offer": 0, "missed": 0, "fetched": 2} == b.status
    assert (author.id, True) in b.tried and not any(served for who, served in b.tried if who != author.id)


@pytest.mark.parametrize("what", ["task", "size"])
async def test_a_copied_offer_with_other_task_or_size_takes_nothing_from_the_author(
    what: str, autojump_clock: trio.testing.MockClock
) -> None:
    author, thief, b = joined(1, 2, 3, wanted=1)
    rollout = Rollout(TaskRef("bf", 7), ANSWERS, author.id)
    (body,), (blob,) = encoded([rollout], 1, "m", TINY_9.specialties)
    author.member.blobs.put(blob)
    said = msgspec.msgpack.decode(body)
    said[3 if what == "task" else 4] = [5]
    only(b, b.id)
    async with running(b):
        thief.member.publish(offers.KIND, msgspec.msgpack.encode(said))
        author.member.publish(offers.KIND, body)
        await settled()
        only(b, thief.id)
        b.driver.put(RoundBegan(1, {}))
        await settled(1)
        # If the task differs, the rollout was not chosen and takes no place. The author's offer stays.
        assert b.member.rejected[Reason.NOT_ITS_OWN] == 1 and len(b.got) == (what == "size")
        b.market.choice = Uncapped(SharingSettings(), 1, lambda item: Author(item.author))
        b.begin()
        await settled(1)
    assert b.got == [rollout] and b.member.score(author.id) == 0


async def test_sharing_take_decides_which_rollouts_are_fetched(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ["bf"]
    row = Take(informative, lambda each: [float(c.ref.specialty in wanted) for c in each])
    monkeypatch.setitem(TAKES, "own.py", row)
    a, c, d, b = joined(1, 2, 3, 4)
    b.exchange(TINY_9, RoundConfig(), SharingSettings(take="own.py"))
    b.begin()
    for number, author in enumerate((a, c, d)):
        author.share(*range(10 * number, 10 * number + 4), specialty="arc_1d")
    async with running(b):
        await settled(1)
        assert not b.got
        for number, author in enumerate((a, c, d)):
            author.share(*range(100 + 10 * number, 102 + 10 * number))
        await settled(1)
        assert [r.ref.specialty for r in b.got] == ["bf"] * 4
        wanted[:] = ["arc_1d"]
        b.begin()
        await settled(1)
        assert [r.ref.specialty for r in b.got[4:]] == ["arc_1d"] * 4
        assert max(Counter(r.author for r in b.got[4:]).values()) <= 2  # the caps hold


async def test_places_of_peers_that_serve_nothing_go_to_a_serving_author(
    autojump_clock: trio.testing.MockClock,
) -> None:
    *hostile, honest, b = joined(1, 2, 3, 4, 5)
    one = replace(TINY_9, configs={"bf": TINY_9.configs["bf"]})
    round = RoundConfig()
    b.exchange(one, round, SharingSettings())
    async with running(b):
        for party in hostile:
            for body in encoded(party.make(1), 1, "m", one.specialties)[0]:
                party.member.publish(offers.KIND, body)
        honest.share(*range(8), curriculum=one)
        await settled(2 * MIN_FETCH_S)
    assert Counter(r.author for r in b.got) == {honest.id: round.wanted}


@pytest.mark.parametrize(
    "body, reason",
    [
        (b"no offer", Reason.UNDECODABLE),
        (msgspec.msgpack.encode([1, 1, [0], [900_000_000], [100], bytes(12)]), Reason.UNKNOWN_TASK),
    ],
)
async def test_a_malformed_offer_is_reported(body: bytes, reason: Reason) -> None:
    a, b = joined(1, 2)
    a.member.publish(offers.KIND, body)
    async with running(b):
        pass
    assert b.member.rejected == {reason: 1} and not len(b.member.blobs.held)


async def test_a_holder_that_sends_more_than_offered_is_cut_off() -> None:
    a, b = joined(1, 2)
    a.member.blobs.put(bytes(MAX_BLOB_BYTES))
    engine = b.member.engine
    with pytest.raises(Unanswered):
        await engine.request(a.id, b"\x01" + next(iter(a.member.blobs.held)), 100)
