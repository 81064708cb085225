"""Sharing strategies: which rollouts to share, which of others' to sample. Pure.

How they are weighed is in `advantages`. There is a table for each; a new strategy is a row here and no more.
The first row is the paper's (SAPO, arXiv 2509.08721, section 5), and the default but for the weights.
docs/experiments.md has them all, and what was measured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict

from p2p.types import PeerId
from swarmd.experience.advantages import MIN_SUCCESS, WEIGHS, among_ours
from swarmd.types import Lead, Scored, TaskRef, Weigh

# After so many completions of a specialty an older one counts 1/e.
MEMORY_COMPLETIONS = 256.0
# The weight of a specialty in which nobody does better than we do.
MIN_WEIGHT = 0.05
# After so many rounds without another informative group a success that is compared is forgotten.
LATELY_ROUNDS = 32
# After so many completions of other nodes we know their success in a specialty: as many as count in four
# groups of 8, half of them right.
ENOUGH_COMPLETIONS = 24

Count = Callable[[Scored], tuple[float, float]]
"""Returns the reward of a group's completions, and their number, as far as they count."""


def whole_group(scored: Scored) -> tuple[float, float]:
    return sum(scored.group), len(scored.group)


def beside_a_pair(scored: Scored) -> tuple[float, float]:
    """Count the completions that are left beside two with different rewards; the mean over all such pairs.

    Nodes share informative groups only, whose mean reward is no estimate of success p: at p = 0.05 it is
    0.15. But of three completions that do not all agree, two are right with probability p, and every group
    with such three is shared, whatever its size and by each row of SHARES. So this ratio is p for our own
    groups and for those of other nodes. (If questions differ in p, it is p weighed by p (1 - p).) A group
    counts by the variance of its rewards: not at all if they agree, at most for its size less two.
    """
    n = len(scored.group)
    if not scored.informative:
        return 0.0, 0.0
    first, second, third = (sum(reward**power for reward in scored.group) for power in (1, 2, 3))
    # The sums over pairs of (r - s)^2, and of (r - s)^2 (r + s).
    differ, both = n * second - first**2, n * third - second * first
    return 4 * (first * differ - both) / n**2, 4 * (n - 2) * differ / n**2


@dataclass
class Success:
    """A mean reward by specialty, the newest counting most."""

    right: dict[str, float] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)  # our round in which the newest came, by specialty

    def saw(self, rollouts: Sequence[Scored], number: int = 0, count: Count = whole_group) -> None:
        """Take in a round's rollouts, with the rewards of the whole group of each."""
        for scored in rollouts:
            right, seen = count(scored)
            if seen:
                specialty, fade = scored.ref.specialty, math.exp(-seen / MEMORY_COMPLETIONS)
                self.right[specialty] = self.right.get(specialty, 0.0) * fade + right
                self.seen[specialty] = self.seen.get(specialty, 0.0) * fade + seen
                self.last[specialty] = number

    def forget(self, before: int) -> None:
        """Forget specialties of which nothing came since that round."""
        for specialty in [specialty for specialty, last in self.last.items() if last < before]:
            del self.right[specialty], self.seen[specialty], self.last[specialty]

    def of(self, specialty: str) -> float:
        """Return the success in a specialty, from 0 to 1.

        Where nothing of it was seen, return that of all together; where nothing was seen at all, MIN_SUCCESS.
        """
        right, seen = self.right.get(specialty, 0.0), self.seen.get(specialty, 0.0)
        return right / seen if seen else self.overall

    @property
    def overall(self) -> float:
        seen = sum(self.seen.values())
        return sum(self.right.values()) / seen if seen else MIN_SUCCESS


# What to share of a round's own rollouts.

Share = Callable[[Scored], bool]


def informative(scored: Scored) -> bool:
    """Select groups with different rewards: receivers with the paper's filter drop all others."""
    return scored.informative


def everything(_scored: Scored) -> bool:
    return True


def with_a_right_answer(scored: Scored) -> bool:
    """Select groups with a reward, also those that are right throughout.

    To others, who fail there, these are worth most.
    """
    return any(scored.rewards)


SHARES: Mapping[str, Share] = {"informative": informative, "right": with_a_right_answer, "all": everything}


# Which of the others' rollouts to take: of the pool for a batch, and of what is on offer for a fetch.


class Candidate(Protocol):
    """Somebody else's rollout that may be taken: scored and in the pool, or on offer.

    Types: `Scored`, `exchange.offers.Offered`.
    """

    @property
    def ref(self) -> TaskRef: ...

    @property
    def author(self) -> PeerId: ...

    @property
    def round(self) -> int:
        """The round of ours in which we heard of it."""


