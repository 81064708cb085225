"""The place that chooses some of others' rollouts by `[sharing] take`: of the pool for a batch, of offers for a fetch. Pure.

`by_weight` is that choice. The trainer's `SharingSampler` draws a batch with it; the daemon's `OfferChoice` what to fetch. The weights are
the same functions (`strategies.TAKES`) of what both know of a rollout: specialty, author and age. Rewards are known of the pool alone.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from p2p.types import PeerId
from swarmd.experience import caps
from swarmd.experience.strategies import SMALLEST, TAKES, Candidate, Sharing
from swarmd.types import Author, Lead, Scored

C = TypeVar("C", bound=Candidate)


class Capped(Protocol[C]):
    """At most `n` of some candidates under the caps, uniformly, or the first of a random order: `caps.choose`, or a `caps.Ration`."""

    def __call__(self, candidates: Sequence[C], n: int, rng: random.Random, *, in_order: bool) -> list[C]: ...


def by_weight(candidates: Sequence[C], weights: Sequence[float], n: int, capped: Capped[C], rng: random.Random) -> Sequence[C]:
    """At most `n` of them by their weights, without replacement, under caps.

    Equal weights draw as the uniform choice does, to the last number from `rng`. Others: each gets the key u^(1/w), greatest first
    (Efraimidis and Spirakis, 2006).
    """
    weighed = [(candidate, weight) for candidate, weight in zip(candidates, weights, strict=True) if weight > 0]
    known = [candidate for candidate, _ in weighed]
    if len({weight for _, weight in weighed}) < 2:
        return capped(known, n, rng, in_order=False)
    keys = [rng.random() ** (1 / weight) for _, weight in weighed]
    return capped([known[i] for i in sorted(range(len(known)), key=lambda i: -keys[i])], n, rng, in_order=True)


@dataclass(frozen=True)
class SharingSampler:
    """A `Sampler`: I of our own, J of the others' by `[sharing] take`; by default the paper's (SAPO section 5).

    Fewer where there are fewer. Our own zero-advantage rollouts stay: they have no gradient, but they are part of the mean. `rng` is drawn
    from only where there is a choice to make, so J = 0 leaves it untouched.
    """

    sharing: Sharing = field(default_factory=Sharing)
    n_local: int = 4
    n_external: int = 4
    author_of: Callable[[PeerId], Author] = Author

    def __call__(self, local: Sequence[Scored], pool: Sequence[Scored], rng: random.Random) -> Sequence[Scored]:
        mine = list(local) if len(local) <= self.n_local else rng.sample(list(local), self.n_local)
        if not self.n_external:
            return mine
        take = TAKES[self.sharing.settings.take]
        kept = [scored for scored in pool if take.keeps(scored)]
        weights = take.weights(kept, self.sharing.lead)
        return [*mine, *by_weight(kept, weights, self.n_external, self._capped, rng)]

    def _capped(self, candidates: Sequence[Scored], n: int, rng: random.Random, *, in_order: bool) -> list[Scored]:
        choose = caps.first if in_order else caps.choose
        return choose(candidates, n, lambda scored: self.author_of(scored.author), rng)


class OfferChoice(Generic[C]):
    """What to fetch of what is on offer, by `[sharing] take`. A round's choice is made in several calls, under caps for all together."""

    def __init__(self, take: str, n: int, author_of: Callable[[PeerId], Author], rng: random.Random) -> None:
        self._weights, self._lead = TAKES[take].weights, Lead(elsewhere=SMALLEST)
        self._ration = caps.Ration[C](n, lambda candidate: author_of(candidate.author), rng)

    def begin(self, lead: Lead) -> None:
        """Another round begins. lead: as the trainer found it in the one before."""
        self._lead = lead
        self._ration.begin()

    def __call__(self, offered: Sequence[C], count: int, rng: random.Random) -> Sequence[C]:
        return by_weight(offered, self._weights(offered, self._lead), count, self._ration, rng)
