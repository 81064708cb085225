"""Credit for serving: authors that do not serve their offers are set aside.

Pure; `now` is an argument, in seconds.

An offer costs its author nothing, but costs us a fetch and a place in the round while it lasts. So each
author has a credit. A served rollout adds to it, a failed fetch takes from it. An author without credit is
set aside: its offers are not chosen for a while, each time twice as long. A served rollout clears this.

- A HARD failure: the author answered that it does not have the rollout; or it is connected and did not answer
  although another author served us in the last LATELY_S, so our own connection is not at fault. A SOFT
  failure: the author could not be reached. It may have left, or be behind NAT.
- Fetches that ran at the same time count once: a node that restarts has failed once, not four times.
- An author that served and then failed is on trial until it serves again. It gets none of the round's places.
  One extra fetch per round tries the author; it gets more fetches only if places stay free. So its failures
  cost no other author a place, and a restarted node is back after one rollout.
- An author that never served us is a stranger. New names cost nothing, so strangers also share one common
  credit. When that is used up, and some author serves, all strangers together get a quarter of a round, one
  rollout each. If all authors serve, none of these rules changes the choice.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from p2p.latest import Latest
from p2p.types import PeerId
from swarmd.exchange.fetching import HolderReply
from swarmd.exchange.offers import Choice, Offered

MAX_CREDIT = 8
# Credit for a served rollout. An author behind NAT that serves one in four fetches is not set aside for long.
SERVED_CREDIT = 4
# Credit that a failure costs.
HARD, SOFT = 3, 1
# The credit of an author that we have not fetched from yet.
STRANGER_CREDIT = 2
# The strangers' common credit; each stranger's failure reduces it.
STRANGERS_CREDIT = 8
# The share of a round that strangers get when their common credit is gone.
STRANGERS_SHARE = 0.25
# How long an author is set aside the first time.
FIRST_ASIDE_S = 10.0
LONGEST = {HARD: 600.0, SOFT: 60.0}
LATELY_S = 60.0
# Authors that are remembered. The one fetched from least recently is forgotten.
MAX_AUTHORS = 4096


@dataclass(slots=True)
class ServingRecord:
    credit: int = STRANGER_CREDIT
    serves: bool = False  # whether it has served
    failing: bool = False  # whether it has failed since it last served
    failed_at: float = -1.0  # when the last failure that counted began
    again_at: float = 0.0  # set aside until then
    aside: float = FIRST_ASIDE_S  # seconds it is set aside the next time


class Serving:
    """Keeps the credit of authors. wanted: rollouts in a round."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._served_at = -math.inf  # when any author last served
        self._share = max(1, int(STRANGERS_SHARE * wanted))
        self._places = self._share  # places for strangers in this round
        self._strangers = STRANGERS_CREDIT
        self._authors: Latest[PeerId, ServingRecord] = Latest(MAX_AUTHORS)
        self._tried: set[PeerId] = set()  # authors on trial that were tried in this round

    def next_round(self) -> None:
        self._places = self._share
        self._tried.clear()

    def served(self, author: PeerId, now: float) -> None:
        self._served_at = now
        record = self._record(author)
        if not record.serves:
            record.serves, record.credit = True, 0
            self._strangers = min(STRANGERS_CREDIT, self._strangers + 1)
        record.credit = min(MAX_CREDIT, max(0, record.credit) + SERVED_CREDIT)
        record.failing, record.again_at, record.aside = False, 0.0, FIRST_ASIDE_S

    def cost(self, said: HolderReply, connected: bool, now: float) -> int:
        """Return the cost of a failure, HARD or SOFT. said: the author's reply."""
        alive = connected and now - self._served_at < LATELY_S
        return HARD if said is HolderReply.NO or alive else SOFT

    def failed(self, author: PeerId, cost: int, since: float, now: float, *, copied: bool = False) -> bool:
        """Charge the author of an offer for a failed fetch. since: when the fetch began.

        copied: whether the fetch found the real author's rollout; then the strangers' common credit is kept.
        Returns whether the author had served before and is set aside now.
        """
        record = self._record(author)
        if since <= record.failed_at:
            return False
        record.failing, record.failed_at = True, now
        record.credit -= cost
        if not record.serves and not copied:
            self._strangers = max(0, self._strangers - 1)
        if record.credit > 0:
            return False
        record.again_at = now + record.aside
        record.aside = min(LONGEST[cost], 2 * record.aside)
        return record.serves

    def serves(self, author: PeerId) -> bool:
        """Return whether the author has served us and was not set aside afterwards."""
        return (record := self._authors.get(author)) is not None and record.serves and record.credit > 0

    def doubtful(self, author: PeerId) -> bool:
        """Return whether a fetch from the author gets only DOUBTFUL_FETCH_S."""
        failing = (record := self._authors.get(author)) is not None and record.failing
        return failing or (self._strangers == 0 and not self.serves(author))

    def on_trial(self, author: PeerId) -> bool:
        """Return whether the author served once and failed since."""
        return (record := self._authors.get(author)) is not None and record.serves and record.failing

    def aside(self, now: float) -> int:
        """Return how many authors are set aside."""
        return sum(now < record.again_at for record in self._authors.values())

    def choose(
        self,
        offered: Sequence[Offered],
        count: int,
        rng: random.Random,
        choice: Choice,
        now: float,
        tried: int = 0,
    ) -> Sequence[Offered]:
        """Choose at most `count` offers for the round's places, and extra offers of authors on trial.

        The places go to authors that are neither set aside nor on trial. When the strangers' common credit is
        used up, strangers get their share and authors that serve get the rest.

        choice: draws among offers. tried: how many trial fetches are running.
        """
        back = [
            item
            for item in offered
            if (known := self._authors.get(item.author)) is None or now >= known.again_at
        ]
        good = [item for item in back if not self.on_trial(item.author)]
        chosen = self._for_places(good, count, rng, choice)
        trials = [item for item in back if self.on_trial(item.author)] if len(good) < len(back) else []
        return [
            *chosen,
            *self._try_out(trials, count - len(chosen) - tried, self._wanted - tried, rng, choice),
        ]

    def _for_places(
        self, good: Sequence[Offered], count: int, rng: random.Random, choice: Choice
    ) -> Sequence[Offered]:
        if self._strangers > 0 or not any(map(self.serves, self._authors)):
            return choice(good, count, rng)
        serving = [item for item in good if self.serves(item.author)]
        strangers = list({item.author: item for item in good if not self.serves(item.author)}.values())
        few = choice(rng.sample(strangers, min(len(strangers), self._places, count)), count, rng)
        self._places -= len(few)
        return [*few, *choice(serving, count - len(few), rng)]

    def _try_out(
        self, trials: list[Offered], free: int, count: int, rng: random.Random, choice: Choice
    ) -> Sequence[Offered]:
        """Choose at most `count` offers, one of each author on trial that was not tried in this round.

        free: the places that are still empty; they may get further offers of authors on trial.
        """
        rng.shuffle(trials)
        untried = {item.author: item for item in trials if item.author not in self._tried}
        chosen = choice(list(untried.values()), max(0, count), rng)
        self._tried.update(item.author for item in chosen)
        rest = [item for item in trials if untried.get(item.author) is not item]
        return [*chosen, *choice(rest, max(0, min(free, count) - len(chosen)), rng)]

    def _record(self, author: PeerId) -> ServingRecord:
        record = self._authors[author] = self._authors.get(author) or ServingRecord()
        return record
