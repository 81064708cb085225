"""Choice of external rollouts by `[sharing] take`, from the pool or from offers. Pure.

`by_weight` makes the choice, and nothing else does. The trainer's `SharingSampler` draws a batch with it, and
`BatchBuilder` filters the draw; the daemon's `OfferChoice` chooses the offers to fetch. Both use the same
weights (`strategies.TAKES`), computed from specialty, author and age. Rewards are known only for the pool.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from p2p.types import PeerId
from swarmd.experience import caps
from swarmd.experience.pool import Key, Pool, key_of
from swarmd.experience.strategies import TAKES, Candidate, Sharing, SharingSettings, Take
from swarmd.protocols import Sampler
from swarmd.types import Author, PassRates, Scored

# Maximum number of draws for one batch. This bounds the time spent on a pool full of rollouts that the
# filters reject.
MAX_DRAWS = 4

C = TypeVar("C", bound=Candidate)


def kind(candidate: Candidate) -> str:
    """Return the specialty. One author gets an even share of a choice in each (`caps`)."""
    return candidate.ref.specialty


def by_weight(
    candidates: Sequence[C], take: Take, pass_rates: PassRates, rng: random.Random
) -> tuple[Sequence[C], caps.Order[C]]:
    """Return the candidates with a positive weight, and a weighted random order of them.

    The weight of a candidate is its weight by `take`, times the square of the author's pass rate.
    Without the square, four poisoners among ten peers still taught their word in one of three seeds
    (docs/experiments.md).

    The first n in the order are a weighted draw without replacement: the smallest of exponential variables of
    rate w (Efraimidis and Spirakis, 2006, whose u^(1/w) underflows to 0 for many small w). With equal weights
    the draw is uniform.
    """
    weights = {
        id(c): weight
        for c, w in zip(candidates, take.weights(candidates), strict=True)
        if (weight := w * pass_rates.get(c.author, 1.0) ** 2) > 0
    }
    return [c for c in candidates if id(c) in weights], lambda c: rng.expovariate(weights[id(c)])


@dataclass(frozen=True)
class SharingSampler:
    """A `Sampler`: I local rollouts, and J external ones by `[sharing] take`, or fewer if there are fewer.

    By default it is the paper's (SAPO section 5). Local rollouts without advantage stay: they have no
    gradient, but they are part of the mean. With J = 0, `rng` is not used.

    varied: as in `OfferChoice`.
    """

    sharing: Sharing = field(default_factory=Sharing)
    n_local: int = 4
    n_external: int = 4
    varied: bool = True

    def __call__(
        self, local: Sequence[Scored], pool: Sequence[Scored], rng: random.Random
    ) -> Sequence[Scored]:
        mine = list(local) if len(local) <= self.n_local else rng.sample(list(local), self.n_local)
        if not self.n_external:
            return mine
        settings = self.sharing.settings
        take, capped = TAKES[settings.take], settings.caps == "on"
        kept = [scored for scored in pool if take.keeps(scored)]
        theirs = caps.choose(
            *by_weight(kept, take, self.sharing.pass_rates, rng),
            self.n_external,
            lambda scored: scored.rollout.origin if capped else None,
            kind if self.varied else None,
        )
        return [*mine, *theirs]


# Returns the part of each external rollout that may be trained on; None: no part.
Filter = Callable[[Sequence[Scored]], Sequence[Scored | None]]


@dataclass(frozen=True)
class BatchBuilder:
    """Builds the batch of an update: the sampler draws it, then the filters check the external rollouts.

    A rollout that a filter rejects leaves the pool, and another one is drawn in its place, at most MAX_DRAWS
    times; after that the batch is smaller. Only drawn rollouts are checked, each once per batch.

    built: called with each batch.
    """

    sample: Sampler
    pool: Pool
    me: PeerId
    filters: Sequence[Filter] = ()
    built: Callable[[Sequence[Scored]], object] = lambda _: None

    def __call__(self, local: Sequence[Scored], rng: random.Random) -> Sequence[Scored]:
        """Return the batch. local: this node's rollouts of this round."""
        passed: dict[Key, Scored] = {}
        batch: Sequence[Scored] = ()
        for _ in range(MAX_DRAWS):
            drawn = self.sample(local, self.pool.snapshot(), rng)
            refused = self._filter(
                [s for s in drawn if s.author != self.me and key_of(s) not in passed], passed
            )
            batch = [passed.get(key_of(s), s) for s in drawn if key_of(s) not in refused]
            if not refused:
                break
            self.pool.drop(refused)
        self.built(batch)
        return batch

    def _filter(self, theirs: Sequence[Scored], passed: dict[Key, Scored]) -> set[Key]:
        """Add the rollouts that pass all filters to `passed`; return the keys of the rejected ones."""
        refused: set[Key] = set()
        for filtered in self.filters:
            found = filtered(theirs)
            refused.update(key_of(scored) for scored, kept in zip(theirs, found, strict=True) if kept is None)
            theirs = [kept for kept in found if kept is not None]
        passed.update((key_of(scored), scored) for scored in theirs)
        return refused


class OfferChoice(Generic[C]):
    """Chooses which offers to fetch, by `[sharing] take`.

    The choice of a round is made in several calls, and the caps apply to all of them together.

    varied: whether the curriculum has several specialties. If so, a cap limits each author's share of each
        specialty. With a single specialty the cap is off, because it would leave places empty whenever an
        author does not serve its offers.
    """

    def __init__(
        self, settings: SharingSettings, n: int, author_of: Callable[[C], Author], *, varied: bool = True
    ) -> None:
        self._take, self._n = TAKES[settings.take], n
        self._pass_rates: PassRates = {}
        self._author_of: caps.AuthorOf[C] = author_of if settings.caps == "on" else lambda _: None
        self._kind_of: caps.KindOf[C] | None = kind if varied else None
        self._had: list[C] = []  # offers chosen so far in this round

    def begin(self, pass_rates: PassRates) -> None:
        """Begin another round. pass_rates: the trainer's result from the previous round."""
        self._pass_rates, self._had = pass_rates, []

    def __call__(self, offered: Sequence[C], count: int, rng: random.Random) -> Sequence[C]:
        weighed = by_weight(offered, self._take, self._pass_rates, rng)
        chosen = caps.choose(*weighed, count, self._author_of, self._kind_of, in_all=self._n, had=self._had)
        self._had += chosen
        return chosen


QUESTION_TOO_LONG = "the question fills this model's context"
ANSWER_TOO_LONG = "a right answer exceeds this node's token limit"
UNOPENED = "a right answer does not begin with this node's model.opening"
UNKNOWN_CHARACTERS = "characters that this tokenizer lacks"


@dataclass
class Fitting:
    """A `batch.Filter`: rejects rollouts that this model cannot be trained on. No author is blamed for them.

    unfit: `protocols.SelectivePolicy`.
    """

    unfit: Callable[[Scored], str | None]
    refused: Counter[str] = field(default_factory=Counter)  # rollouts, by reason, since `take_refused`

    def __call__(self, theirs: Sequence[Scored]) -> Sequence[Scored | None]:
        why = [self.unfit(scored) for scored in theirs]
        self.refused.update(filter(None, why))
        return [None if reason else scored for scored, reason in zip(theirs, why, strict=True)]

    def take_refused(self) -> Mapping[str, int]:
        """Return how many rollouts were rejected since the last call, by reason."""
        refused, self.refused = self.refused, Counter()
        return dict(refused)
