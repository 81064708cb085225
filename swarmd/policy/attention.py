"""Attention over packed sequences without padding. In place of a mask, a layout says which token sees which.

A covered network uses our attention function for its whole life, since swapping the function around a forward
pass would break the recomputation of gradient checkpointing. The function takes the keyword `layout` and
computes nothing without it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import Any, Final, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from swarmd.policy.models.device import to_device
from swarmd.policy.recurrent import RECURRENT, State, Step, read_streams

T = TypeVar("T")

NAME: Final = "swarmd"
# Architectures whose log-probabilities and gradients on a stream were compared with transformers' results
# (tests/swarmd/policy/test_architectures.py).
COVERED: Final = frozenset(
    (
        "llama", "mistral", "ministral", "ministral3", "mixtral", "smollm3", "apertus", "arcee", "nanochat",
        "helium", "seed_oss", "starcoder2", "phi3", "glm4", "exaone4", "ernie4_5", "qwen2", "qwen2_moe",
        "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "olmo",
        "olmo2", "olmo3", "olmoe", "granite", "granitemoe", "granitemoeshared", "granitemoehybrid",
        "hunyuan_v1_dense", "qwen3_5_text", "qwen3_5_moe_text",
    )
)  # fmt: skip
# Other layer types are recurrent, or cache something other than keys and values.
_LAYERS: Final = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Rules:
    """The attention rules of one layer."""

    scale: float
    window: int | None  # a token sees this many positions, including itself; None: all before it
    # Scores are squeezed into (-softcap, softcap) (Gemma 2, arXiv 2408.00118, section 2)
    softcap: float | None


class Layout(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """Attend for the T tokens of the stream, in one layer.

        query: [T, H, D]. key, value: [T, K, D]. Returns [T, H, D].
        """

    def recur(self, layer: int, read: Tensor, step: Step) -> Tensor:
        """Run a recurrent layer over the stream: [T, n] -> [T, m]."""


def adopt(network: PreTrainedModel) -> bool:
    """Install our attention function in a network, once.

    Returns False, without a change, if the network's architecture is not covered.
    """
    if network.config._attn_implementation == NAME:
        return True
    # cuDNN plans its attention for each new shape, which takes up to a second, and our batches rarely repeat
    # a shape. torch prefers cuDNN from Hopper on.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    if not covers(network.config):
        return False
    network.set_attn_implementation(NAME)
    read_streams(network)
    return bool(network.config._attn_implementation == NAME)


def covers(config: Any) -> bool:
    """Return whether a network of this configuration computes the same for a stream as for a padded batch."""
    return (
        config.model_type in COVERED
        and set(getattr(config, "layer_types", None) or ())
        <= _LAYERS | RECURRENT.get(config.model_type, set())
        and not getattr(config, "use_bidirectional_attention", None)
    )


def run(network: nn.Module, ids: Tensor, positions: Tensor, layout: Layout, **more: Any) -> Any:
    """Run an adopted network, or only its decoder, on a stream of tokens.

    ids, positions: [T]. more: further arguments of the network.
    """
    return network(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask=_any_mask(ids.device),
        use_cache=False,
        layout=layout,
        **more,
    )


@cache
@torch.inference_mode(mode=False)
def _any_mask(device: torch.device) -> Tensor:
    """Return a four-dimensional mask, which transformers passes through instead of building its own.

    The mask is made once per device, since copying a new one to the device would wait for the device's work.
    """
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rules: Rules) -> Tensor:
    """Attend with an additive mask.

    query: [B, H, S, D]. key, value: [B, K, T, D]. mask: [B, 1, H/K S, T], added to the scores. Returns
    [B, H, S, D]. Queries that share a key head are concatenated along the sequence, so that keys and values
    need no copies.
    """
    batch, heads, length, width = query.shape
    query = query.reshape(batch, key.shape[1], -1, width)
    scores = batch * heads * length * key.shape[2]
    out: Tensor
    narrow = query.device.type == "cpu" and query.dtype == torch.bfloat16
    if rules.softcap is None and narrow and scores <= MAX_SCORES:
        out = _Products.apply(query, key, value, mask, rules.scale)  # type: ignore[no-untyped-call]
    elif rules.softcap is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=rules.scale)
    else:
        capped_scores = capped((query * rules.scale) @ key.transpose(-1, -2), rules.softcap) + mask
        out = capped_scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    return out.reshape(batch, heads, length, value.shape[-1])


# `_Products` is used for at most this many scores, which it holds three times in float32. For more scores,
# torch's kernel needs less memory.
MAX_SCORES: Final = 2**24


class _Products(torch.autograd.Function):
    """Attention as matrix products, for bfloat16 on a CPU: torch's backward pass takes three times as long.

    The attention weights are computed again in the backward pass, as torch does: storing them would take
    memory quadratic in the length. Scores are in float32: the biases of Qwen2.5 add a large amount to the
    scores of all keys, so 16 bits would keep few bits for the differences.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale = scale
        return _shares(query, key, mask, scale).to(value.dtype) @ value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        (by_out,), dtype = gradients, value.dtype
        shares = _shares(query, key, mask, ctx.scale)
        by_shares = (by_out @ value.mT).float()
        by_scores = torch._softmax_backward_data(by_shares, shares, -1, torch.float32).to(dtype)
        return (
            by_scores @ key * ctx.scale,
            by_scores.mT @ (query * ctx.scale),
            shares.to(dtype).mT @ by_out,
            None,
            None,
        )


