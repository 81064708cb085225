"""Losses as pure functions on tensors. Every tensor is flat, one element a completion token, unless said."""

import torch
from torch import Tensor


def grpo(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """The clipped surrogate, per token, to be minimised (PPO, arXiv 1707.06347, eq. 7; the asymmetric clip is DAPO's, 2503.14476, eq. 8).

    No KL term (SAPO section 5: weight 0). `old` is without gradient; where it equals `logprobs` this is the plain policy gradient.
    """
    ratio = torch.exp(logprobs - old)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Which tokens got no gradient because of the clip (bool)."""
    ratio = torch.exp(logprobs - old)
    return ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """logits [N, V], targets [N] -> log-probability of each target, and the entropy (nats, without gradient) of each distribution.

    In float32, and at the temperature at which the policy samples: that is the policy.
    """
    distribution = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return distribution.gather(1, targets[:, None])[:, 0], entropy
