"""The matrix product of the language model head, the same for sampler and learner.

It gives float32 if the device supports such products. In bfloat16 a logit of 20 is a multiple of 1/8. Sampler
and learner compute a token's hidden states in different orders, and bfloat16 would round two nearly equal
logits to different values. Importance ratios are sensitive to this (MiniMax-M1, arXiv 2506.13585; ScaleRL,
arXiv 2510.13786).

MPS computes large sums wrongly, so on MPS the gradient is summed in parts (MOST_TERMS).
"""

from functools import reduce
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmd.policy.models.device import gives_float32

# Maximum number of terms of a sum in a product. With more than 32,766 terms, MPS on M1 and M2 also adds
# memory after the operands, and up to torch 2.13 reports no error (pytorch/pytorch#193487). The gradient with
# respect to a token's states has one term for each token of the vocabulary.
MOST_TERMS = MappingProxyType({"mps": 2**14})


def take_over_head(network: nn.Module) -> None:
    """Make a network's head compute as this module describes. A head on a CPU stays unchanged."""
    head: Any = network.get_output_embeddings()  # type: ignore[operator]  # all causal language models have it
    weight = head.weight
    if type(head) is nn.Linear and (
        weight.device.type in MOST_TERMS
        or (weight.dtype != torch.float32 and gives_float32(weight.device, weight.dtype))
    ):
        head.__class__ = OwnHead


class OwnHead(nn.Linear):
    """A head that gives float32 logits from 16-bit weights, if the device can: [..., d] -> [..., V]."""

    def forward(self, states: Tensor) -> Tensor:
        logits: Tensor = _Product.apply(states.flatten(0, -2), self.weight)  # type: ignore[no-untyped-call]
        logits = logits.view(*states.shape[:-1], -1)
        return logits if self.bias is None else logits + self.bias


class _Product(torch.autograd.Function):
    """x Wᵀ in float32 if the device can, with a gradient, which torch does not define for this case."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (
            torch.mm(x, weight.T, out_dtype=torch.float32)
            if gives_float32(x.device, x.dtype)
            else F.linear(x, weight)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        by_logits = gradients[0].to(x.dtype)
        most = MOST_TERMS.get(x.device.type, len(weight))
        return (
            reduce(torch.add, map(torch.mm, torch.split(by_logits, most, dim=1), torch.split(weight, most)))
            if ctx.needs_input_grad[0]
            else None,
            by_logits.T @ x if ctx.needs_input_grad[1] else None,
        )
