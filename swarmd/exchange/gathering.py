"""Fetches the rollouts that a round will train on, and only those. Runs in the daemon.

Each round needs a number of rollouts. They are chosen from the offers on the board when the round begins, by
`[sharing] take` (`experience.batch.OfferChoice`). If there are too few, offers that arrive during the round
are used too. If a rollout cannot be fetched, is late, or is not of the task that was offered, another one
takes its place. Fetching goes on while our own rollouts are generated; no round waits for it. A fetched
rollout is handed on like a gossiped one.
"""

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import trio

from p2p.blobs.fetch import HEDGE_S, HolderReplies, HolderReply, Want
from p2p.member import Member
from p2p.types import Envelope, PeerId, Reason, ReceivedBody
from swarmd.config.config import RoundConfig
from swarmd.config.own_strategy import load_take
from swarmd.exchange import offers, wire
from swarmd.exchange.offers import Board, Offered
from swarmd.exchange.serving import HARD, Serving
from swarmd.experience.batch import OfferChoice
from swarmd.experience.strategies import SharingSettings
from swarmd.tasks.curriculum import Curriculum
from swarmd.types import Author, Lead

# The time of a fetch even if its round is over: rounds of a tiny model are shorter than a round trip.
MIN_FETCH_S = 5.0
# The time of a fetch from a doubtful author (`Serving.doubtful`).
DOUBTFUL_FETCH_S = 2.0
# A fetch that takes longer goes on, but frees its place for another author.
LATE_S = 2.0
# Other authors that are asked for a stranger's blob, if they offer the same one.
OTHER_AUTHORS = 4

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fetch:
    item: Offered
    scope: trio.CancelScope
    since: float  # seconds of the gatherer's clock
    replies: HolderReplies  # the holders' replies so far
    late: bool = False  # whether it no longer holds a place in the round


