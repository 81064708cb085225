"""Advantages: what a loss makes of a rollout's rewards, and how a node weighs what others wrote. Pure.

`advantages` is the one place where the two meet. A loss (`swarmd.policy.training.losses.LOSSES`) gives every
completion an advantage; a row of WEIGHS changes those of others' rollouts, whatever the loss; our own keep
theirs. Nothing stores an advantage. An advantage is taken over a group: `among_ours` gives one to a single
right answer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev

from swarmd.types import Scored, Weigh

# Answers in the group of a single one of another's, with ours beside it (`among_ours`).
GROUP = 16
# The success that a baseline is taken from: its spread is never nought.
MIN_SUCCESS, MAX_SUCCESS = 1 / GROUP, 1 - 1 / GROUP


def advantages(scored: Scored, loss: Callable[[Scored], Sequence[float]], weigh: Weigh) -> tuple[float, ...]:
    """Return each completion's advantage in an update: the loss's own, weighed."""
    return tuple(weigh(scored, loss(scored)))


def unweighed(_scored: Scored, found: Sequence[float], _success: float = 0.0) -> Sequence[float]:
    """Keep what the loss gives, as if our own policy had written the text (SAPO section 3.2)."""
    return found


def within_group(scored: Scored) -> tuple[float, ...]:
    """Return (r − mean) / std over the group (GRPO, arXiv 2402.03300, 4.1.2); 0 where all rewards agree."""
    mean, std = fmean(scored.group), pstdev(scored.group)
    return tuple((r - mean) / (std + 1e-4) for r in scored.rewards)


def shifted(scored: Scored, shift: float) -> tuple[float, ...]:
    """Return r − (V̂ + δV), V̂ the mean of the group, δV the shift (AsymRE, arXiv 2506.20520).

    Below 0 the shift leans on what went well. Unlike GRPO's these advantages are not all 0 where rewards
    agree, unless the shift is.
    """
    baseline = fmean(scored.group) + shift
    return tuple(r - baseline for r in scored.rewards)


def among_ours(scored: Scored, success: float) -> Scored:
    """Return another's single good answer in a group with our own answers; anything else as it is.

    success: the mean reward of our own answers in its specialty. The advantage is then high where we fail and
    low where we do not, under any loss; where we hardly ever fail, the rewards agree, and there is none. A
    single answer worse than our mean gets no group: others' mistakes would push our policy, whatever they
    say.
    """
    if len(scored.group) > 1 or not scored.rewards[0] or scored.rewards[0] < success:
        return scored
    right = round(success * (GROUP - 1))
    return replace(scored, whole=(*scored.rewards, *(1.0,) * right, *(0.0,) * (GROUP - 1 - right)))


# How to weigh what others wrote: a row for each value of `[sharing] weigh`.

Weighting = Callable[[Scored, Sequence[float], float], Sequence[float]]
"""Returns advantages, from another's rollout, the loss's advantages, and our own success in its specialty,
from 0 to 1 (`strategies.Sharing`).
"""


def positive(_scored: Scored, found: Sequence[float], _success: float) -> Sequence[float]:
    """Return max(A, 0): nothing is pushed down that our policy might never have said."""
    return tuple(max(0.0, advantage) for advantage in found)


def right_one(scored: Scored, _found: Sequence[float], _success: float) -> Sequence[float]:
    """Return the reward: 1 for a right answer, 0 for a wrong one (rejection-sampled fine-tuning)."""
    return scored.rewards


def own_baseline_positive(scored: Scored, _found: Sequence[float], success: float) -> Sequence[float]:
    """Return (r − b) / √(b (1 − b)), b our own success in that specialty; 0 where that is below 0.

    A single answer and a group that is right throughout count, too.
    """
    b = min(MAX_SUCCESS, max(MIN_SUCCESS, success))
    return tuple(max(0.0, (reward - b) / math.sqrt(b * (1 - b))) for reward in scored.rewards)


WEIGHS: Mapping[str, Weighting] = {
    "paper": unweighed,
    "positive": positive,
    "right": right_one,
    "own-positive": own_baseline_positive,
}
