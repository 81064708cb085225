"""Losses as pure functions. Every tensor is flat, one element a completion token, unless said.

A batch's loss is the sum over its completion tokens of a loss per token times the weight of its mean.
"""

from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor


def grpo(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """The clipped surrogate, per token, to be minimised (PPO, arXiv 1707.06347, eq. 7; the asymmetric clip is DAPO's, 2503.14476, eq. 8).

    No KL term (SAPO section 5: weight 0). `old` is without gradient; where it equals `logprobs` this is the plain policy gradient.
    """
    ratio = torch.exp(logprobs - old)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Which tokens got no gradient from `grpo` because of the clip (bool)."""
    ratio = torch.exp(logprobs - old)
    return ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))


def asymre(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Asymmetric REINFORCE, per token, to be minimised (AsymRE, arXiv 2506.20520): no ratio, so also for what another policy wrote.

    advantages: from `asymre_advantages`.
    """
    return -advantages * logprobs


def asymre_advantages(rewards: Sequence[float], shift: float, group: Sequence[float] = ()) -> tuple[float, ...]:
    """r − (V̂ + δV) of each completion; V̂ is the mean of its group (empty: these rewards), shift is δV. Below 0 it leans on what went well.

    Unlike GRPO's these are not all 0 where rewards agree, unless shift is.
    """
    baseline = fmean(group or rewards) + shift
    return tuple(r - baseline for r in rewards)


def truncated_weights(logprobs: Tensor, drawn_with: Tensor, cap: float) -> Tensor:
    """min(π / π_drawn, cap), without gradient: importance weights of text that an engine or an older policy drew with other probabilities.

    Truncated, so that a rare token cannot take over the batch: biased, of bounded variance (Ionides 2008; IMPALA, arXiv 1802.01561).
    """
    return torch.exp(logprobs.detach() - drawn_with).clamp(max=cap)


def k3(logprobs: Tensor, drawn_with: Tensor) -> Tensor:
    """Per token, an estimate of KL(drawn || π) from tokens of the policy that drew them: (r − 1) − log r, r = π / π_drawn.

    Unbiased and never below 0 (Schulman, "Approximating KL divergence", 2020, joschu.net/blog/kl-approx.html). For KL(π || start) the
    tokens are π's own, and the parts change: k3(start, π).
    """
    log_ratio = logprobs - drawn_with
    return torch.expm1(log_ratio) - log_ratio


def token_mean(lengths: Sequence[int]) -> list[float]:
    """Every completion token of the batch weighs the same (DAPO, arXiv 2503.14476, eq. 12).

    lengths, in tokens, and the weights: one a completion.
    """
    tokens = sum(lengths)
    return [1 / tokens if n else 0.0 for n in lengths]


def sequence_mean(lengths: Sequence[int]) -> list[float]:
    """Every completion weighs the same, its tokens 1/|o| of it (GRPO, arXiv 2402.03300, eq. 3). Empty ones count, and weigh nothing."""
    return [1 / (len(lengths) * n) if n else 0.0 for n in lengths]


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """logits [N, V], targets [N] -> of each row's distribution: log-probability of the target, entropy in nats, all probabilities [N, V].

    In float32, and at the temperature at which the policy samples: that is the policy. Without gradient; see `logits_gradient`.
    """
    with torch.no_grad():
        scaled = logits.float() if temperature == 1 else logits.float() / temperature
        probabilities = scaled.softmax(-1)
        # log Z from the likeliest token, whose probability is at least 1/V: exact, without a second pass of exponentials.
        highest, likeliest = scaled.max(-1)
        normaliser = highest - probabilities.gather(1, likeliest[:, None])[:, 0].log()
        entropy = normaliser - torch.linalg.vecdot(probabilities, scaled)
        return scaled.gather(1, targets[:, None])[:, 0] - normaliser, entropy, probabilities


def logits_gradient(probabilities: Tensor, targets: Tensor, gradient: Tensor, temperature: float) -> Tensor:
    """From the gradient [N] of some loss by the targets' log-probabilities, its gradient by the logits [N, V]: (1[target] − p) g / T.

    Overwrites `probabilities`.
    """
    gradient = gradient[:, None] / temperature
    return probabilities.mul_(-gradient).scatter_add_(1, targets[:, None], gradient)
