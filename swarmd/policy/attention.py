"""Attention over packed sequences without padding: a layout says which token sees which, in place of a mask.

A covered network runs with our attention function for its whole life (swapping it around a forward pass
breaks the recomputation of gradient checkpointing). It takes the keyword `layout`, and computes nothing
without one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import Any, Final, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from swarmd.policy.models.device import to_device
from swarmd.policy.recurrent import RECURRENT, State, Step, read_streams

T = TypeVar("T")

NAME: Final = "swarmd"
# Architectures whose log-probabilities and gradients on a stream were compared with transformers' own
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
# Other layer types are recurrent, or keep something else than keys and values.
_LAYERS: Final = {"full_attention", "sliding_attention"}


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

    def recur(self, layer: int, read: Tensor, step: Step) -> Tensor:
        """Take the steps of a recurrent layer: [T, n] -> [T, m]."""


def adopt(network: nn.Module) -> bool:
    """Give a network our attention function, once.

    Returns False, and changes nothing, where its architecture is not covered.
    """
    model: Any = network
    if model.config._attn_implementation == NAME:
        return True
    # cuDNN plans its attention anew for each shape, up to a second each, and our batches hardly have a shape
    # twice. torch prefers it from Hopper on.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    if not covers(model.config):
        return False
    model.set_attn_implementation(NAME)
    read_streams(network)
    return bool(model.config._attn_implementation == NAME)


def covers(config: Any) -> bool:
    """Return whether a network of this configuration computes the same on a stream as on a padded batch."""
    return (
        config.model_type in COVERED
        and set(getattr(config, "layer_types", None) or ())
        <= _LAYERS | RECURRENT.get(config.model_type, set())
        and not getattr(config, "use_bidirectional_attention", None)
    )


def run(network: nn.Module, ids: Tensor, positions: Tensor, layout: Layout, **more: Any) -> Any:
    """Run an adopted network, or only its decoder, on a stream of tokens.

    ids, positions: [T].
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
def _any_mask(device: torch.device) -> Tensor:
    """Return one of four dimensions: transformers hands it through and builds no mask.

    It is made once a device, as a copy to the device would wait for its work.
    """
    with torch.inference_mode(mode=False):
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rules: Rules) -> Tensor:
    """Attend with an additive mask.

    query [B, H, S, D], key and value [B, K, T, D], mask [B, 1, H/K S, T] added to the scores -> [B, H, S, D].
    Queries that share a key head are laid side by side, so that keys and values are not repeated for them.
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


# Scores that `_Products` holds at once, three times over in float32; with more torch's kernel takes less.
MAX_SCORES: Final = 2**24


class _Products(torch.autograd.Function):
    """Attention as plain products, for a CPU in bfloat16: torch's backward pass takes three times as long.

    Like torch, it computes the shares again for the backward pass: they would take memory by the square of
    the length. Scores are in float32: the biases of Qwen2.5 are a large part that all keys share, and would
    leave few of 16 bits for the differences.
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
    """Return the softmax of masked scores, [B, K, S, D] and [B, K, T, D] -> [B, K, S, T], in float32."""
    return (query.float() * scale @ key.float().mT).add_(mask).softmax(-1)


