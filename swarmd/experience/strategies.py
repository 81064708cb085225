"""Sharing strategies: which local rollouts to share, and which external ones to sample. Pure.

There is a table for sharing, one for sampling, and one for weighting (in `advantages`). A new strategy is a
new row. The first row of each is the paper's (SAPO, arXiv 2509.08721, section 5); it is the default, except
for weighting. docs/experiments.md describes all rows with their measurements.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict

from p2p.types import PeerId
from swarmd.experience.advantages import MIN_SUCCESS, WEIGHS, among_ours
from swarmd.types import Lead, Scored, TaskRef, Weigh

# After this many completions of a specialty, an older one has weight 1/e.
MEMORY_COMPLETIONS = 256.0
# The weight of a specialty in which no peer is ahead of this node.
MIN_WEIGHT = 0.05
# A compared success is forgotten after this many rounds without an informative group.
LATELY_ROUNDS = 32
# After this many external completions, the peers' success in a specialty counts as known. It is the count of
# four groups of 8 with half the answers right (`beside_a_pair`).
ENOUGH_COMPLETIONS = 24

Count = Callable[[Scored], tuple[float, float]]
"""Returns the reward of a group's completions, and their number, as far as they count."""


def whole_group(scored: Scored) -> tuple[float, float]:
    return sum(scored.group), len(scored.group)


def beside_a_pair(scored: Scored) -> tuple[float, float]:
    """Estimate success without the bias of sharing only informative groups; return (rewards, count).

    Nodes share informative groups only, and the mean reward of these does not estimate the success p: at p =
    0.05 it is 0.15. But consider three completions of a group that are not all equal: two of them are right
    with probability p. Every group with three such completions is shared, by each row of SHARES and for any
    size of the group. So this function takes all pairs with different rewards, and averages the rewards of
    the remaining completions: the ratio is p for local and for external groups. (If questions differ in p, it
    is p weighed by p (1 - p).) A group counts by the variance of its rewards: 0 if they are equal, at most
    its size minus two.
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
    """A mean reward by specialty, newest weighted most."""

    right: dict[str, float] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)  # round of the newest rollout, by specialty

    def saw(self, rollouts: Sequence[Scored], number: int = 0, count: Count = whole_group) -> None:
        """Add a round's rollouts, with the rewards of the whole group of each."""
        for scored in rollouts:
            right, seen = count(scored)
            if seen:
                specialty, fade = scored.ref.specialty, math.exp(-seen / MEMORY_COMPLETIONS)
                self.right[specialty] = self.right.get(specialty, 0.0) * fade + right
                self.seen[specialty] = self.seen.get(specialty, 0.0) * fade + seen
                self.last[specialty] = number

    def forget(self, before: int) -> None:
        """Forget specialties without a rollout since that round."""
        for specialty in [specialty for specialty, last in self.last.items() if last < before]:
            del self.right[specialty], self.seen[specialty], self.last[specialty]

    def of(self, specialty: str) -> float:
        """Return the success in a specialty, from 0 to 1.

        For an unseen specialty, return the overall success; if nothing was seen at all, MIN_SUCCESS.
        """
        right, seen = self.right.get(specialty, 0.0), self.seen.get(specialty, 0.0)
        return right / seen if seen else self.overall

    @property
    def overall(self) -> float:
        seen = sum(self.seen.values())
        return sum(self.right.values()) / seen if seen else MIN_SUCCESS


# Which of a round's local rollouts to share.

Share = Callable[[Scored], bool]


def informative(scored: Scored) -> bool:
    """Select groups with different rewards: receivers with the paper's filter drop all other groups."""
    return scored.informative


def everything(_scored: Scored) -> bool:
    return True


def with_a_right_answer(scored: Scored) -> bool:
    """Select groups with at least one right answer, including those that are all right.

    Such groups are worth most to peers that fail at the question.
    """
    return any(scored.rewards)


SHARES: Mapping[str, Share] = {"informative": informative, "right": with_a_right_answer, "all": everything}


# Which external rollouts to take: from the pool for a batch, and from the offers for a fetch.


class Candidate(Protocol):
    """An external rollout that may be taken: scored and in the pool, or on offer.

    Types: `Scored`, `exchange.offers.Offered`.
    """

    @property
    def ref(self) -> TaskRef: ...

    @property
    def author(self) -> PeerId: ...

    @property
    def round(self) -> int:
        """This node's round in which it learned of the rollout."""


