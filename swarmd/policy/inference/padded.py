"""Decoding with transformers' own KV cache, padded on the left: for networks whose attention we do not replace."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache


class PaddedRows:
    """B rows, several to a prompt; a prompt is computed once, its keys and values are copied for each row."""

    def __init__(self, network: nn.Module, prompts: Sequence[Sequence[int]], copies: int, device: torch.device) -> None:
        """Nothing is computed yet."""
        self._network, self._copies = network, copies
        width = max(map(len, prompts))
        self._ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        self._mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        self._cache = DynamicCache(config=network.config)

    def first(self) -> Tensor:
        """Compute the prompts: the logits [B, V] of each row's first token."""
        logits = self._forward(self._ids, (self._mask.cumsum(1) - 1).clamp_(min=0), logits_to_keep=1)
        self._cache.batch_repeat_interleave(self._copies)
        self._mask, logits = (t.repeat_interleave(self._copies, dim=0) for t in (self._mask, logits))
        return logits

    def next(self, tokens: Tensor) -> Tensor:
        """Add one token to each row, [B]: the logits [B, V] of the one after it."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
        return self._forward(tokens[:, None], self._mask.sum(1, keepdim=True) - 1)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone, in this order."""
        self._mask = self._mask[rows]
        self._cache.batch_select_indices(rows)

    def _forward(self, ids: Tensor, positions: Tensor, **more: Any) -> Tensor:
        out = self._network(
            input_ids=ids, attention_mask=self._mask, position_ids=positions, past_key_values=self._cache, use_cache=True, **more
        )
        logits: Tensor = out.logits[:, -1]
        return logits
