"""Sharing strategies: which rollouts to share, which of others' to sample; how they are weighed is in `advantages`. Pure.

There is a table for each; a new strategy is a row here and no more. The first row is the paper's (SAPO, arXiv 2509.08721, section 5), and
the default but for the weights. docs/experiments.md has them all, and what was measured.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from p2p.types import PeerId
from swarmd.experience.advantages import BY_LIKELIHOOD, LEAST, WEIGHS, among_ours, unweighed
from swarmd.experience.caps import choose, first
from swarmd.types import Author, Scored, Tokens, Weigh

MEMORY = 256.0  # completions of a specialty after which an older one counts 1/e
SMALLEST = 0.05  # weight of a specialty in which nobody does better than we do


@dataclass
class Success:
    """Our own share of right completions by specialty, the newest counting most."""

    right: dict[str, float] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)

    def saw(self, local: Sequence[Scored]) -> None:
        """Take in a round's own rollouts."""
        for scored in local:
            specialty, fade = scored.rollout.ref.specialty, math.exp(-len(scored.rewards) / MEMORY)
            self.right[specialty] = self.right.get(specialty, 0.0) * fade + sum(scored.rewards)
            self.seen[specialty] = self.seen.get(specialty, 0.0) * fade + len(scored.rewards)

    def copy(self) -> "Success":
        return Success(dict(self.right), dict(self.seen))

    def of(self, specialty: str) -> float:
        """0 to 1. One that we never asked ourselves: as all others together; with nothing to go by, LEAST."""
        right, seen = self.right.get(specialty, 0.0), self.seen.get(specialty, 0.0)
        if not seen:
            right, seen = sum(self.right.values()), sum(self.seen.values())
        return right / seen if seen else LEAST


# What to share of a round's own rollouts.

Share = Callable[[Scored], bool]


def informative(scored: Scored) -> bool:
    """All else would be dropped by who has the paper's filter, for its rewards are the same there."""
    return scored.informative


def everything(_scored: Scored) -> bool:
    return True


def with_a_right_answer(scored: Scored) -> bool:
    """Groups that are right throughout, too: to others, who fail there, they are worth most."""
    return any(scored.rewards)


SHARES: Mapping[str, Share] = {"informative": informative, "right": with_a_right_answer, "all": everything}


def shared(local: Sequence[Scored], share: Share, most: int, rng: random.Random) -> Sequence[Scored]:
    """Which of a round's own rollouts to share. most: at random so many of them; 0: all."""
    chosen = [scored for scored in local if share(scored)]
    return chosen if not most or len(chosen) <= most else [chosen[i] for i in sorted(rng.sample(range(len(chosen)), most))]


# Which of the others' rollouts to take.

Take = Callable[[Sequence[Scored], Success, int], Sequence[float]]
"""(others' rollouts, our success, this round) -> the weight of each in the draw; 0: it is not taken."""


def uniform(pool: Sequence[Scored], _success: Success, _round: int) -> Sequence[float]:
    """The paper's: each rollout with an advantage is as likely."""
    return [float(scored.informative) for scored in pool]


def unfiltered(pool: Sequence[Scored], _success: Success, _round: int) -> Sequence[float]:
    """Without the zero-advantage filter: as in the paper's open demo."""
    return [1.0] * len(pool)


def right(pool: Sequence[Scored], _success: Success, _round: int) -> Sequence[float]:
    """What has a right answer, groups that are right throughout included."""
    return [float(any(scored.rewards)) for scored in pool]


def need(pool: Sequence[Scored], success: Success, _round: int) -> Sequence[float]:
    """By how much better others do in the rollout's specialty than we do ourselves; a little where they do not."""
    lead = _lead(pool, success)
    return [max(SMALLEST, lead[scored.rollout.ref.specialty]) if any(scored.rewards) else 0.0 for scored in pool]


def ahead(pool: Sequence[Scored], success: Success, _round: int) -> Sequence[float]:
    """Only specialties in which others do better than we do: a node ahead of all others trains alone, so J follows what is to be gained."""
    lead = _lead(pool, success)
    return [max(0.0, lead[scored.rollout.ref.specialty]) if any(scored.rewards) else 0.0 for scored in pool]


def _lead(pool: Sequence[Scored], success: Success) -> Mapping[str, float]:
    """By specialty, others' share of right completions less our own."""
    theirs: dict[str, list[float]] = {}
    for scored in pool:
        theirs.setdefault(scored.rollout.ref.specialty, []).append(fmean(scored.group))
    return {specialty: fmean(rates) - success.of(specialty) for specialty, rates in theirs.items()}


def novelty(pool: Sequence[Scored], _success: Success, _round: int) -> Sequence[float]:
    """Specialties evenly, however often each is there."""
    count = Counter(scored.rollout.ref.specialty for scored in pool if scored.informative)
    return [1 / count[scored.rollout.ref.specialty] if scored.informative else 0.0 for scored in pool]