Weights = Callable[[Sequence[Candidate], Lead], Sequence[float]]
"""(candidates, the peers' lead over this node) -> the weight of each candidate in the draw; 0: never."""


class Take(NamedTuple):
    """A row of TAKES."""

    # Which rollouts of the pool may be drawn. Rewards of offers are unknown, so every offer may be fetched.
    keeps: Share
    weights: Weights  # weights of pooled rollouts, and of offers


def evenly(candidates: Sequence[Candidate], _lead: Lead) -> Sequence[float]:
    """Weigh all candidates the same, as the paper does."""
    return [1.0] * len(candidates)


def by_need(candidates: Sequence[Candidate], lead: Lead) -> Sequence[float]:
    """Weigh a rollout by the peers' lead in its specialty; at least MIN_WEIGHT."""
    return [max(MIN_WEIGHT, lead.of(c.ref.specialty)) for c in candidates]


def where_others_are_ahead(candidates: Sequence[Candidate], lead: Lead) -> Sequence[float]:
    """Weigh a rollout by the peers' lead in its specialty; 0 without a lead.

    A node ahead of all peers trains alone, so J follows the possible gain. Specialties that `Sharing.saw` has
    forgotten have the weight `Lead.elsewhere`, so a few of them are taken now and then.
    """
    return [max(0.0, lead.of(c.ref.specialty)) for c in candidates]


# Strategies from files (`config/own_strategy.py`) are added here.
TAKES: dict[str, Take] = {
    "uniform": Take(informative, evenly),
    "unfiltered": Take(everything, evenly),  # without the zero-advantage filter: as in the paper's open demo
    "right": Take(with_a_right_answer, evenly),
    "need": Take(with_a_right_answer, by_need),
    "ahead": Take(with_a_right_answer, where_others_are_ahead),
}


class SharingSettings(BaseModel):
    """`[sharing]`: a node's choices about external rollouts, which SAPO section 3.2 leaves open."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    share: Literal[tuple(SHARES)] = "informative"  # type: ignore[valid-type]
    take: str = "uniform"  # a key of TAKES
    weigh: Literal[tuple(WEIGHS)] = "positive"  # type: ignore[valid-type]  # docs/experiments.md has the measurement
    # Share caps by author, network group and specialty (`caps`); off: the paper's uniform choice.
    caps: Literal["on", "off"] = "on"


@dataclass
class Sharing:
    """The sharing strategies of one node, with their state."""

    settings: SharingSettings = field(default_factory=SharingSettings)
    success: Success = field(default_factory=Success)  # this node's, over all its answers
    # Success of this node and of its peers, by `beside_a_pair` and this node's verifier: comparable.
    own: Success = field(default_factory=Success)
    others: Success = field(default_factory=Success)
    lead: Lead = field(default_factory=lambda: Lead(elsewhere=MIN_WEIGHT))

    def to_share(self, local: Sequence[Scored]) -> Sequence[Scored]:
        return [scored for scored in local if SHARES[self.settings.share](scored)]

    def judged(self, scored: Scored) -> Scored:
        """Return an external rollout in the group that gives its advantages; "paper": its own group."""
        return (
            scored
            if self.settings.weigh == "paper"
            else among_ours(scored, self.success.of(scored.rollout.ref.specialty))
        )

    def saw(self, local: Sequence[Scored], theirs: Sequence[Scored], number: int) -> None:
        """Add the rollouts of a round, before its batch is drawn."""
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
        """Return this node's success in a specialty, comparable with the peers'.

        If no local group is informative there, nearly all answers are right or nearly all are wrong, and
        their mean tells which. A specialty that this node never asks counts as weak, because it does not
        train on it alone.
        """
        if specialty in self.own.seen:
            return self.own.of(specialty)
        return self.success.of(specialty) if specialty in self.success.seen else MIN_SUCCESS

    def weighing(self, me: PeerId) -> Weigh:
        """Return the function that weighs the advantages of a batch's rollouts.

        External ones are weighed by `[sharing] weigh`, local ones are unchanged.
        """
        row = WEIGHS[self.settings.weigh]

        def weigh(scored: Scored, found: Sequence[float]) -> Sequence[float]:
            success = self.success.of(scored.rollout.ref.specialty)
            return found if scored.rollout.author == me else row(scored, found, success)

        return weigh
