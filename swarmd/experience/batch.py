"""The one place that chooses some of others' rollouts by `[sharing] take`, from the pool or from offers.

Pure. `by_weight` is that choice. The trainer's `SharingSampler` draws with it, and `BatchBuilder` makes the
batch of what was drawn; the daemon's `OfferChoice` chooses what to fetch. The weights are the same functions
(`strategies.TAKES`) of what both know of a rollout: specialty, author and age. Rewards are known of the pool
alone.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from p2p.types import PeerId
from swarmd.experience import caps
from swarmd.experience.pool import Key, Pool, key_of
from swarmd.experience.strategies import MIN_WEIGHT, TAKES, Candidate, Sharing, SharingSettings, Take
from swarmd.protocols import Sampler
from swarmd.types import Author, Lead, Scored

# Draws for one batch. It bounds the time that a pool costs that is full of what the filters refuse.
MAX_DRAWS = 4

C = TypeVar("C", bound=Candidate)


def kind(candidate: Candidate) -> str:
    """Return the specialty, of which one author gets an even share of a choice (`caps`)."""
    return candidate.ref.specialty


def by_weight(
    candidates: Sequence[C], take: Take, lead: Lead, rng: random.Random
) -> tuple[Sequence[C], caps.Order[C]]:
    """Return the candidates that have a weight, and a random order of them, by their weights.

    A weight is what `take` gives, times the square of the author's `Lead.pass_rates`. Without the square four
    poisoners of ten peers still taught their word in one seed of three (docs/experiments.md).

    The first n in it are a draw without replacement: the least of exponential variables of rate w (Efraimidis
    and Spirakis, 2006, whose u^(1/w) is 0 for many a small w). Of equal weights it is uniform.
    """
    weights = {
        id(c): weight
        for c, w in zip(candidates, take.weights(candidates, lead), strict=True)
        if (weight := w * lead.pass_rates.get(c.author, 1.0) ** 2) > 0
    }
    return [c for c in candidates if id(c) in weights], lambda c: rng.expovariate(weights[id(c)])


@dataclass(frozen=True)
class SharingSampler:
    """A `Sampler`: I rollouts of our own, J of the others' by `[sharing] take`, fewer where there are fewer.

    By default it is the paper's (SAPO section 5). Our own zero-advantage rollouts stay: they have no
    gradient, but they are part of the mean. J = 0 leaves `rng` untouched.

    varied: as of `OfferChoice`.
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
            *by_weight(kept, take, self.sharing.lead, rng),
            self.n_external,
            lambda scored: scored.rollout.origin if capped else None,
            kind if self.varied else None,
        )
        return [*mine, *theirs]


# Returns for each of others' rollouts what of it may be trained on; None: nothing of it.
Filter = Callable[[Sequence[Scored]], Sequence[Scored | None]]


@dataclass(frozen=True)
class BatchBuilder:
    """Builds the batch of an update: the sampler draws it, then each filter in turn checks others' rollouts.

    A rollout that a filter refuses leaves the pool, and another is drawn in its place, at most MAX_DRAWS
    times; then the batch is smaller. Only what was drawn is checked, and once a batch.

    built: told each batch.
    """

    sample: Sampler
    pool: Pool
    me: PeerId
    filters: Sequence[Filter] = ()
    built: Callable[[Sequence[Scored]], object] = lambda _: None

    def __call__(self, local: Sequence[Scored], rng: random.Random) -> Sequence[Scored]:
        """Return the batch. local: our own rollouts of this round."""
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
        """Put what passes all filters into `passed`; return the keys of the others."""
        refused: set[Key] = set()
        for filtered in self.filters:
            found = filtered(theirs)
            refused.update(key_of(scored) for scored, kept in zip(theirs, found, strict=True) if kept is None)
            theirs = [kept for kept in found if kept is not None]
        passed.update((key_of(scored), scored) for scored in theirs)
        return refused


class OfferChoice(Generic[C]):
    """Chooses what to fetch of what is on offer, by `[sharing] take`.

    A round's choice is made in several calls, under caps for all together.

    varied: whether the curriculum has several specialties, of which each author may fill a share. With one
        alone such a cap would only leave places empty where some authors do not serve what they offer.
    """

    def __init__(
        self, settings: SharingSettings, n: int, author_of: Callable[[C], Author], *, varied: bool = True
    ) -> None:
        self._take, self._lead, self._n = TAKES[settings.take], Lead(elsewhere=MIN_WEIGHT), n
        self._author_of: caps.AuthorOf[C] = author_of if settings.caps == "on" else lambda _: None
        self._kind_of: caps.KindOf[C] | None = kind if varied else None
        self._had: list[C] = []  # chosen so far in this round

    def begin(self, lead: Lead) -> None:
        """Begin another round. lead: as the trainer found it in the one before."""
        self._lead, self._had = lead, []

    def __call__(self, offered: Sequence[C], count: int, rng: random.Random) -> Sequence[C]:
        weighed = by_weight(offered, self._take, self._lead, rng)
        chosen = caps.choose(*weighed, count, self._author_of, self._kind_of, in_all=self._n, had=self._had)
        self._had += chosen
        return chosen


QUESTION_TOO_LONG = "the question fills our context"
ANSWER_TOO_LONG = "a right answer is longer than ours may be"
UNOPENED = "a right answer does not begin with our model.opening"
UNKNOWN_CHARACTERS = "characters that our tokenizer has not"


@dataclass
class Fitting:
    """A `batch.Filter`: refuses what our model cannot be trained on. Nobody is blamed, as other models can.

    unfit: `protocols.SelectivePolicy`.
    """

    unfit: Callable[[Scored], str | None]
    refused: Counter[str] = field(default_factory=Counter)  # rollouts, by reason, since `take_refused`

    def __call__(self, theirs: Sequence[Scored]) -> Sequence[Scored | None]:
        why = [self.unfit(scored) for scored in theirs]
        self.refused.update(filter(None, why))
        return [None if reason else scored for scored, reason in zip(theirs, why, strict=True)]

    def take_refused(self) -> Mapping[str, int]:
        """Return how many rollouts were refused since the last call, by reason."""
        refused, self.refused = self.refused, Counter()
        return dict(refused)
