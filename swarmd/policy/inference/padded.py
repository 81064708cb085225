"""Decoding with transformers' own cache, padded on the left: for networks whose attention we do not replace.

Padding never reaches a recurrent layer's state in the architectures of `architecture.PADDED`: transformers
zeroes what such a layer reads at padded positions, and their states stay zero
(tests/swarmd/policy/test_architectures.py compares with single sequences).
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from swarmd.policy.models.architecture import cache_argument
from swarmd.policy.models.device import to_device

# Finished rows leave once at most this share is alive: copying the others' own keys and values is cheap.
COMPACT_AT: Final = 0.98
# The probability that may be elsewhere: more than rounding moves.
MAX_DIFFERENCE = MappingProxyType({torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02})


class PaddedRows:
    """B rows, several to a prompt.

    A prompt is computed once, and the cache's rows (keys, values, states) are copied for each row.
    """

    compact_at = COMPACT_AT

    def __init__(
        self, network: nn.Module, prompts: Sequence[Sequence[int]], copies: int, device: torch.device
    ) -> None:
        """Lay prompts behind padding; nothing is computed yet."""
        self._network, self._copies = network, copies
        width = max(map(len, prompts))
        self._ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        self._mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        self._cache, self._takes = DynamicCache(config=network.config), cache_argument(network)

    def first(self) -> Tensor:
        """Compute the prompts. Returns the logits [B, V] of each row's first token."""
        logits = self._forward(self._ids, (self._mask.cumsum(1) - 1).clamp_(min=0), logits_to_keep=1)
        self.keep([i for i in range(len(logits)) for _ in range(self._copies)])
        return logits.repeat_interleave(self._copies, dim=0)

    def next(self, tokens: Tensor) -> Tensor:
        """Add one token to each row, [B]. Returns the logits [B, V] of the one after it."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
        return self._forward(tokens[:, None], self._mask.sum(1, keepdim=True) - 1)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone, in this order."""
        places = to_device(rows, self._mask.device)
        self._mask = self._mask[places]
        # Recurrent layers know no other way to choose rows; it is named for beam search, and takes a row any
        # number of times.
        self._cache.reorder_cache(places)

    def _forward(self, ids: Tensor, positions: Tensor, **more: Any) -> Tensor:
        logits: Tensor = self._network(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            use_cache=True,
            **{self._takes: self._cache},
            **more,
        ).logits[:, -1]
        return logits


@torch.inference_mode()
def agrees_with_itself(network: nn.Module) -> bool:
    """Return whether padded decoding gives the distributions of plain forward passes.

    Two prompts are decoded behind padding, one token at a time. It is for architectures that our tests do not
    know. Returns False also where the network cannot be decoded so at all.
    """
    weight: Tensor = network.get_input_embeddings().weight  # type: ignore[operator]
    tokens = [i % len(weight) for i in range(1, 24)]
    prompts, then = [tokens[:4], tokens[4:15]], torch.tensor(tokens[15:], device=weight.device)

    def alone(prompt: Sequence[int]) -> Tensor:
        ids = torch.tensor([*prompt, *then.tolist()], device=weight.device)[None]
        logits: Tensor = network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        return logits.float().softmax(-1)

    try:
        rows = PaddedRows(network, prompts, 1, weight.device)
        steps = [rows.first(), *(rows.next(token.expand(len(prompts))) for token in then)]
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        # transformers' own code may raise anything here.
        return False
    together = torch.stack(steps, dim=1).float().softmax(-1)  # [prompts, steps, V]
    moved = (together - torch.stack([alone(p) for p in prompts])).abs().sum(-1) / 2
    return bool(moved.max() <= MAX_DIFFERENCE[weight.dtype])
