"""The losses against their formulas, written out token by token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmd.policy.training import losses
from swarmd.policy.training.chunked_head import logits_gradient, token_logprobs

LOGPROB = st.floats(-8, 0, allow_nan=False, width=32)


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.tuples(LOGPROB, LOGPROB, st.floats(-3, 3, width=32)), min_size=1, max_size=6))
def test_grpo_is_the_clipped_surrogate(tokens: list[tuple[float, float, float]]) -> None:
    new, old, advantages = (torch.tensor(x, dtype=torch.float64) for x in zip(*tokens, strict=True))
    ours = losses.surrogate(new, old, advantages, 0.2, 0.28)
    for got, (n, o, a) in zip(ours.tolist(), tokens, strict=True):
        ratio = math.exp(n - o)
        assert got == pytest.approx(-min(ratio * a, min(max(ratio, 0.8), 1.28) * a), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_clipped"),
    [(1.27, 1, False), (1.29, 1, True), (0.5, 1, False), (0.81, -1, False), (0.79, -1, True), (2.0, -1, False), (1.0, 1, False)],
)
def test_clip_is_asymmetric_and_stops_the_gradient(ratio: float, advantage: float, is_clipped: bool) -> None:
    new = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old, a = torch.zeros(1, dtype=torch.float64), torch.tensor([float(advantage)], dtype=torch.float64)
    losses.surrogate(new, old, a, 0.2, 0.28).sum().backward()
    assert bool(losses.clipped(new, old, a, 0.2, 0.28)) is is_clipped
    assert (new.grad.item() == 0) is is_clipped


def test_ratio_one_is_the_policy_gradient() -> None:
    new = torch.tensor([-0.3, -2.0], requires_grad=True)
    losses.surrogate(new, new.detach(), torch.tensor([0.5, -1.5]), 0.2, 0.28).sum().backward()
    assert new.grad.tolist() == [-0.5, 1.5]


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


def test_uniform_distribution_has_the_entropy_of_its_size() -> None:
    _, entropy, _ = token_logprobs(torch.zeros(1, 50), torch.tensor([3]), 1.0)
    assert entropy.item() == pytest.approx(math.log(50))


def test_asymre_leans_on_what_went_well() -> None:
    assert losses.asymre_advantages((1.0, 0.0, 0.0, 1.0), -0.1) == pytest.approx((0.6, -0.4, -0.4, 0.6))
    assert losses.asymre_advantages((1.0, 1.0), 0.0) == (0.0, 0.0)
    new = torch.tensor([-0.3, -2.0], requires_grad=True)
    each, _ = losses.LOSSES["asymre"].per_token(new, new.detach(), torch.tensor([0.6, -0.4]), losses.LossSettings())
    each.sum().backward()
    assert new.grad.tolist() == pytest.approx([-0.6, 0.4])


def test_importance_weights_are_cut_from_above_alone_and_have_no_gradient() -> None:
    new = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    weights = losses.truncated_weights(new, torch.tensor([-1.0, -5.0, -0.5]), 2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-0.5)])
    assert not weights.requires_grad


def test_means() -> None:
    assert losses.token_mean([3, 0, 1]) == [0.25, 0.0, 0.25]
    assert losses.sequence_mean([2, 0]) == [0.25, 0.0]