Weights = Callable[[Sequence[Candidate], Lead], Sequence[float]]
"""(candidates, by how much others are ahead of us) -> the weight of each in the draw; 0: it is not taken."""


class Take(NamedTuple):
    """A row of TAKES."""

    # Which of the pool may be drawn. The rewards of offers are not known: all of them may be fetched.
    keeps: Share
    weights: Weights  # weights of pooled rollouts, and of offers


def evenly(candidates: Sequence[Candidate], _lead: Lead) -> Sequence[float]:
    """Weigh all candidates the same, as the paper does."""
    return [1.0] * len(candidates)


def by_need(candidates: Sequence[Candidate], lead: Lead) -> Sequence[float]:
    """Weigh a rollout by how far others are ahead of us in its specialty; a little where they are not."""
    return [max(MIN_WEIGHT, lead.of(c.ref.specialty)) for c in candidates]


def where_others_are_ahead(candidates: Sequence[Candidate], lead: Lead) -> Sequence[float]:
    """Weigh 0 where others do not do better than we do.

    A node ahead of all others trains alone, so J follows what is to be gained. Now and then it takes a few of
    the other specialties, too: those that `Sharing.saw` has forgotten.
    """
    return [max(0.0, lead.of(c.ref.specialty)) for c in candidates]


# Files of `config/own_strategy.py` come on top.
TAKES: dict[str, Take] = {
    "uniform": Take(informative, evenly),
    "unfiltered": Take(everything, evenly),  # without the zero-advantage filter: as in the paper's open demo
    "right": Take(with_a_right_answer, evenly),
    "need": Take(with_a_right_answer, by_need),
    "ahead": Take(with_a_right_answer, where_others_are_ahead),
}


class SharingSettings(BaseModel):
    """`[sharing]`: each node's own choices about others' rollouts, which SAPO section 3.2 leaves open."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    share: Literal[tuple(SHARES)] = "informative"  # type: ignore[valid-type]
    take: str = "uniform"  # of TAKES
    weigh: Literal[tuple(WEIGHS)] = "positive"  # type: ignore[valid-type]  # docs/experiments.md has the measurement
    # Share caps by author, network group and specialty (`caps`); off: the paper's uniform choice.
    caps: Literal["on", "off"] = "on"


@dataclass
class Sharing:
    """The strategies of one node, and what they know."""

    settings: SharingSettings = field(default_factory=SharingSettings)
    success: Success = field(default_factory=Success)  # our own, of all that we answered
    # The same `beside_a_pair`, by our own verifier: the two that can be compared.
    own: Success = field(default_factory=Success)
    others: Success = field(default_factory=Success)
    lead: Lead = field(default_factory=lambda: Lead(elsewhere=MIN_WEIGHT))

    def to_share(self, local: Sequence[Scored]) -> Sequence[Scored]:
        return [scored for scored in local if SHARES[self.settings.share](scored)]

    def judged(self, scored: Scored) -> Scored:
        """Return another's rollout in the group that gives its advantages: its own by the paper's weights."""
        return (
            scored
            if self.settings.weigh == "paper"
            else among_ours(scored, self.success.of(scored.rollout.ref.specialty))
        )

    def saw(self, local: Sequence[Scored], theirs: Sequence[Scored], number: int) -> None:
        """Take in what a round brought, before its batch is drawn."""
        self.success.saw(local, number)
        for compared, rollouts in ((self.own, local), (self.others, theirs)):
            compared.saw(rollouts, number, beside_a_pair)
            compared.forget(number - LATELY_ROUNDS)
        ahead = {
            specialty: self.others.of(specialty) - self._own(specialty)
            for specialty, seen in self.others.seen.items()
            if seen >= ENOUGH_COMPLETIONS
        }
        own = self.own if self.own.seen else self.success
        self.lead = Lead(ahead, max(MIN_WEIGHT, self.others.overall - own.overall))

    def _own(self, specialty: str) -> float:
        """Return our own success in a specialty, to be compared with that of other nodes.

        If no group of ours is informative there, nearly all our answers are right or nearly all are wrong,
        and their mean says which. A specialty that we never ask counts as weak: alone we do not train on it.
        """
        if specialty in self.own.seen:
            return self.own.of(specialty)
        return self.success.of(specialty) if specialty in self.success.seen else MIN_SUCCESS

    def weighing(self, me: PeerId) -> Weigh:
        """Return how this node weighs the advantages of a batch's rollouts.

        Others' are weighed by `[sharing] weigh`, its own not at all.
        """
        row = WEIGHS[self.settings.weigh]

        def weigh(scored: Scored, found: Sequence[float]) -> Sequence[float]:
            if scored.rollout.author == me:
                return found
            return row(scored, found, self.success.of(scored.rollout.ref.specialty))

        return weigh
