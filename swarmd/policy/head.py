"""The head's product in float32, for sampler and learner alike.

In bfloat16 a logit of 20 is a multiple of 1/8. The two compute a token's states in different orders, and
would round what is nearly the same apart, which importance ratios are sensitive to (MiniMax-M1, arXiv
2506.13585; ScaleRL, arXiv 2510.13786).
"""

from typing import Any

import torch
from torch import Tensor, nn

from swarmd.policy.models.device import gives_float32


def give_float32_logits(network: nn.Module) -> None:
    """Have a 16-bit network's head give float32, where its device has such products; a CPU has none."""
    head: Any = network.get_output_embeddings()  # type: ignore[operator]  # of every causal language model
    weight = head.weight
    if (
        type(head) is nn.Linear
        and weight.dtype != torch.float32
        and gives_float32(weight.device, weight.dtype)
    ):
        head.__class__ = Float32Head


class Float32Head(nn.Linear):
    """A head of 16-bit weights that gives float32 logits: [..., d] -> [..., V]."""

    def forward(self, states: Tensor) -> Tensor:
        logits: Tensor = _Product.apply(states.flatten(0, -2), self.weight)  # type: ignore[no-untyped-call]
        logits = logits.view(*states.shape[:-1], -1)
        return logits if self.bias is None else logits + self.bias


class _Product(torch.autograd.Function):
    """x Wᵀ in float32, for which torch has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        by_logits = gradients[0].to(x.dtype)
        return (
            by_logits @ weight if ctx.needs_input_grad[0] else None,
            by_logits.T @ x if ctx.needs_input_grad[1] else None,
        )
