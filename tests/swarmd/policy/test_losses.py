"""The losses against their formulas, written out token by token."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmd.policy.training import losses
from swarmd.policy.training.chunked_head import logits_gradient, token_logprobs

LOGPROB = st.floats(-8, 0, allow_nan=False, width=32)


@settings(max_examples=200)
@given(st.lists(st.tuples(LOGPROB, LOGPROB, st.floats(-3, 3, width=32)), min_size=1, max_size=6))
@example(
    [
        (math.log(ratio), 0.0, advantage)
        for ratio in (0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.0)
        for advantage in (-1.0, 1.0)
    ]
)
def test_grpo_is_the_clipped_surrogate_and_what_is_clipped_has_no_gradient(
    tokens: list[tuple[float, float, float]],
) -> None:
    new, old, advantages = (torch.tensor(x, dtype=torch.float64) for x in zip(*tokens, strict=True))
    ours = losses.surrogate(new.requires_grad_(), old, advantages, 0.2, 0.28)
    ours.sum().backward()
    clipped = losses.clipped(new.detach(), old, advantages, 0.2, 0.28).tolist()
    for got, gradient, is_clipped, (n, o, a) in zip(
        ours.tolist(), new.grad.tolist(), clipped, tokens, strict=True
    ):
        ratio = math.exp(n - o)
        assert got == pytest.approx(-min(ratio * a, min(max(ratio, 0.8), 1.28) * a), rel=1e-6, abs=1e-9)
        assert is_clipped == (ratio > 1.28 if a > 0 else ratio < 0.8 and a < 0)
        assert gradient == pytest.approx(0.0 if is_clipped else -ratio * a, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_token_logprobs_and_their_gradient(temperature: float) -> None:
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.tensor([0, 1, 2, 3, 4, 5, 10])
    got, entropy, probabilities = token_logprobs(logits, targets, temperature)
    there = torch.distributions.Categorical(logits=logits / temperature)
    torch.testing.assert_close(got, there.log_prob(targets).detach())
    torch.testing.assert_close(entropy, there.entropy().detach())
    upstream = torch.linspace(-1, 2, 7)
    (expected,) = torch.autograd.grad(there.log_prob(targets), logits, upstream)
    torch.testing.assert_close(logits_gradient(probabilities, targets, upstream, temperature), expected)


def test_importance_weights_are_cut_from_above_alone_and_have_no_gradient() -> None:
    new = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    weights = losses.truncated_weights(new, torch.tensor([-1.0, -5.0, -0.5]), 2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-0.5)])
    assert not weights.requires_grad
