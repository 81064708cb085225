"""The losses, their keys of `[train]`, and the means over a batch.

This module is pure. A new loss is a row of LOSSES, a new mean a row of MEANS.

Every tensor is flat, with one element per completion token. A batch's loss is the sum over its completion
tokens of the token's loss times its weight in the mean. The configuration imports this module in processes
that must not load torch, so only methods of tensors are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from swarmd.experience.advantages import shifted, within_group
from swarmd.types import Scored

if TYPE_CHECKING:
    from torch import Tensor


class LossSettings(BaseModel):
    """The keys of `[train]` that belong to a loss; `TrainConfig` inherits them.

    A new key also needs a line in the example file.
    """

    model_config = ConfigDict(frozen=True)

    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(ge=0, le=10)] = 0.28
    asymre_shift: Annotated[float, Field(ge=-1, le=1)] = -0.1  # added to the mean reward: asymre's baseline
    # Makes grpo use truncated importance weights instead of clipping. 0: off; None: 2 with a foreign engine
    # or with replay, else off.
    importance_cap: Annotated[float, Field(ge=0, le=100)] | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """A row of LOSSES."""

    # (logprobs, old, advantages, settings) -> the loss of each token, to be minimised, and whether it was
    # clipped (bool; None: no token). `old` are the log-probabilities under the policy that drew the token,
    # without gradient, or `logprobs` itself if they are unknown.
    per_token: Callable[[Tensor, Tensor, Tensor, LossSettings], tuple[Tensor, Tensor | None]]
    # One advantage per completion. Other nodes' are weighted afterwards (`swarmd.experience.advantages`).
    advantages: Callable[[Scored, LossSettings], Sequence[float]]
    # Whether the loss has a ratio of new to old probabilities, and so can use importance weights instead of
    # clipping.
    uses_ratio: bool = False


def grpo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor | None]:
    """Compute GRPO's clipped surrogate.

    If `importance_cap` is above 0, compute the policy gradient with truncated importance weights instead:
    min(π / π_drawn, cap), without gradient.
    """
    low, high, current = settings.clip_low, settings.clip_high, logprobs.detach()
    if settings.importance_cap:
        # For text that an engine or an older policy drew with other probabilities. The weights are truncated
        # so that a rare token cannot dominate the batch: this is biased, but has bounded variance (Ionides
        # 2008; IMPALA, arXiv 1802.01561).
        weights = (current - old).exp().clamp(max=settings.importance_cap)
        return surrogate(logprobs, current, advantages, low, high) * weights, None
    return surrogate(logprobs, old, advantages, low, high), clipped(current, old, advantages, low, high)


def asymre(
    logprobs: Tensor, _old: Tensor, advantages: Tensor, _settings: LossSettings
) -> tuple[Tensor, None]:
    """Compute Asymmetric REINFORCE (AsymRE, arXiv 2506.20520).

    It has no ratio, so it also works for text that another policy wrote.
    """
    return -advantages * logprobs, None


LOSSES: Mapping[str, Loss] = {
    "grpo": Loss(grpo, lambda scored, _: within_group(scored), uses_ratio=True),
    "asymre": Loss(asymre, lambda scored, settings: shifted(scored, settings.asymre_shift)),
}


def surrogate(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return the clipped surrogate per token, to be minimised.

    This is PPO's surrogate (arXiv 1707.06347, eq. 7) with the asymmetric clip of DAPO (2503.14476, eq. 8) and
    no KL term (SAPO section 4.2: weight 0). `old` has no gradient. If it equals `logprobs`, this is the plain
    policy gradient.
    """
    ratio = (logprobs - old).exp()
    return -(ratio * advantages).minimum(ratio.clamp(1 - low, 1 + high) * advantages)


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return which tokens got no gradient from `surrogate` because of the clip (bool)."""
    ratio = (logprobs - old).exp()
    return ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))


def k3(logprobs: Tensor, drawn_with: Tensor) -> Tensor:
    """Estimate KL(drawn || π) per token, from tokens that the policy `drawn` drew.

    The estimate is (r − 1) − log r with r = π / π_drawn, which is unbiased and never negative (Schulman,
    "Approximating KL divergence", 2020, joschu.net/blog/kl-approx.html). For KL(π || reference), the tokens
    are drawn by π and the arguments are exchanged: k3(reference, π).
    """
    log_ratio = logprobs - drawn_with
    return log_ratio.expm1() - log_ratio


def token_mean(lengths: Sequence[int]) -> list[float]:
    """Weight every completion token of the batch equally (DAPO, arXiv 2503.14476, eq. 12).

    lengths: tokens of each completion. Returns one weight per completion.
    """
    tokens = sum(lengths)
    return [1 / tokens if n else 0.0 for n in lengths]


def sequence_mean(lengths: Sequence[int]) -> list[float]:
    """Weight every completion equally, and each of its |o| tokens by 1/|o| (GRPO, arXiv 2402.03300, eq. 3).

    Empty completions are counted, but have weight 0.
    """
    return [1 / (len(lengths) * n) if n else 0.0 for n in lengths]


MEANS: Mapping[str, Callable[[Sequence[int]], list[float]]] = {"token": token_mean, "sequence": sequence_mean}
