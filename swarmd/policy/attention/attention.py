"""Attention over packed sequences without padding: a layout says which token sees which, in place of a mask.

A covered network runs with our attention function for its whole life (swapping it around a forward pass
breaks the recomputation of gradient checkpointing). It takes the keyword `layout`; without one it is the
ordinary masked attention.
"""

from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME: Final = "swarmd"
# Architectures whose log-probabilities and gradients on a stream were compared with transformers' own
# (tests/swarmd/policy/test_architectures.py).
COVERED: Final = frozenset(
    (
        "llama", "mistral", "ministral", "ministral3", "mixtral", "smollm3", "apertus", "arcee", "nanochat",
        "helium", "seed_oss", "starcoder2", "phi3", "glm4", "exaone4", "ernie4_5", "qwen2", "qwen2_moe",
        "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "olmo",
        "olmo2", "olmo3", "olmoe", "granite", "granitemoe", "granitemoeshared", "granitemoehybrid",
        "hunyuan_v1_dense",
    )
)  # fmt: skip
# Others are recurrent, or keep something else than keys and values
_LAYERS: Final = {"full_attention", "sliding_attention"}
# Four dimensions: transformers hands it through and builds none
_ANY_MASK: Final = torch.ones(1, 1, 1, 1, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class Rules:
    """The attention rules of one layer."""

    scale: float
    window: int | None  # a token sees this many positions, its own included; None: all before it
    # Scores are squeezed into (-softcap, softcap) (Gemma 2, arXiv 2408.00118, section 2)
    softcap: float | None


class Layout(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """Attend for the T tokens of the stream, in one layer.

        query [T, H, D], key and value [T, K, D] -> [T, H, D].
        """


def adopt(network: nn.Module) -> bool:
    """Give a network our attention function, once.

    Returns False, and changes nothing, where its architecture is not covered.
    """
    model: Any = network
    if model.config._attn_implementation == NAME:
        return True
    if not covers(model.config):
        return False
    model.set_attn_implementation(NAME)
    return bool(model.config._attn_implementation == NAME)


def covers(config: Any) -> bool:
    """Return whether a network of this configuration computes the same on a stream as on a padded batch."""
    return (
        config.model_type in COVERED
        and set(getattr(config, "layer_types", None) or ()) <= _LAYERS
        and not getattr(config, "use_bidirectional_attention", None)
    )


def run(network: nn.Module, ids: Tensor, positions: Tensor, layout: Layout, **more: Any) -> Any:
    """Run an adopted network, or only its decoder, on a stream of tokens.

    ids, positions: [T].
    """
    return network(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask=_ANY_MASK.to(ids.device),
        use_cache=False,
        layout=layout,
        **more,
    )


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rules: Rules) -> Tensor:
    """Attend with an additive mask.

    query [B, H, S, D], key and value [B, K, T, D], mask [B, 1, S, T] added to the scores -> [B, H, S, D].
    Queries that share a key head are laid side by side, so that keys and values are not repeated for them.
    """
    batch, heads, length, width = query.shape
    shared = heads // key.shape[1]
    query = query.reshape(batch, key.shape[1], shared * length, width)
    mask = mask.repeat(1, 1, shared, 1) if shared > 1 else mask
    if rules.softcap is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=rules.scale)
    else:
        scores = capped((query * rules.scale) @ key.transpose(-1, -2), rules.softcap) + mask
        out = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    return out.reshape(batch, heads, length, value.shape[-1])


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    layout: Layout | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    rules = Rules(scaling, more.get("sliding_window"), more.get("softcap"))
    if layout is not None:
        out = layout.attend(
            module.layer_idx,
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            rules,
        )
        return out[None], None
    if rules.softcap is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)  # type: ignore[no-any-return]
    assert attention_mask is not None  # _mask always makes one
    lowest = torch.finfo(query.dtype).min
    added = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
    return masked(query, key, value, added.expand(len(query), -1, -1, -1), rules).transpose(1, 2), None


def _mask(*args: Any, **kwargs: Any) -> Tensor:
    """Build the mask of padded batches.

    transformers builds none for an attention function that it does not know, and a padded row would be
    silently wrong.
    """
    mask: Tensor = sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False}))
    return mask


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
