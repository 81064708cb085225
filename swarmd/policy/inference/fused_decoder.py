"""Fused decoder step for Llama-like models: one token per row in few operations.

transformers' modules take about seventy operations and a dozen Python calls per layer; this step takes about
twenty operations. With few rows left, the number of operations decides the time of a step, on CPUs and GPUs.
The results are the same (tests/swarmd/policy/test_engine.py).
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarmd.policy.attention import Layout, Rules
from swarmd.policy.inference.packed_weights import PackedLinear, packable
from swarmd.policy.models.lora import adapted, base_of, joined_factors, lora_factors, summed

# Their layers consist of RMS norms, rotary embeddings, attention, a gated unit and two residuals only.
FAMILIES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class Blocks:
    """The network's layers, read from its modules, with their adapters."""

    def __init__(self, network: PreTrainedModel, frozen: bool, rows: int = 0) -> None:
        """Read a network's layers.

        Args:
            network: one of FAMILIES.
            frozen: whether its weights stay unchanged while this is used, so that adapters may be copied.
            rows: if above 0, pack copies of all weights for this many rows, where packing works.
        """
        decoder, head = network.base_model, network.get_output_embeddings()
        self._embed: nn.Module = network.get_input_embeddings()
        self._rotations: nn.Module = decoder.rotary_emb
        self._layers = [_Block(layer, i, frozen, rows) for i, layer in enumerate(decoder.layers)]
        self._norm: Any = decoder.norm
        self._head: Project = PackedLinear([head], rows) if rows and packable([head]) else head

    def step(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Return the logits [B, V] that follow the tokens [B] at their positions [B]."""
        x: Tensor = self._embed(tokens)
        cos, sin = self._rotations(x, positions[None])
        cos, sin = cos[0, :, None], sin[0, :, None]  # [B, 1, D]
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        for layer in self._layers:
            x = layer.step(x, cos, sin, layout)
        return self._head(_normed(x, self._norm))


def blocks_of(network: PreTrainedModel, frozen: bool = True, rows: int = 0) -> Blocks | None:
    """Return a network's `Blocks`; None if they would not compute the same as the network."""
    return Blocks(network, frozen, rows * frozen) if network.config.model_type in FAMILIES else None


class _Block:
    def __init__(self, layer: Any, index: int, frozen: bool, rows: int) -> None:
        attention, config = layer.self_attn, layer.self_attn.config
        self._index, self._activation = index, layer.mlp.act_fn
        self._before_attention, self._before_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self._query_norm, self._key_norm = (
            getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
        )
        self._width: int = attention.head_dim
        self._queries, self._keys = (
            base_of(p).out_features // self._width for p in (attention.q_proj, attention.k_proj)
        )
        everywhere = config.sliding_window if config.model_type == "mistral" else None
        self._rules = Rules(attention.scaling, getattr(attention, "sliding_window", everywhere), None)
        self._project = _side_by_side([attention.q_proj, attention.k_proj, attention.v_proj], frozen, rows)
        self._gated = _side_by_side([layer.mlp.gate_proj, layer.mlp.up_proj], frozen, rows)
        self._attended, self._down = (
            _added(p, frozen, rows) for p in (attention.o_proj, layer.mlp.down_proj)
        )

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        """Apply one layer.

        x: [B, d]. cos, sin: [B, 1, D], the first half of sin negated.
        """
        projected = self._project(_normed(x, self._before_attention)).view(len(x), -1, self._width)
        rotated = projected[:, : self._queries + self._keys]
        if self._query_norm is not None:
            norms = (
                (rotated[:, : self._queries], self._query_norm),
                (rotated[:, self._queries :], self._key_norm),
            )
            rotated = torch.cat([_normed(part, norm) for part, norm in norms], dim=1)
        # The halves swapped, times sin with its first half negated, equals transformers' rotate_half.
        rotated = torch.addcmul(rotated * cos, rotated.roll(self._width // 2, -1), sin)
        query, key, value = (
            rotated[:, : self._queries],
            rotated[:, self._queries :],
            projected[:, self._queries + self._keys :],
        )
        seen = layout.attend(self._index, query, key, value, self._rules)
        x = self._attended(x, seen.reshape(len(x), -1))
        gate, up = self._gated(_normed(x, self._before_mlp)).chunk(2, dim=-1)
        return self._down(x, self._activation(gate) * up)


Project = Callable[[Tensor], Tensor]  # [B, d] -> the outputs of one layer, or of several, concatenated


def _side_by_side(projections: list[Any], frozen: bool, rows: int) -> Project:
    if rows and packable(projections):
        return PackedLinear(projections, rows)
    layers, factors = [base_of(p) for p in projections], joined_factors(projections) if frozen else None
    if factors is None or not all(isinstance(layer, nn.Linear) for layer in layers):
        each = [_project(p, frozen) for p in projections]
        return lambda x: torch.cat([project(x) for project in each], dim=-1)
    down, up = factors
    widths = [layer.out_features for layer in layers]
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])

    def project(x: Tensor) -> Tensor:
        # As in `adapted`, with the adapters of all layers joined.
        parts = torch.split(F.linear(F.linear(x, down), up), widths, dim=-1)
        sums = [summed(part, x, layer.weight) for part, layer in zip(parts, layers, strict=True)]
        out = torch.cat(sums, dim=-1)
        return out if bias is None else out + bias

    return project


def _project(projection: Any, frozen: bool) -> Project:
    layer, factors = base_of(projection), lora_factors(projection)
    if factors is None:
        return lambda x: F.linear(x, layer.weight, layer.bias)
    if not frozen:
        # The module itself reads its adapter at each call.
        return projection  # type: ignore[no-any-return]
    return lambda x: adapted(x, layer.weight, layer.bias, *factors)


def _added(projection: Any, frozen: bool, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return (x, update) -> x + projection(update), computed in one pass if there is no adapter."""
    if rows and packable([projection]):
        return PackedLinear([projection], rows).added
    layer = base_of(projection)
    if layer is not projection:
        project = _project(projection, frozen)
        return lambda x, update: x + project(update)

    def plain(x: Tensor, update: Tensor) -> Tensor:
        out = torch.addmm(x, update, layer.weight.T)
        return out if layer.bias is None else out + layer.bias

    return plain


def _normed(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
