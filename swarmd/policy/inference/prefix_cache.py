"""Prefix cache: a prompt's keys and values are stored once and shared by all its completions."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarmd.policy.attention import (
    PackedLayout,
    Rules,
    Span,
    additive_mask,
    capped,
    grouped,
    run,
    shared_prefix,
)
from swarmd.policy.inference.fused_decoder import Blocks
from swarmd.policy.inference.padded import COMPACT_AT
from swarmd.policy.inference.recorded_step import RecordedStep, records
from swarmd.policy.models.device import gives_float32, to_device
from swarmd.policy.recurrent import State, Step

# Maximum number of prompt tokens in one forward pass, unless a single prompt is longer.
PREFILL_TOKENS: Final = 8192
# With fixed shapes, the readable part of the own tokens' memory grows by this many tokens, or by this share
# of the present tokens if that is more.
ROOM_TOKENS: Final = 64
ROOM_SHARE: Final = 1 / 8
# Recording a step for new shapes costs more than computing finished rows along.
RECORDED_COMPACT_AT: Final = 0.5


class SharedPrefix:
    """The shared cache of B rows, in the order of their Q questions.

    It is also the attention layout of the decoding steps, each of which takes one token per row.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        copies: int,
        steps: int,
        device: torch.device,
        *,
        blocks: Blocks | None = None,
        fixed: bool | None = None,
    ) -> None:
        """Lay out prompts and their rows; nothing is computed yet.

        Args:
            network: an adopted network.
            prompts: the token ids of Q prompts.
            copies: rows per prompt.
            steps: maximum number of tokens of a row.
            device: the network's device.
            blocks: the network's layers for the steps; None for the network's modules.
            fixed: whether steps keep their shapes as long as possible; by default if steps are recorded.
        """
        self._network, self._prompts, self._copies, self._steps, self._device = (
            network,
            prompts,
            copies,
            steps,
            device,
        )
        self._dtype: torch.dtype = network.get_input_embeddings().weight.dtype
        # A CPU computes scores and weighted values in float32, and would convert all of them at each step.
        exact = torch.promote_types(self._dtype, torch.float32)
        self._stored = exact if device.type == "cpu" else self._dtype
        # Sizes are kept on both sides, so that the host never waits for the device to know them.
        self._sizes = [len(p) for p in prompts]
        self._lengths = to_device(self._sizes, device)  # [Q]
        self._width = max(self._sizes)  # P
        # Layer -> keys and values [Q, K, P, D], padded on the right
        self._prefix: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys and values [S, K, steps, D]
        # Layer -> states after each prompt, later after each row
        self._states: dict[int, State] = {}
        self._done = 0  # own tokens whose keys and values are stored
        self._fixed = records(device) if fixed is None else fixed
        # With fixed shapes, `_place` counts the finished steps on the device. A step reads the first `_room`
        # own tokens and masks those that do not exist yet.
        self._place, self._room = torch.zeros(1, dtype=torch.long, device=device), 0
        self._own_masks: dict[int | None, Tensor] = {}  # window -> [room]
        self._step = RecordedStep()
        self._masks: dict[int | None, Tensor | None] = {}  # window -> [Q K, 1, P]
        self._regroup([question for question in range(len(prompts)) for _ in range(copies)])
        self._blocks = blocks

    def first(self) -> Tensor:
        """Compute the prompts. Returns the logits [B, V] of each row's first token."""
        # Groups of prompts with at most PREFILL_TOKENS tokens together.
        blocks = grouped(
            range(len(self._prompts)),
            lambda block, i: sum(self._sizes[j] for j in (*block, i)) <= PREFILL_TOKENS,
        )
        last = torch.cat([self._prefill(block) for block in blocks])
        self._choose(self._question)
        return last.repeat_interleave(self._copies, dim=0)

    def _prefill(self, block: Sequence[int]) -> Tensor:
        """Return the logits [prompts, V] after the prompts with these indices.

        The common prefix of the prompts is computed once.
        """
        prompts = [list(self._prompts[i]) for i in block]
        common = shared_prefix(prompts)
        head = (Span(0, common),) if common else ()
        spans, ids = list(head), prompts[0][:common]
        for prompt in prompts:
            spans.append(Span(len(ids), len(prompt) - common, head))
            ids += prompt[common:]
        own = spans[len(head) :]

        def tensor(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), device=self._device)

        sources = tensor(
            t for s in own for part in (*head, s) for t in range(part.start, part.start + part.length)
        )
        question = tensor(i for i, p in zip(block, prompts, strict=True) for _ in p)
        places = tensor(j for p in prompts for j in range(len(p)))
        layout = _Prefill(self, PackedLayout(spans, self._device, self._dtype), sources, question, places)
        positions = tensor(j for s in spans for j in range(s.position, s.position + s.length))
        ends = tensor(s.start + s.length - 1 for s in own)
        logits: Tensor = run(self._network, tensor(ids), positions, layout, logits_to_keep=ends).logits[0]
        return logits

    @property
    def compact_at(self) -> float:
        """Finished rows are removed once at most this share of the rows is alive."""
        return RECORDED_COMPACT_AT if self._fixed else COMPACT_AT

    def next(self, tokens: Tensor) -> Tensor:
        """Add one token [B] to each row. Returns the logits [B, V] of the next token."""
        if self._fixed and self._done >= self._room:
            self._room = min(self._steps, self._done + max(ROOM_TOKENS, int(self._done * ROOM_SHARE)))
            self._step = RecordedStep(self._step)
        logits = self._step(self._advance, tokens) if self._fixed else self._advance(tokens)
        self._done += 1
        return logits

    def _advance(self, tokens: Tensor) -> Tensor:
        for window in self._masks.keys() - {None}:
            del self._masks[window]
        self._own_masks.clear()
        positions = self._lengths[self._question] + self._own_tokens
        logits: Tensor = (
            self._blocks.step(tokens, positions, self)
            if self._blocks
            else run(self._network, tokens, positions, self).logits[0]
        )
        if self._fixed:
            self._place += 1
        return logits

    @property
    def _own_tokens(self) -> Tensor | int:
        return self._place if self._fixed else self._done

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with only these rows, given in ascending order."""
        self._choose(to_device(rows, self._device))
        before = [self._slots[row] for row in rows]
        order = self._regroup([self._asked[row] for row in rows])
        slots = to_device([before[row] for row in order], self._device)
        self._step = RecordedStep(self._step)
        self._own = {
            layer: (self._kept(k, slots), self._kept(v, slots)) for layer, (k, v) in self._own.items()
        }

    def _choose(self, rows: Tensor) -> None:
        self._states = {
            layer: tuple(x.index_select(0, rows) for x in state) for layer, state in self._states.items()
        }

    def recur(self, layer: int, read: Tensor, step: Step) -> Tensor:
        """Advance each row's recurrent state by one token: [B, n] -> [B, m]."""
        out, after = step(read[:, None], None, self._states[layer])
        if self._fixed:
            for state, new in zip(self._states[layer], after, strict=True):
                state.copy_(new)
        else:
            self._states[layer] = after
        return out[:, 0]

    def store_state(self, layer: int, state: State) -> None:
        """Append the states after the next prompts."""
        there = self._states.get(layer)
        self._states[layer] = (
            state if there is None else tuple(map(torch.cat, zip(there, state, strict=True)))
        )

    def store(self, layer: int, question: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values [T, K, D] of prompt tokens."""
        if layer not in self._prefix:
            shape = (len(self._lengths), key.shape[1], self._width)
            # Initialised to 0: masked values are multiplied by 0, and 0 times uninitialised memory may be
            # NaN.
            self._prefix[layer] = tuple(
                torch.zeros(*shape, x.shape[2], dtype=self._stored, device=self._device) for x in (key, value)
            )  # type: ignore[assignment]
        for stored, new in zip(self._prefix[layer], (key, value), strict=True):
            stored.transpose(1, 2)[question, positions] = new.to(self._stored)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """Attend to the prompt and to the row's own tokens, with one softmax over both.

        Rows are arranged in S = Q G slots, so that the G rows of a question are adjacent and use its prompt
        in one product.
        """
        if self._ragged:
            query, key, value = (x.index_select(0, self._row) for x in (query, key, value))
        keys, values = self._append(layer, key, value)
        end = self._room if self._fixed else self._done + 1
        first = 0 if self._fixed or rules.window is None else max(0, end - rules.window)
        keys, values = (x[:, :, first:end].flatten(0, 1) for x in (keys, values))  # [S K, t, D]
        prefix_keys, prefix_values = (x.flatten(0, 1) for x in self._prefix[layer])  # [Q K, P, D]
        slots, heads, width = query.shape
        kinds, group = key.shape[1], self._group
        shared = heads // kinds  # R
        query = query.view(-1, group, kinds, shared, width)
        asked = query.transpose(1, 2).reshape(-1, group * shared, width)  # [Q K, G R, D]

        on_prefix = (
            _scores(asked, prefix_keys, self._mask(rules.window, kinds), rules)
            .view(-1, kinds, group, shared, self._width)
            .transpose(1, 2)
        )
        on_own = _scores(query.reshape(-1, shared, width), keys, self._own_mask(rules.window), rules)
        # [Q, G, K, R, P + t]
        scores = torch.cat([on_prefix, on_own.view(-1, group, kinds, shared, on_own.shape[-1])], dim=-1)
        shares = scores.softmax(-1).to(values.dtype)
        of_prefix = shares[..., : self._width].transpose(1, 2).reshape(-1, group * shared, self._width)
        out = (
            torch.bmm(of_prefix, prefix_values)
            .view(-1, kinds, group, shared, width)
            .transpose(1, 2)
            .reshape(-1, shared, width)
        )
        out = torch.baddbmm(out, shares[..., self._width :].flatten(0, 2), values)
        out = out.view(slots, heads, width).to(self._dtype)
        return out.index_select(0, self._slot) if self._ragged else out

    def _append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._own:
            self._own[layer] = tuple(
                self._memory(x.shape[0], x.shape[1], self._steps, x.shape[2]) for x in (key, value)
            )  # type: ignore[assignment]
        for stored, new in zip(self._own[layer], (key, value), strict=True):
            if self._fixed:
                stored.index_copy_(2, self._place, new.to(self._stored)[:, :, None])
            else:
                stored[:, :, self._done] = new
        return self._own[layer]

    def _memory(self, *shape: int) -> Tensor:
        # With fixed shapes, steps also read unwritten tokens, so these must be 0; see `store`.
        return (torch.zeros if self._fixed else torch.empty)(shape, dtype=self._stored, device=self._device)

    def _kept(self, buffer: Tensor, slots: Tensor) -> Tensor:
        kept = self._memory(len(slots), *buffer.shape[1:])
        kept[:, :, : self._done] = buffer[:, :, : self._done].index_select(0, slots)
        return kept

    def _regroup(self, asked: Sequence[int]) -> list[int]:
        """Drop questions without rows, and arrange the rest: Q questions of at most G rows each.

        asked: the question of each row, ascending. Returns the row of each slot [S].
        """
        counts = Counter(asked)
        if len(counts) < len(self._sizes):
            there = to_device(list(counts), self._device)
            self._sizes = [self._sizes[question] for question in counts]
            self._lengths, self._width = self._lengths[there], max(self._sizes)
            self._prefix = {
                layer: (k[there, :, : self._width].contiguous(), v[there, :, : self._width].contiguous())
                for layer, (k, v) in self._prefix.items()
            }
        self._group = max(counts.values())
        self._asked = [question for question, n in enumerate(counts.values()) for _ in range(n)]
        # The slot in [S] of each row.
        self._slots = [q * self._group + rank for q, n in enumerate(counts.values()) for rank in range(n)]
        # Slot -> row; empty slots repeat row 0
        order = [0] * (len(counts) * self._group)
        for row, slot in enumerate(self._slots):
            order[slot] = row
        self._ragged = len(asked) < len(order)
        self._question, self._slot, self._row = (
            to_device(x, self._device) for x in (self._asked, self._slots, order)
        )
        self._masks.clear()
        return order

    def _mask(self, window: int | None, kinds: int) -> Tensor | None:
        """Return the mask to add to scores [Q K, G R, P]; None if no prompt position is hidden."""
        if window not in self._masks:
            past = window is not None and (self._fixed or max(self._sizes) + self._done >= window)
            self._masks[window] = (
                self._hiding(window, kinds) if past or min(self._sizes) < self._width else None
            )
        return self._masks[window]

    def _hiding(self, window: int | None, kinds: int) -> Tensor:
        lengths, j = self._lengths[:, None], torch.arange(self._width, device=self._device)
        hidden = j >= lengths
        if window is not None:
            hidden = hidden | (j <= lengths + self._own_tokens - window)
        mask = torch.zeros(hidden.shape, device=self._device).masked_fill_(hidden, float("-inf"))
        return mask.repeat_interleave(kinds, dim=0)[:, None]

    def _own_mask(self, window: int | None) -> Tensor | None:
        """Return the mask to add to scores [S K, R, t] of own tokens; None if no token is hidden."""
        if not self._fixed:
            return None
        if window not in self._own_masks:
            j = torch.arange(self._room, device=self._device)
            self._own_masks[window] = additive_mask(self._place, j, window, torch.float32)
        return self._own_masks[window]


class _Prefill:
    """The layout of the prompts' forward pass, which stores their keys and values in the cache."""

    def __init__(
        self, to: SharedPrefix, stream: PackedLayout, sources: Tensor, question: Tensor, positions: Tensor
    ) -> None:
        """Map tokens of a packed stream to their places in the cache.

        sources: stream indices of tokens. question, positions: the question of each token, and its position
            there. A token may be listed for several questions.
        """
        self._to, self._stream, self._sources, self._question, self._positions = (
            to,
            stream,
            sources,
            question,
            positions,
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        self._to.store(layer, self._question, self._positions, key[self._sources], value[self._sources])
        return self._stream.attend(layer, query, key, value, rules)

    def recur(self, layer: int, read: Tensor, step: Step) -> Tensor:
        out, state = self._stream.recurred(read, step)
        self._to.store_state(layer, state)
        return out


def _scores(query: Tensor, keys: Tensor, mask: Tensor | None, rules: Rules) -> Tensor:
    """Return the scores [N, S, T] of query [N, S, D] on keys [N, T, D], with a mask to add, in float32.

    The learner's attention computes them in float32, too. In 16 bits, a large amount that all keys share,
    such as from the biases of Qwen2.5, would leave no digits for the differences.
    """
    keys = keys.transpose(1, 2)
    if rules.softcap is not None:
        # In 16 bits, as `attention.masked` has them.
        scores = capped(torch.bmm(query * rules.scale, keys.to(query.dtype)), rules.softcap)
    elif query.dtype != torch.float32 and gives_float32(query.device, query.dtype):
        scores = torch.bmm(query, keys, out_dtype=torch.float32) * rules.scale
    else:
        query, keys = query.float() * rules.scale, keys.float()
        return torch.bmm(query, keys) if mask is None else torch.baddbmm(mask, query, keys)
    return scores if mask is None else scores + mask