def newest(pool: Sequence[Scored], _success: Success, number: int) -> Sequence[float]:
    """A round older is half as likely."""
    return [0.5 ** (number - scored.round) if scored.informative else 0.0 for scored in pool]


def authors(pool: Sequence[Scored], _success: Success, _round: int) -> Sequence[float]:
    """Authors evenly, however much each sends."""
    count = Counter(scored.rollout.author for scored in pool if scored.informative)
    return [1 / count[scored.rollout.author] if scored.informative else 0.0 for scored in pool]


TAKES: Mapping[str, Take] = {
    "uniform": uniform, "unfiltered": unfiltered, "right": right, "need": need, "ahead": ahead, "novelty": novelty, "newest": newest,
    "authors": authors,
}  # fmt: skip


def taken(
    pool: Sequence[Scored], weights: Sequence[float], n: int, author_of: Callable[[PeerId], Author], rng: random.Random
) -> Sequence[Scored]:
    """At most `n` of them by their weights, without replacement, under the caps of `swarmd.experience.caps`.

    Equal weights draw as the uniform choice does, to the last number from `rng`. Others: each gets the key u^(1/w), greatest first
    (Efraimidis and Spirakis, 2006).
    """
    candidates = [(scored, weight) for scored, weight in zip(pool, weights, strict=True) if weight > 0]
    known = [scored for scored, _ in candidates]

    def author(scored: Scored) -> Author:
        return author_of(scored.rollout.author)

    if len({weight for _, weight in candidates}) < 2:
        return choose(known, n, author, rng)
    keys = [rng.random() ** (1 / weight) for _, weight in candidates]
    return first([known[i] for i in sorted(range(len(known)), key=lambda i: -keys[i])], n, author, rng)


class SharingSettings(BaseModel):
    """`[sharing]`: what each node decides for itself about others' rollouts (SAPO section 3.2 leaves it open)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    share: Literal[tuple(SHARES)] = "informative"  # type: ignore[valid-type]
    share_most: Annotated[int, Field(ge=0, le=1024)] = 0  # of our own rollouts a round; 0: all that `share` lets through
    take: Literal[tuple(TAKES)] = "uniform"  # type: ignore[valid-type]
    weigh: Literal[tuple(WEIGHS)] = "positive"  # type: ignore[valid-type]  # docs/experiments.md has the measurement


@dataclass
class Sharing:
    """The strategies of one node, and what they know."""

    settings: SharingSettings = field(default_factory=SharingSettings)
    success: Success = field(default_factory=Success)
    logprobs: Callable[[Sequence[Scored]], Sequence[Tokens]] | None = None  # `protocols.Remembering`; None: the policy gives none

    def to_share(self, local: Sequence[Scored], rng: random.Random) -> Sequence[Scored]:
        return shared(local, SHARES[self.settings.share], self.settings.share_most, rng)

    def judged(self, scored: Scored) -> Scored:
        """Another's rollout in the group that gives its advantages: with the paper's weights always its own."""
        return scored if self.settings.weigh == "paper" else among_ours(scored, self.success.of(scored.rollout.ref.specialty))

    def weighing(self, batch: Sequence[Scored], me: PeerId) -> Weigh:
        """How this node weighs the advantages of the batch's rollouts: others' by `[sharing] weigh`, its own not at all."""
        if self.settings.weigh == "paper":
            return unweighed
        row, own = WEIGHS[self.settings.weigh], [s for s in batch if s.rollout.author == me]
        theirs = [s for s in batch if s.rollout.author != me]
        likely = dict(zip(map(id, theirs), self._likely(own, theirs), strict=True)) if self.settings.weigh in BY_LIKELIHOOD else {}

        def weigh(scored: Scored, found: Sequence[float]) -> Sequence[float]:
            if scored.rollout.author == me:
                return found
            return row(scored, found, self.success.of(scored.rollout.ref.specialty), likely.get(id(scored), (1.0,) * len(found)))

        return weigh

    def _likely(self, own: Sequence[Scored], theirs: Sequence[Scored]) -> Sequence[Sequence[float]]:
        """Of each completion: the probability of its tokens over that of our own text's, geometric means, at most 1."""
        if self.logprobs is None:
            return [(1.0,) * len(s.rewards) for s in theirs]
        bare = [s for s in theirs if s.tokens is None]
        found = iter(self.logprobs(bare) if bare else ())
        tokens = [s.tokens or next(found) for s in theirs]
        ours = [logprob for s in own if s.tokens for each in s.tokens.logprobs for logprob in each]
        usual = fmean(ours) if ours else -math.inf
        return [tuple(math.exp(min(0.0, fmean(each) - usual)) if each else 1.0 for each in t.logprobs) for t in tokens]


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
        number = max((scored.round for scored in pool), default=0)
        weights = TAKES[self.sharing.settings.take](pool, self.sharing.success, number)
        return [*mine, *taken(pool, weights, self.n_external, self.author_of, rng)]
