"""Decoding with transformers' cache and left padding, for networks that `attention` does not cover.

Padding never changes a recurrent layer's state in the architectures of `architecture.PADDED`: transformers
sets the layer's inputs at padded positions to zero, and a zero state stays zero
(tests/swarmd/policy/test_architectures.py compares with single sequences).
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from swarmd.policy.models.architecture import cache_argument
from swarmd.policy.models.device import to_device

# Finished rows are removed once at most this share is alive: copying the remaining rows' cache is cheap.
COMPACT_AT: Final = 0.98
# The largest accepted total variation distance between two distributions, above the effect of rounding.
MAX_DIFFERENCE = MappingProxyType({torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02})


class PaddedRows:
    """The cache of B rows, several per prompt.

    A prompt is computed once, and its cache (keys, values, states) is copied for each of its rows.
    """

    compact_at = COMPACT_AT

    def __init__(
        self, network: PreTrainedModel, prompts: Sequence[Sequence[int]], copies: int, device: torch.device
    ) -> None:
        """Pad the prompts on the left; nothing is computed yet."""
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
        """Add one token [B] to each row. Returns the logits [B, V] of the next token."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
        return self._forward(tokens[:, None], self._mask.sum(1, keepdim=True) - 1)

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with only these rows, in this order."""
        places = to_device(rows, self._mask.device)
        self._mask = self._mask[places]
        # Recurrent layers have no other method to select rows. It was made for beam search, and may repeat
        # rows.
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
def agrees_with_itself(network: PreTrainedModel) -> bool:
    """Return whether padded decoding gives the same distributions as plain forward passes.

    Two padded prompts are decoded token by token. This check is for architectures that the tests do not
    cover. Returns False, too, if the network cannot be decoded in this way at all.
    """
    weight: Tensor = network.get_input_embeddings().weight
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
        # transformers' code for an unknown architecture may raise any of these.
        return False
    together = torch.stack(steps, dim=1).float().softmax(-1)  # [prompts, steps, V]
    moved = (together - torch.stack([alone(p) for p in prompts])).abs().sum(-1) / 2
    return bool(moved.max() <= MAX_DIFFERENCE[weight.dtype])
