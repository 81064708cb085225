"""Recurrent layers over packed sequences: each span starts from the final state of its prefix.

For Qwen3.5's gated delta rule (arXiv 2412.06464). The convolution and the rule run on a batch of padded
spans; the rest of the layer runs on the stream. A padding token has beta 0 and decay 0, which leaves the
state unchanged.
"""

from collections.abc import Callable
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

# For each architecture, the recurrent layer types that can read a stream.
RECURRENT: Final = MappingProxyType(
    {"qwen3_5_text": {"linear_attention"}, "qwen3_5_moe_text": {"linear_attention"}}
)
# The states of B sequences, batch first.
State = tuple[Tensor, ...]
# Reads [B, S, n] with the number of valid tokens per sequence ([B]; None: all), from the given states (None:
# the initial state). Returns [B, S, m] and the final states.
Step = Callable[[Tensor, Tensor | None, State | None], tuple[Tensor, State]]


def read_streams(network: nn.Module) -> None:
    """Make a network's delta rule layers accept a `layout`, as its attention does."""
    for module in network.modules():
        kind: Any = type(module)
        if kind.__name__ in {"Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"}:
            module.__class__ = _on_stream(kind)


@cache
def _on_stream(kind: Any) -> Any:
    return type(f"{kind.__name__}OnStream", (_OnStream, kind), {})


class _OnStream:
    """A mixin for transformers' layer class, whose weights it uses."""

    def forward(self: Any, hidden_states: Tensor, *_args: Any, layout: Any, **_more: Any) -> Any:
        x = hidden_states[0]
        read = torch.cat([self.in_proj_qkv(x), self.in_proj_b(x), self.in_proj_a(x)], dim=-1)
        out = layout.recur(self.layer_idx, read, self._step).reshape(-1, self.head_v_dim)
        out = self.norm(out, self.in_proj_z(x).reshape(-1, self.head_v_dim))
        return self.out_proj(out.reshape(len(x), -1))[None]

    def _step(self: Any, read: Tensor, lengths: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        """Run one step (see `Step`). The state is the convolution's last inputs and the rule's matrix."""
        from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

        batch, length, _ = read.shape
        mixed, b, a = torch.split(read, [self.conv_dim, self.num_v_heads, self.num_v_heads], dim=-1)
        kept = self.conv_kernel_size - 1
        before, memory = state or (mixed.new_zeros(batch, kept, self.conv_dim), None)
        seen = torch.cat([before, mixed], dim=1)
        mixed = F.conv1d(seen.transpose(1, 2), self.conv1d.weight, self.conv1d.bias, groups=self.conv_dim)
        mixed = ACT2FN[self.activation](mixed).transpose(1, 2)
        query, key, value = torch.split(mixed, [self.key_dim, self.key_dim, self.value_dim], dim=-1)
        beta, decay = b.sigmoid(), -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        last = seen[:, length:]
        if lengths is not None:
            padding = torch.arange(length, device=read.device)[:, None] >= lengths[:, None, None]
            beta, decay = beta.masked_fill(padding, 0.0), decay.masked_fill(padding, 0.0)
            places = lengths[:, None] + torch.arange(kept, device=read.device)
            last = seen.gather(1, places[..., None].expand(-1, -1, self.conv_dim))
        one = length == 1 and not torch.is_grad_enabled()
        rule = qwen.torch_recurrent_gated_delta_rule if one else qwen.torch_chunk_gated_delta_rule
        out, memory = rule(
            query.reshape(batch, length, -1, self.head_k_dim),
            key.reshape(batch, length, -1, self.head_k_dim),
            value.reshape(batch, length, -1, self.head_v_dim),
            g=decay,
            beta=beta,
            initial_state=memory,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out.flatten(2), (last, memory)
