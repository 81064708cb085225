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
from swarmd.types import PassRates, Scored, TaskRef, Weigh

# After this many completions of a specialty, an older one has weight 1/e.
MEMORY_COMPLETIONS = 256.0


@dataclass
class Success:
    """A mean reward by specialty, newest weighted most."""

    right: dict[str, float] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)

    def saw(self, rollouts: Sequence[Scored]) -> None:
        """Add a round's rollouts, with the rewards of the whole group of each."""
        for scored in rollouts:
            specialty, fade = scored.ref.specialty, math.exp(-len(scored.group) / MEMORY_COMPLETIONS)
            self.right[specialty] = self.right.get(specialty, 0.0) * fade + sum(scored.group)
            self.seen[specialty] = self.seen.get(specialty, 0.0) * fade + len(scored.group)

    def of(self, specialty: str) -> float:
        """Return the success in a specialty, from 0 to 1.

        For an unseen specialty, return the overall success; if nothing was seen at all, MIN_SUCCESS.
        """
        if specialty in self.seen:
            return self.right[specialty] / self.seen[specialty]
        return sum(self.right.values()) / sum(self.seen.values()) if self.seen else MIN_SUCCESS


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


# candidates -> the weight of each candidate in the draw; 0: never.
Weights = Callable[[Sequence[Candidate]], Sequence[float]]


class Take(NamedTuple):
    """A row of TAKES."""

    # Which rollouts of the pool may be drawn. Rewards of offers are unknown, so every offer may be fetched.
    keeps: Share
    weights: Weights  # weights of pooled rollouts, and of offers


def evenly(candidates: Sequence[Candidate]) -> Sequence[float]:
    """Weigh all candidates the same, as the paper does."""
    return [1.0] * len(candidates)


# Strategies from files (`config/own_strategy.py`) are added here.
TAKES: dict[str, Take] = {
    "uniform": Take(informative, evenly),
    "unfiltered": Take(everything, evenly),  # without the zero-advantage filter: as in the paper's open demo
    "right": Take(with_a_right_answer, evenly),
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
    # The share of an author's rollouts that pass the gate (`outliers.Gate`); only shares below 1.
    pass_rates: PassRates = field(default_factory=dict)

    def to_share(self, local: Sequence[Scored]) -> Sequence[Scored]:
        return [scored for scored in local if SHARES[self.settings.share](scored)]

    def judged(self, scored: Scored) -> Scored:
        """Return an external rollout in the group that gives its advantages; "paper": its own group."""
        return (
            scored
            if self.settings.weigh == "paper"
            else among_ours(scored, self.success.of(scored.rollout.ref.specialty))
        )

    def weighing(self, me: PeerId) -> Weigh:
        """Return the function that weighs the advantages of a batch's rollouts.

        External ones are weighed by `[sharing] weigh`, local ones are unchanged.
        """
        row = WEIGHS[self.settings.weigh]

        def weigh(scored: Scored, found: Sequence[float]) -> Sequence[float]:
            return found if scored.rollout.author == me else row(scored, found)

        return weigh
