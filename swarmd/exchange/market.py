"""Chooses among the offered rollouts for a round's training, and fetches only the chosen ones. Pure.

Theory of operation. Offers wait on the board. A round has J places, one for each external rollout that it
trains on. The choice follows `[sharing] take` (`experience.batch.OfferChoice`) and the authors' credit
(`Serving`). Places are filled when the round begins, and later in the round if there were too few offers. If
a rollout cannot be fetched, is late, or belongs to another task than the offer said, another rollout takes
its place. Fetching goes on while our own rollouts are generated; no round waits for it.

A fetch is in one State; `NEXT` is the table of transitions (`exchange.fetching`). Whether an author is on
trial is a fact about the author, so it is not in the state of a fetch.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from p2p.latest import Latest
from p2p.types import PeerId, Reason
from swarmd.config.config import RoundConfig
from swarmd.exchange.events import Deliver, Hold, Output, Report
from swarmd.exchange.fetching import HEDGE_S, Fetch, Fetcher, HolderReply, State, Step
from swarmd.exchange.offers import MAX_TAKEN, Blob, Board, Offered, rollout_of
from swarmd.exchange.serving import HARD, MAX_AUTHORS, Serving
from swarmd.exchange.wire import RolloutSet
from swarmd.experience.batch import OfferChoice
from swarmd.experience.pool import too_old
from swarmd.experience.strategies import SharingSettings
from swarmd.state.status import ExchangeFigures
from swarmd.tasks.curriculum import Curriculum
from swarmd.types import Author, PassRates, TaskRef

# The minimum time of a fetch, even if its round ends: rounds of a tiny model are shorter than a round trip.
MIN_FETCH_S = 5.0
# The timeout of a fetch from a doubtful author (`Serving.doubtful`).
DOUBTFUL_FETCH_S = 2.0
# A fetch that takes longer goes on, but frees its place for another author.
LATE_S = 2.0
# Maximum number of other authors that are asked for a stranger's blob because they offer the same blob.
OTHER_AUTHORS = 4
# Maximum number of blobs that were fetched through a copied offer and are kept until their real author offers
# them.
KEPT_COPIES = 16


class Market:
    """Holds the offers, the authors' credit and the fetches of one trainer.

    Args:
        sharing: its `take` and `caps` determine which offers are chosen.
        emit: called with each output, in order.
        tried: called with each author that was asked for an offered rollout, and with whether it served the
        rollout.
    """

    def __init__(
        self,
        curriculum: Curriculum,
        round: RoundConfig,
        sharing: SharingSettings,
        rng: random.Random,
        emit: Callable[[Output], None],
        tried: Callable[[PeerId, bool], None],
    ) -> None:
        self.board = Board(curriculum.trains_on, kept_rounds=round.max_age)
        self.serving, self.fetcher = Serving(round.wanted), Fetcher(emit)
        self.choice = OfferChoice[Offered](
            sharing,
            round.wanted,
            lambda item: Author(item.author, item.group),
            varied=len(curriculum.specialties) > 1,
        )
        self._rng, self._emit, self._tried = rng, emit, tried
        self._wanted, self._max_age = round.wanted, round.max_age  # rollouts of a round; rounds
        self._wanting = round.wanted  # rollouts that this round still lacks
        self.connected: tuple[PeerId, ...] = ()
        self.under_way = self.fetcher.under_way
        # The round in which each author's rollout of a task was delivered.
        self._had: Latest[tuple[PeerId, TaskRef], int] = Latest(MAX_TAKEN)
        self.author_of: Latest[bytes, PeerId] = Latest(MAX_TAKEN)  # by the ids of blobs that we saw
        self._copies: Latest[bytes, Blob] = Latest(KEPT_COPIES)  # by id
        # Author -> (its last round, its model), as it says itself.
        self.authors: Latest[PeerId, tuple[int, str]] = Latest(MAX_AUTHORS)
        self._changed = False  # whether choosing again may find an offer
        self.gathered, self.missed, self._now = 0, 0, 0.0

    def add(self, offered: Sequence[Offered], now: float) -> int:
        """Put an author's offers on the board; return how many of them are for tasks that we train on.

        If one of the blobs is known to be another author's, none of the offers is put on the board.
        """
        author = offered[0].author
        if any(self.author_of.get(item.id, author) != author for item in offered):
            self._expose(author, Reason.NOT_ITS_OWN, now, now, copied=True)
            return len(offered)
        good = self.board.add(offered)
        self._changed |= self.places > 0
        return good

    def deliver(self, found: RolloutSet, group: str, heard: int) -> int:
        """Deliver the set's rollouts of tasks that we train on; return how many of them were new.

        A second rollout of the same author and task is skipped while the first is fresh enough to train on.

        Args:
            group: the author's network group.
            heard: our round in which the set or its offer arrived.
        """
        new = 0
        for rollout in found.rollouts:
            key = rollout.author, rollout.ref
            self.authors[rollout.author] = found.round, found.model
            if self.board.trainable(rollout.ref) and not self._delivered(*key):
                self._had[key] = self.board.round or 1
                self._emit(Deliver(replace(rollout, heard=heard, group=group)))
                new += 1
        return new

    def begin(self, number: int, pass_rates: PassRates | None, now: float) -> None:
        """Begin a round of the trainer. pass_rates: None if the trainer has just started.

        The last round's fetches are dropped, except those begun less than MIN_FETCH_S ago. Rollouts that
        would be too old to train on are dropped in any case.
        """
        self.board.begin(number)
        if pass_rates is None:
            return
        self.choice.begin(pass_rates)
        self.serving.next_round()
        dropped = [
            fetch
            for fetch in self.under_way.values()
            if now - fetch.since >= MIN_FETCH_S or self.board.too_old(fetch.item)
        ]
        for fetch in dropped:
            self.fetcher.end(fetch)
            self._end(fetch, Step.ROUND_OVER)
        self._wanting, self._changed = self._wanted, True
        self._fill(now)
        # Charge these failures after the choice: they belong to the last round, and must not affect this
        # round's first choice.
        for fetch in dropped:
            self._miss(fetch, now)

    @property
    def holding(self) -> int:
        """How many places of the round are held by running fetches."""
        return sum(
            fetch.state is State.ON_TIME and not self.serving.on_trial(fetch.item.author)
            for fetch in self.under_way.values()
        )

    @property
    def places(self) -> int:
        """How many places of the round are free.

        At most twice as many rollouts as are wanted are fetched at the same time.
        """
        return max(0, self._wanting - max(self.holding, len(self.under_way) - self._wanted))

    def answered(self, number: int, reply: Blob | None, now: float) -> None:
        """Take a holder's answer."""
        if (found := self.fetcher.answered(number, reply, now)) is not None:
            self._found(*found, now)

    def advance(self, now: float) -> float:
        """Fill free places, ask holders, end late fetches; return the time of the next action, after now."""
        self._now = now
        while True:
            self._fill(now)
            for fetch in self.fetcher.advance(now):
                self._end(fetch, Step.NO_BLOB)
                self._miss(fetch, now)
            for fetch in self.under_way.values():
                if fetch.state is State.ON_TIME and now >= fetch.since + LATE_S:
                    fetch.step(Step.SLOW)
                    self._changed = True
            if not self._changed:
                break
        late = (f.since + LATE_S for f in self.under_way.values() if f.state is State.ON_TIME)
        return min(self.fetcher.due, *late, math.inf)

    def figures(self) -> ExchangeFigures:
        """Return the figures for the status, without the bytes that we serve."""
        return ExchangeFigures(
            on_offer=len(self.board.offered),
            fetched=self.gathered,
            missed=self.missed,
            set_aside=self.serving.aside(self._now),
            bytes_in=self.fetcher.received,
        )

    def _delivered(self, author: PeerId, ref: TaskRef) -> bool:
        had = self._had.get((author, ref))
        return had is not None and not too_old(had, self.board.round, self._max_age)

    def _fill(self, now: float) -> None:
        """Begin fetches for the round's free places, and extra trial fetches (`Serving.on_trial`)."""
        if not self._changed:
            return
        self._changed, under_way = False, self.under_way.values()
        late = {fetch.item.author for fetch in under_way if fetch.state is State.LATE}
        tried = sum(self.serving.on_trial(fetch.item.author) for fetch in under_way)

        def choose(offered: Sequence[Offered], count: int, rng: random.Random) -> Sequence[Offered]:
            prompt = [o for o in offered if o.author not in late and not self._delivered(o.author, o.ref)]
            return self.serving.choose(prompt, count, rng, self.choice, now, tried)

        for item in self.board.choose(self.places, self._rng, choose):
            self._begin(item, now)

    def _begin(self, item: Offered, now: float) -> None:
        # A stranger's offer may be a copy, so other authors of the same blob are asked too.
        same = [] if self.serving.serves(item.author) else self.board.same(item)[:OTHER_AUTHORS]
        size = max(offer.size for offer in (item, *same))
        holders = [item.author, item.via, *(offer.author for offer in same), *self.connected]
        ends = now + DOUBTFUL_FETCH_S if self.serving.doubtful(item.author) else math.inf
        fetch = Fetch(item, size, holders, now, ends)
        if (blob := self._copies.get(item.id)) is not None:
            self._found(fetch, blob, now)
        else:
            self.fetcher.begin(fetch)

    def _found(self, fetch: Fetch, blob: Blob, now: float) -> None:
        """Deliver a blob's rollout if it matches its own author's offer; charge an author that copied it."""
        item, replies = fetch.item, fetch.replies
        found = rollout_of(blob, item)
        # A copied offer does not harm the real author: if the real author offers the same blob, the blob is
        # used. The real author's offer of the blob.
        named = self.board.offered.get((blob.author or item.author, item.id))
        real = named if found is Reason.NOT_ITS_OWN and named and named.ref == item.ref else None
        self._end(fetch, Step.BAD_BLOB if real is None and isinstance(found, Reason) else Step.GOOD_BLOB)
        if replies.get(item.author) is HolderReply.NO and real is None:
            # Other peers have the blob: an offer without a blob behind it is a failure.
            self._charge(fetch, now)
        if isinstance(found, Reason):
            self._expose(item.author, found, fetch.since, now, copied=real is not None)
        if found is Reason.NOT_ITS_OWN and blob.author is not None:
            self.author_of[item.id] = blob.author
            self._copies[item.id] = blob
        if real is not None:
            self.board.take(real)
            item, found = real, rollout_of(blob, real)
        if isinstance(found, Reason):
            self.missed += 1
            return
        for copy in self.board.same(item):
            self._emit(Report(copy.author, Reason.NOT_ITS_OWN))
            self.board.take_down(copy.author)
        # Credit the author only if it was asked and did not deny having the blob.
        if replies.get(item.author, HolderReply.NO) is not HolderReply.NO:
            self.serving.served(item.author, now)
            self._tried(item.author, True)
        self.gathered += 1
        self.author_of[item.id] = item.author
        self._emit(Hold(blob))
        self._wanting -= self.deliver(found, item.group, item.round)

    def _expose(self, author: PeerId, reason: Reason, since: float, now: float, *, copied: bool) -> None:
        """Charge an author whose offer does not match its blob. copied: see `Serving.failed`."""
        self._emit(Report(author, reason))
        self.board.take_down(author)
        self._tried(author, False)
        self.serving.failed(author, HARD, since, now, copied=copied)

    def _miss(self, fetch: Fetch, now: float) -> None:
        self.missed += 1
        self._charge(fetch, now)

    def _end(self, fetch: Fetch, step: Step) -> None:
        fetch.step(step)
        self._changed = True

    def _charge(self, fetch: Fetch, now: float) -> None:
        """Charge the author of an offer for a blob that no holder had, or that the author itself lacks."""
        author, since = fetch.item.author, fetch.since
        said, given = fetch.replies.get(author), now - since  # seconds
        if said is None or (said is not HolderReply.NO and given < HEDGE_S):
            # The author had no time to answer.
            return
        self._tried(author, False)
        patient = given >= MIN_FETCH_S or fetch.state is not State.DROPPED
        if (cost := self.serving.cost(said, patient and author in self.connected, now)) == HARD:
            # Remove the author's other offers; its later offers are accepted.
            self.board.take_down(author)
        if self.serving.failed(author, cost, since, now) and cost == HARD:
            self._emit(Report(author, Reason.UNSERVED))