class Gatherer:
    """Fetches for one trainer.

    Args:
        sharing: its `take` and `caps` choose.
        hand_on: called with each set, gossiped or fetched. The trainer's round is the only clock: each is of
            the round in which it, or its offer, arrived.
        tried: told of each author that was asked for what it offered, and whether it served that.
    """

    def __init__(
        self,
        member: Member,
        curriculum: Curriculum,
        round: RoundConfig,
        sharing: SharingSettings,
        hand_on: Callable[[ReceivedBody], None],
        clock: Callable[[], float],
        rng: random.Random,
        tried: Callable[[PeerId, bool], None] = lambda *_: None,
    ) -> None:
        load_take(sharing.take)
        self._member, self._specialties = member, curriculum.specialties
        self._hand_on, self._clock, self._rng, self._tried = hand_on, clock, rng, tried
        self._wanted = round.wanted  # rollouts of a round
        self._wanting = round.wanted  # those that this round still lacks
        self._board = Board(curriculum.trains_on, kept_rounds=round.max_age)
        self.choice = OfferChoice[Offered](
            sharing,
            round.wanted,
            lambda item: Author(item.author, item.group),
            varied=len(curriculum.specialties) > 1,
        )
        self._serving = Serving(round.wanted)
        self._under_way: dict[offers.Key, _Fetch] = {}
        self._nursery: trio.Nursery | None = None
        self.gathered, self.missed = 0, 0

    async def run(self) -> None:
        """Fetch until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._fill()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def on_envelope(self, envelope: Envelope) -> None:
        """Put an offer on the board; hand on a set that was gossiped whole. Does not wait."""
        if envelope.kind != offers.KIND:
            self._hand_on(
                ReceivedBody(envelope.author, envelope.group, envelope.kind, envelope.body, self._board.round)
            )
            return
        offered = offers.decode(envelope, self._specialties)
        if isinstance(offered, Reason):
            self._member.report(envelope.author, offered)
            return
        if self._board.add(offered) < len(offered):
            self._member.report(envelope.author, Reason.UNKNOWN_TASK)
        if self._places() > 0:
            self._fill()

    def resume(self, round_number: int) -> None:
        """Note that the trainer has started, and that this round is its next."""
        self._board.begin(round_number)

    def next_round(self, round_number: int, lead: Lead) -> None:
        """Begin another round of the trainer. lead: as the trainer found it in the one before.

        The last one's fetches are cancelled, except those begun less than MIN_FETCH_S ago. Rollouts that
        would be too old to train on are cancelled in any case.
        """
        now = self._clock()
        self.choice.begin(lead)
        self._board.begin(round_number)
        self._serving.next_round()
        for fetch in self._under_way.values():
            if now - fetch.since >= MIN_FETCH_S or self._board.too_old(fetch.item):
                fetch.scope.cancel()
        self._wanting = self._wanted
        self._fill()

    @property
    def round(self) -> int:
        """The trainer's round; 0 before it is known."""
        return self._board.round

    def document(self) -> dict[str, int]:
        """Return the status: rollouts offered, fetched and missed, authors set aside, bytes both ways."""
        return {
            "on_offer": len(self._board.offered),
            "fetched": self.gathered,
            "missed": self.missed,
            "set_aside": self._serving.aside(self._clock()),
            "bytes_in": self._member.fetcher.received,
            "bytes_out": self._member.server.sent,
        }

    def _fill(self) -> None:
        """Begin fetches for the round's free places, and trial fetches beside them (`Serving.on_trial`)."""
        if self._nursery is None:
            return
        now, under_way = self._clock(), self._alive()
        late = {fetch.item.author for fetch in under_way if fetch.late}
        tried = sum(self._serving.on_trial(fetch.item.author) for fetch in under_way)

        def choose(offered: Sequence[Offered], count: int, rng: random.Random) -> Sequence[Offered]:
            prompt = [item for item in offered if item.author not in late]
            return self._serving.choose(prompt, count, rng, self.choice, now, tried)

        begun = [
            _Fetch(item, trio.CancelScope(), now, {})
            for item in self._board.choose(self._places(), self._rng, choose)
        ]
        for fetch in begun:
            self._under_way[fetch.item.key] = fetch
            self._nursery.start_soon(self._gather, fetch)
        if begun:
            self._nursery.start_soon(self._wait, begun)

    def _places(self) -> int:
        """Return how many places of the round are free.

        At most twice the wanted rollouts are fetched at a time.
        """
        under_way = self._alive()
        holding = sum(not fetch.late and not self._serving.on_trial(fetch.item.author) for fetch in under_way)
        return max(0, min(self._wanting - holding, self._wanted + self._wanting - len(under_way)))

    def _alive(self) -> Sequence[_Fetch]:
        return [fetch for fetch in self._under_way.values() if not fetch.scope.cancel_called]

    async def _wait(self, begun: Sequence[_Fetch]) -> None:
        await trio.sleep(LATE_S)
        late = [fetch for fetch in begun if self._under_way.get(fetch.item.key) is fetch]
        for fetch in late:
            fetch.late = True
        if late:
            self._fill()

    async def _gather(self, fetch: _Fetch) -> None:
        item, blob = fetch.item, None
        # A stranger's offer may be a copy, so other authors of the same blob are asked too.
        same = [] if self._serving.serves(item.author) else self._board.same(item)[:OTHER_AUTHORS]
        want = Want(
            item.id,
            max(offer.size for offer in (item, *same)),
            [item.author, item.via, *(offer.author for offer in same)],
            item.at,
        )
        try:
            with (
                fetch.scope,
                trio.move_on_after(DOUBTFUL_FETCH_S)
                if self._serving.doubtful(item.author)
                else nullcontext(),
            ):
                blob = await self._member.fetch(want, fetch.replies)
        finally:
            del self._under_way[item.key]
        refused = fetch.replies.get(item.author) is HolderReply.NO
        if blob is None or (refused and self._real(item, blob) is None):
            # Whoever else has the blob: an offer without a blob behind it is a failure.
            self._unserved(fetch)
        if blob is not None and self._accept(fetch, blob):
            self._wanting -= 1
            self._fill()
            return
        self.missed += 1
        if not fetch.scope.cancelled_caught:
            self._fill()

    def _unserved(self, fetch: _Fetch) -> None:
        """Charge the author for a blob that nobody had, or that it has not itself."""
        author, said, now = fetch.item.author, fetch.replies.get(fetch.item.author), self._clock()
        log.info("%s does not serve what it offered: %s", author, said.value if said else "not asked")
        given = now - fetch.since  # seconds
        if said is None or (said is not HolderReply.NO and given < HEDGE_S):
            # The author had no time to answer.
            return
        self._tried(author, False)
        patient = given >= MIN_FETCH_S or not fetch.scope.cancelled_caught
        connected = patient and any(peer.id == author for peer in self._member.peers())
        cost = self._serving.cost(said, connected, now)
        if cost == HARD:
            # The author's later offers count again.
            self._board.take_down(author)
        if self._serving.failed(author, cost, fetch.since, now) and cost == HARD:
            self._member.report(author, Reason.UNSERVED)

    def _real(self, item: Offered, blob: bytes) -> Offered | None:
        """Return the real author's offer, if the item's author copied it."""
        if offers.decode_blob(blob, item) is not Reason.NOT_ITS_OWN:
            return None
        real = self._board.offered.get((offers.author_of(blob), item.id))
        return real if real is not None and real.ref == item.ref else None

    def _accept(self, fetch: _Fetch, blob: bytes) -> bool:
        """Hand on the rollout of a fetched blob, if an offer says what it is. Returns whether one does."""
        item, found = fetch.item, offers.decode_blob(blob, fetch.item)
        # A copied offer takes nothing from the real author: its rollout is used if it offers the same.
        real = self._real(item, blob) if found is Reason.NOT_ITS_OWN else None
        if isinstance(found, Reason):
            log.info("a blob of %s: %s", item.author, found.value)
            self._member.report(item.author, found)
            self._board.take_down(item.author)
            self._tried(item.author, False)
            now, copied = self._clock(), real is not None
            self._serving.failed(item.author, HARD, fetch.since, now, copied=copied)
        if real is not None:
            self._board.take(real)
            item, found = real, offers.decode_blob(blob, real)
        if isinstance(found, Reason):
            return False
        for copy in self._board.same(item):
            self._member.report(copy.author, Reason.NOT_ITS_OWN)
            self._board.take_down(copy.author)
        # Otherwise other nodes had it, and the author may not have been asked.
        if fetch.replies.get(item.author, HolderReply.NO) is not HolderReply.NO:
            self._serving.served(item.author, self._clock())
            self._tried(item.author, True)
        body, _ = found
        self.gathered += 1
        self._hand_on(ReceivedBody(item.author, item.group, wire.KIND, body, item.round))
        return True