def _shares(query: Tensor, key: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the attention weights: [B, K, S, D] and [B, K, T, D] -> [B, K, S, T], in float32."""
    return (query.float() * scale @ key.float().mT).add_(mask).softmax(-1)


def additive_mask(i: Tensor, j: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to scores: position i sees position j if i - window < j <= i."""
    hidden = j > i
    if window is not None:
        hidden = hidden | (j <= i - window)
    return torch.zeros(hidden.shape, dtype=dtype, device=i.device).masked_fill_(hidden, float("-inf"))


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float,
    layout: Layout,
    **more: Any,
) -> tuple[Tensor, None]:
    rules = Rules(scaling, more.get("sliding_window"), more.get("softcap"))
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    return layout.attend(module.layer_idx, queries, keys, values, rules)[None], None


AttentionInterface.register(NAME, _attention)
# transformers' `sdpa_mask` passes `_any_mask` through.
AttentionMaskInterface.register(NAME, sdpa_mask)


# Spans of similar size are computed together, in a padded tile. In a tile of at most SMALL_TILE_PAIRS
# query-key pairs, any share may be padding, since such a tile costs hardly more than the call itself. In a
# larger tile, at most the share MAX_WASTE may be padding.
SMALL_TILE_PAIRS: Final = 16_384
MAX_WASTE: Final = 0.25
# Bounds the memory of an attention kernel that does no tiling itself.
MAX_TILE_PAIRS: Final = 2**20


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a stream that see the spans of their prefix, and each other causally."""

    start: int
    length: int
    prefix: tuple["Span", ...] = ()  # in order; only their start and length are used

    @property
    def position(self) -> int:
        """The position of the span's first token within its sequence."""
        return sum(s.length for s in self.prefix)

    @property
    def keys(self) -> int:
        return self.position + self.length


def common_length(sequences: Sequence[Sequence[int]]) -> int:
    """Return the length of the common prefix of these sequences, of which there must be at least one."""
    # The smallest and largest sequence in lexicographic order have the shortest common prefix.
    first, last = min(map(tuple, sequences)), max(map(tuple, sequences))
    least = min(map(len, sequences))
    return next((i for i in range(least) if first[i] != last[i]), least)


def shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Return the length in tokens of the common prefix of these prompts, such as a system prompt.

    At least one token of each prompt stays outside of the prefix.
    """
    if len(prompts) < 2:
        return 0
    return max(0, min(common_length(prompts), min(map(len, prompts)) - 1))


def grouped(items: Iterable[T], fits: Callable[[Sequence[T], T], bool]) -> Iterator[list[T]]:
    """Yield the items in groups, in order. A group takes the next item if it fits; each has at least one."""
    group: list[T] = []
    for item in items:
        if group and not fits(group, item):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


class PackedLayout:
    """The layout of spans that together cover [0, T).

    Every call gives the same result, as gradient checkpointing requires, since it calls the layout again.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device, dtype: torch.dtype) -> None:
        """Lay out the spans.

        dtype: of the network's queries.
        """
        self._spans, self._device = [span for span in spans if span.length], device
        groups = _group(spans)
        self._tiles = [_Tile(group, device, dtype) for group in groups]
        # [T]: index of each token's output in the concatenated outputs of the tiles.
        self._place = to_device(_places(groups), device)
        self._queries, self._keys = (
            (list(map(len, places)), to_device(torch.cat(places), device))
            for places in ([t.query_places for t in self._tiles], [t.key_places for t in self._tiles])
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:  # noqa: ARG002  the same in every layer
        # One lookup for all tiles, since the gradient of each lookup is as long as the stream.
        read = ((query, self._queries), (key, self._keys), (value, self._keys))
        parts = (torch.split(_pick(x, places), sizes) for x, (sizes, places) in read)
        outs = [tile.attend(q, k, v, rules) for tile, q, k, v in zip(self._tiles, *parts, strict=True)]
        return _pick(torch.cat(outs) if len(outs) > 1 else outs[0], self._place)

    def recur(self, layer: int, read: Tensor, step: Step) -> Tensor:  # noqa: ARG002  the same in every layer
        return self.recurred(read, step)[0]

    def recurred(self, read: Tensor, step: Step) -> tuple[Tensor, State]:
        """Run a recurrent layer over the spans; a span starts from the final state of its prefix.

        Returns [T, m], and the final states of the spans with the longest prefixes, in the spans' order.
        """
        outs: list[Tensor] = []
        state: State | None = None
        levels, place = self._levels
        for places, lengths, parents in levels:
            before = None if state is None else tuple(x.index_select(0, parents) for x in state)
            out, state = step(_pick(read, places).view(len(lengths), -1, read.shape[1]), lengths, before)
            outs.append(out.flatten(0, 1))
        assert state is not None
        return _pick(torch.cat(outs), place), state

    @cached_property
    def _levels(self) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:
        """Group spans by the number of spans in their prefix; each level of B spans is padded to S tokens.

        Returns:
            for each level, the indices of its tokens in the stream [B S], the lengths of its spans [B], and
            for each span the row of its last prefix span in the previous level [B]; and the index of each
            token of the stream in the concatenated levels.
        """
        groups = [list(same) for _, same in groupby(sorted(self._spans, key=_depth), key=_depth)]
        levels, row = [], dict[int, int]()
        for spans in groups:
            longest = max(span.length for span in spans)
            parents = [row[span.prefix[-1].start] if span.prefix else 0 for span in spans]
            start, length = torch.tensor([[span.start, span.length] for span in spans]).T[:, :, None]
            places = start + torch.arange(longest).minimum(length - 1)
            row = {span.start: i for i, span in enumerate(spans)}
            levels.append(
                tuple(to_device(x, self._device) for x in (places.flatten(), length[:, 0], parents))
            )
        return levels, to_device(_places(groups), self._device)  # type: ignore[return-value]


def _depth(span: Span) -> int:
    return len(span.prefix)


class _Tile:
    """B spans, padded to S queries and K keys each."""

    def __init__(self, spans: Sequence[Span], device: torch.device, dtype: torch.dtype) -> None:
        self.spans, self._dtype = spans, dtype
        self.queries, self._keys = max(s.length for s in spans), max(s.keys for s in spans)
        start, length, before = torch.tensor([[s.start, s.length, s.position] for s in spans]).T[:, :, None]
        q = torch.arange(self.queries)[None]
        self.query_places = (start + q.minimum(length - 1)).flatten()
        # Padding may repeat any token, since no query sees the padded keys.
        places = torch.zeros(len(spans), self._keys, dtype=torch.long)
        for row, span in zip(places, spans, strict=True):
            row[: span.keys] = torch.cat(
                [torch.arange(s.start, s.start + s.length) for s in (*span.prefix, span)]
            )
        self.key_places = places.flatten()
        # A padded query repeats the last one, since a query that saw nothing would give a row of NaN.
        self._positions = to_device(before + q.minimum(length - 1), device)
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        q, k, v = (x.view(len(self.spans), -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        mask = self._mask(rules.window, query.shape[1] // key.shape[1])
        return masked(q, k, v, mask, rules).transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None, shared: int) -> Tensor:
        """Return the additive mask [B, 1, R S, K] for R queries that share a key.

        All layers share one mask, since attention stores its mask for the backward pass. The stride of the
        rows is a multiple of 8, otherwise CUDA's kernel would store a copy per layer. On MPS the rows are
        contiguous, since its kernels have misread masks of other layouts (pytorch/pytorch#184180).
        """
        if (window, shared) not in self._masks:
            i = self._positions.repeat(1, shared)[:, :, None]
            apart = 1 if i.device.type == "mps" else 8
            j = torch.arange(-(-self._keys // apart) * apart, device=i.device)
            mask = additive_mask(i, j, window, self._dtype)
            self._masks[window, shared] = mask[:, None, :, : self._keys]
        return self._masks[window, shared]


def _group(spans: Sequence[Span]) -> list[list[Span]]:
    """Group spans of similar size; see SMALL_TILE_PAIRS for the limits."""

    def fits(group: Sequence[Span], span: Span) -> bool:
        together = [*group, span]
        padded = max(s.keys for s in together) * max(s.length for s in together) * len(together)
        waste = padded - sum(s.length * s.keys for s in together)
        return padded <= SMALL_TILE_PAIRS or (waste <= MAX_WASTE * padded and padded <= MAX_TILE_PAIRS)

    return list(grouped(sorted((s for s in spans if s.length), key=lambda s: (s.keys, s.length)), fits))


def _places(groups: Sequence[Sequence[Span]]) -> Tensor:
    """Return for each token of the stream its index in the concatenated groups.

    The spans of a group are padded to the length of the longest.
    """
    place = torch.empty(sum(span.length for group in groups for span in group), dtype=torch.long)
    first = 0
    for group in groups:
        longest = max(span.length for span in group)
        for span in group:
            place[span.start : span.start + span.length] = torch.arange(first, first + span.length)
            first += longest
    return place


def _pick(x: Tensor, places: Tensor) -> Tensor:
    """Return x[places].

    This is an embedding lookup, since its gradient, summed row by row, is faster than the one of indexing.
    """
    return F.embedding(places, x.flatten(1)).view(-1, *x.shape[1:])
