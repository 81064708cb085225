"""The head gives float32 logits if the device can compute them, and a correct gradient on MPS."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from swarmd.policy import lm_head
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.lm_head import OwnHead, take_over_head
from tests.swarmd.policy.conftest import answered, config_of, make_model
from tests.swarmd.policy.test_on_device import CUDA, QUESTIONS


@pytest.fixture(params=["as CUDA does", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a device with float32 products of 16-bit matrices: a patched CPU, or CUDA."""
    if request.param == "cuda":
        return "cuda"
    plain = torch.mm

    def product(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        return plain(a.to(out_dtype), b.to(out_dtype)) if out_dtype else plain(a, b)

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(lm_head, "gives_float32", lambda device, dtype: True)
    return "cpu"


@pytest.mark.parametrize("bias", [False, True])
def test_logits_keep_float32_precision_and_gradients_equal_the_layers(device: str, bias: bool) -> None:
    torch.manual_seed(0)
    plain: Any = nn.Module()
    plain.head = nn.Linear(64, 96, bias=bias, dtype=torch.bfloat16, device=device)
    plain.get_output_embeddings = lambda: plain.head
    states = torch.randn(2, 5, 64, dtype=torch.bfloat16, device=device)
    found = []
    for exact in (False, True):
        if exact:
            take_over_head(plain)
            assert type(plain.head) is OwnHead
        plain.zero_grad()
        seen = states.clone().requires_grad_()
        logits = plain.head(seen)
        logits.backward(torch.ones_like(logits))
        assert seen.grad is not None
        found.append((logits, seen.grad, *(p.grad for p in plain.parameters())))
    (rounded, *before), (logits, *after) = found
    assert rounded.dtype == torch.bfloat16 and logits.dtype == torch.float32
    exactly = nn.functional.linear(
        states.double(), plain.head.weight.double(), plain.head.bias.double() if bias else None
    )
    torch.testing.assert_close(logits.double(), exactly, atol=1e-4, rtol=0)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other)


class ShortSums(TorchDispatchMode):
    """Rejects sums of more than 32 terms, as MPS should reject sums of more than 32,766."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.mm.default or args[0].shape[1] <= 32
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_summed_in_parts_if_a_device_limits_sums(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_head, "MOST_TERMS", {"cpu": 32})
    torch.manual_seed(0)
    plain: Any = nn.Module()
    plain.head, states = nn.Linear(16, 90, dtype=dtype), torch.randn(20, 16, dtype=dtype)
    plain.get_output_embeddings = lambda: plain.head
    expected = states.clone().requires_grad_()
    plain.head(expected).backward(by_logits := torch.randn(20, 90, dtype=dtype))
    take_over_head(plain)
    with ShortSums():
        seen = states.clone().requires_grad_()
        plain.head(seen).backward(by_logits)
    off = 1e-5 if dtype == torch.float32 else 0.02  # because each part is rounded
    torch.testing.assert_close(seen.grad, expected.grad, atol=off, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "lfm2"])
def test_a_policy_answers_and_learns_with_float32_logits(
    device: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are packed or in padded batches; the model may have operations after its head."""
    given, forward = list[torch.dtype](), OwnHead.forward
    monkeypatch.setattr(OwnHead, "forward", lambda self, x: (given.append(x.dtype), forward(self, x))[1])
    make_model(tmp_path, family)
    policy = LanguagePolicy.open(config_of(tmp_path, device=device, dtype="bfloat16"), 0)

    def by_float32(used: Any) -> Any:
        assert set(given) == {torch.bfloat16}
        given.clear()
        return used

    batch = by_float32(answered(policy, QUESTIONS))
    by_float32(policy.logprobs(batch))
    assert by_float32(policy.update(batch)).grad_norm > 0