def additive_mask(i: Tensor, j: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return what to add to scores, so that position i sees position j where i - window < j <= i."""
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
# It hands `_any_mask` through.
AttentionMaskInterface.register(NAME, sdpa_mask)


# Spans are attended to in tiles of like size: a tile may hold this many query-key pairs whatever it wastes on
# padding (a call costs as much as about so many), and any number where no more than this share of them is
# padding.
SMALL_TILE_PAIRS: Final = 16_384
MAX_WASTE: Final = 0.25
# It bounds what an attention kernel without tiling of its own would hold.
MAX_TILE_PAIRS: Final = 2**20


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a stream that see the spans of their prefix and their own earlier tokens."""

    start: int
    length: int
    prefix: tuple["Span", ...] = ()  # in order; only their start and length count

    @property
    def position(self) -> int:
        """The position of its first token within the sequence."""
        return sum(s.length for s in self.prefix)

    @property
    def keys(self) -> int:
        return self.position + self.length


def common_length(sequences: Sequence[Sequence[int]]) -> int:
    """Return how many tokens these sequences, at least one, begin with in common."""
    # The first and last of the sorted sequences differ the soonest.
    first, last = min(map(tuple, sequences)), max(map(tuple, sequences))
    least = min(map(len, sequences))
    return next((i for i in range(least) if first[i] != last[i]), least)


def shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens these prompts begin with in common, such as a system prompt's.

    At least one token is left to each.
    """
    if len(prompts) < 2:
        return 0
    return max(0, min(common_length(prompts), min(map(len, prompts)) - 1))


def grouped(items: Iterable[T], fits: Callable[[Sequence[T], T], bool]) -> Iterator[list[T]]:
    """Yield the items in groups, in order; a group takes the next item where that fits, one item always."""
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

    It gives the same result on every call, as gradient checkpointing calls it again.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device, dtype: torch.dtype) -> None:
        """Lay out the spans.

        dtype: of the network's queries.
        """
        self._spans, self._device = [span for span in spans if span.length], device
        self._tiles = [_Tile(group, device, dtype) for group in _group(spans)]
        place = torch.empty(sum(span.length for span in spans), dtype=torch.long)
        before = 0
        for tile in self._tiles:
            for row, span in enumerate(tile.spans):
                first = before + row * tile.queries
                place[span.start : span.start + span.length] = torch.arange(first, first + span.length)
            before += len(tile.spans) * tile.queries
        # [T]: the place of each token's output in the tiles' outputs, laid end to end.
        self._place = to_device(place, device)
        self._queries, self._keys = (
            (list(map(len, places)), to_device(torch.cat(places), device))
            for places in ([t.query_places for t in self._tiles], [t.key_places for t in self._tiles])
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:  # noqa: ARG002  the same in every layer
        # Read for all tiles at once, as the gradient of each reading is as long as the stream.
        read = ((query, self._queries), (key, self._keys), (value, self._keys))
        parts = (torch.split(_pick(x, places), sizes) for x, (sizes, places) in read)
        outs = [tile.attend(q, k, v, rules) for tile, q, k, v in zip(self._tiles, *parts, strict=True)]
        return _pick(torch.cat(outs) if len(outs) > 1 else outs[0], self._place)

    def recur(self, layer: int, read: Tensor, step: Step) -> Tensor:  # noqa: ARG002  the same in every layer
        return self.recurred(read, step)[0]

    def recurred(self, read: Tensor, step: Step) -> tuple[Tensor, State]:
        """Take the steps of a recurrent layer, spans after those before them.

        Returns [T, m], and the states behind the spans that have the most before them, in their order.
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
        """Group spans by how many are before them; a level is padded to S tokens.

        Returns of each level the places of its tokens in the stream [B S], its lengths [B] and the row of the
        span before each in the level before [B]; and the place of each token of the stream in the levels laid
        end to end.
        """
        place = torch.empty(sum(span.length for span in self._spans), dtype=torch.long)
        levels, row, laid = [], dict[int, int](), 0
        for _, same in groupby(sorted(self._spans, key=_depth), key=_depth):
            spans = list(same)
            longest = max(span.length for span in spans)
            parents = [row[span.prefix[-1].start] if span.prefix else 0 for span in spans]
            start, length = torch.tensor([[span.start, span.length] for span in spans]).T[:, :, None]
            places = start + torch.arange(longest).minimum(length - 1)
            for i, span in enumerate(spans):
                first = laid + i * longest
                place[span.start : span.start + span.length] = torch.arange(first, first + span.length)
            row = {span.start: i for i, span in enumerate(spans)}
            laid += len(spans) * longest
            levels.append(
                tuple(to_device(x, self._device) for x in (places.flatten(), length[:, 0], parents))
            )
        return levels, to_device(place, self._device)  # type: ignore[return-value]


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
        # Padding may hold any token, as no query sees so far.
        places = torch.zeros(len(spans), self._keys, dtype=torch.long)
        for row, span in zip(places, spans, strict=True):
            row[: span.keys] = torch.cat(
                [torch.arange(s.start, s.start + s.length) for s in (*span.prefix, span)]
            )
        self.key_places = places.flatten()
        # A query that is padding stands for the last one: it must see something, or its row would be nan.
        self._positions = to_device(before + q.minimum(length - 1), device)
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        q, k, v = (x.view(len(self.spans), -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        mask = self._mask(rules.window, query.shape[1] // key.shape[1])
        return masked(q, k, v, mask, rules).transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None, shared: int) -> Tensor:
        """Return the additive mask [B, 1, R S, K] for R queries that share a key.

        All layers get one and the same, as attention keeps its mask for the backward pass. Rows are a
        multiple of 8 apart, or CUDA's kernel would keep a copy for each layer; not on MPS, whose kernels have
        misread masks of other layouts (pytorch/pytorch#184180).
        """
        if (window, shared) not in self._masks:
            i = self._positions.repeat(1, shared)[:, :, None]
            apart = 1 if i.device.type == "mps" else 8
            j = torch.arange(-(-self._keys // apart) * apart, device=i.device)
            mask = additive_mask(i, j, window, self._dtype)
            self._masks[window, shared] = mask[:, None, :, : self._keys]
        return self._masks[window, shared]


def _group(spans: Sequence[Span]) -> list[list[Span]]:
    """Group spans of similar size; see SMALL_TILE_PAIRS."""

    def fits(group: Sequence[Span], span: Span) -> bool:
        together = [*group, span]
        padded = max(s.keys for s in together) * max(s.length for s in together) * len(together)
        waste = padded - sum(s.length * s.keys for s in together)
        return padded <= SMALL_TILE_PAIRS or (waste <= MAX_WASTE * padded and padded <= MAX_TILE_PAIRS)

    return list(grouped(sorted((s for s in spans if s.length), key=lambda s: (s.keys, s.length)), fits))


def _pick(x: Tensor, places: Tensor) -> Tensor:
    """Return x[places].

    It is computed as an embedding, whose gradient is summed row by row: quicker than that of indexing.
    """
    return F.embedding(places, x.flatten(1)).view(-1, *x.shape[1:])
