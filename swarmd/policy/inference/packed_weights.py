"""Packed weights: copies of weights in oneDNN's layout, for decoding on a CPU in bfloat16.

A plain product converts the weights to this layout each time, which takes a quarter of a decoding step. The
operators are private to torch (its compiler uses them), so `packs` tries them once. If they are missing or
wrong, decoding uses plain products. A packed copy is never updated: each decoding makes new copies and drops
them at its end.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmd.policy.models.lora import base_of, joined_factors


class PackedLinear:
    """x -> x (W + s B A)ᵀ + b, for several layers with the same input, whose outputs are joined.

    Base and adapter are one product: [x, x Aᵀ] [W, s B]ᵀ. Like `lora.adapted`, it sums in float32 and rounds
    once.
    """

    def __init__(self, layers: Sequence[Any], rows: int) -> None:
        """Pack the layers' weights. rows: the batch size that the layout suits best; others work, too."""
        bases = [base_of(layer) for layer in layers]
        weight, factors = torch.cat([base.weight for base in bases]), joined_factors(layers)
        self._down = None if factors is None else _pack(factors[0], rows)
        self._weight = _pack(weight if factors is None else torch.cat([weight, factors[1]], dim=1), rows)
        self._bias = None
        if any(base.bias is not None for base in bases):
            none = weight.new_zeros
            self._bias = torch.cat([none(b.out_features) if b.bias is None else b.bias for b in bases])

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layers: [B, n] -> [B, m]."""
        return _product(self._read(x), self._weight, self._bias)

    def added(self, x: Tensor, update: Tensor) -> Tensor:
        """Return x plus the layers' output for `update`: [B, m] and [B, n] -> [B, m]."""
        found: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            self._read(update), x, self._weight, self._bias, "add"
        )
        return found

    def _read(self, x: Tensor) -> Tensor:
        return x if self._down is None else torch.cat([x, _product(x, self._down, None)], dim=-1)


def packable(layers: Sequence[Any]) -> bool:
    """Return whether `PackedLinear` can compute the same as these layers."""
    bases = [base_of(layer) for layer in layers]
    return all(
        type(b) is nn.Linear and b.weight.device.type == "cpu" and b.weight.dtype == torch.bfloat16
        for b in bases
    ) and packs(torch.backends.mkldnn.enabled)


@cache
def packs(allowed: bool = True) -> bool:
    """Return whether products with packed bfloat16 weights work here, by trying one.

    allowed: whether oneDNN may be used (`device.compile_nothing`).
    """
    x, weight = (torch.linspace(-1, 1, rows * 33).view(rows, 33).bfloat16() for rows in (3, 21))
    try:
        if not (allowed and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            return False
        found = _product(x, _pack(weight, 8), weight[:, 0].contiguous())
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(found.float(), F.linear(x, weight, weight[:, 0]).float(), atol=0.1)


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return found


def _pack(weight: Tensor, rows: int) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    return packed
