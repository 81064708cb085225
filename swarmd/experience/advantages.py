"""Advantages: from a rollout's rewards, by the loss, then weighed for external rollouts. Pure.

`advantages` applies the two steps, and nothing else does. First a loss
(`swarmd.policy.training.losses.LOSSES`) gives every completion an advantage. Then a row of WEIGHS changes the
advantages of external rollouts, which other nodes generated; local rollouts keep their advantages. Advantages
are never stored. A loss compares the rewards of a group, so a single answer has no advantage; `among_ours`
puts it into a group with this node's own answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev

from swarmd.types import Scored, Weigh

# Size of the group that `among_ours` makes from one external answer and this node's own answers.
GROUP = 16
# The success that counts before anything was seen.
MIN_SUCCESS = 1 / GROUP


def advantages(scored: Scored, loss: Callable[[Scored], Sequence[float]], weigh: Weigh) -> tuple[float, ...]:
    """Return each completion's advantage in an update: the loss's advantage, weighed."""
    return tuple(weigh(scored, loss(scored)))


def unweighed(_scored: Scored, found: Sequence[float]) -> Sequence[float]:
    """Return the loss's advantages unchanged, as if this node's policy had written the text (SAPO 3.2)."""
    return found


def within_group(scored: Scored) -> tuple[float, ...]:
    """Return (r − mean) / std over the group (GRPO, arXiv 2402.03300, 4.1.2); 0 if all rewards are equal."""
    mean, std = fmean(scored.group), pstdev(scored.group)
    return tuple((r - mean) / (std + 1e-4) for r in scored.rewards)


def shifted(scored: Scored, shift: float) -> tuple[float, ...]:
    """Return r − (V̂ + δV), V̂ the mean of the group, δV the shift (AsymRE, arXiv 2506.20520).

    A shift below 0 gives more weight to successes. Unlike with GRPO, equal rewards give advantages other than
    0, unless the shift is 0.
    """
    baseline = fmean(scored.group) + shift
    return tuple(r - baseline for r in scored.rewards)


def among_ours(scored: Scored, success: float) -> Scored:
    """Put a single good external answer into a group with our own answers; return any other unchanged.

    success: the mean reward of this node's answers in that specialty. Under any loss, the advantage is then
    high where this node fails and low where it succeeds; if it hardly ever fails, all rewards are equal and
    there is no advantage. A single answer that is worse than this node's mean gets no group, because other
    nodes' mistakes would push the policy in arbitrary directions.
    """
    if len(scored.group) > 1 or not scored.rewards[0] or scored.rewards[0] < success:
        return scored
    right = round(success * (GROUP - 1))
    return replace(scored, whole=(*scored.rewards, *(1.0,) * right, *(0.0,) * (GROUP - 1 - right)))


# Weighting of external rollouts: a row for each value of `[sharing] weigh`.


def positive(_scored: Scored, found: Sequence[float]) -> Sequence[float]:
    """Return max(A, 0): text that this policy might never write is not pushed down."""
    return tuple(max(0.0, advantage) for advantage in found)


def right_one(scored: Scored, _found: Sequence[float]) -> Sequence[float]:
    """Return the reward: 1 for a right answer, 0 for a wrong one (rejection-sampled fine-tuning)."""
    return scored.rewards


WEIGHS: Mapping[str, Weigh] = {"paper": unweighed, "positive": positive, "right": right_one}
