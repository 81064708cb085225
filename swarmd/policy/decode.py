"""Answers, sampled: each prompt computed once for all its completions, and no work for rows that are done."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import DynamicCache

COMPACT: Final = 0.85  # drop finished rows once fewer than this share are alive: copying the cache costs about one step


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to decode. The policy is softmax(logits / temperature), over the whole vocabulary; nothing is cut off."""

    limit: int  # new tokens
    context: int  # prompt and completion together
    ends: frozenset[int]
    temperature: float  # 0: the likeliest token every time, log-probabilities at temperature 1


@dataclass(frozen=True, slots=True)
class Sample:
    ids: tuple[int, ...]  # the end-of-sequence included where it was drawn
    logprobs: tuple[float, ...]
    ended: bool


@torch.inference_mode()
def decode(
    network: nn.Module,
    prompts: Sequence[Sequence[int]],
    copies: int,
    sampling: Sampling,
    generator: torch.Generator,
    cache_tokens: int,
) -> list[list[Sample]]:
    """`copies` samples of each prompt, in order.

    cache_tokens: how many tokens' keys and values to hold at once; one prompt's completions are the least. A prompt that fills the context
    gets empty samples.
    """
    answers = [[Sample((), (), ended=False)] * copies for _ in prompts]
    for group in _groups(prompts, copies, sampling, cache_tokens):
        samples = _decode_group(network, [prompts[i] for i in group], copies, sampling, generator)
        for place, i in enumerate(group):
            answers[i] = samples[place * copies : (place + 1) * copies]
    return answers


def cache_bytes(config: Any, dtype: torch.dtype) -> int:
    """Of one token's keys and values, in all layers. config: transformers' configuration of the network."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * head * dtype.itemsize)


def _groups(prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, cache_tokens: int) -> Iterator[list[int]]:
    """Indices of prompts that are decoded together, of like length so that little is padding."""
    group: list[int] = []
    for i in sorted((i for i, p in enumerate(prompts) if len(p) < sampling.context), key=lambda i: -len(prompts[i])):
        longest = len(prompts[(group or [i])[0]]) + sampling.limit
        if group and (len(group) + 1) * copies * longest > cache_tokens:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _decode_group(
    network: nn.Module, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, generator: torch.Generator
) -> list[Sample]:
    device = generator.device
    cache, logits, mask, position = _prefill(network, prompts, copies, device)
    room = torch.tensor([min(sampling.limit, sampling.context - len(p)) for p in prompts], device=device).repeat_interleave(copies)
    ends = torch.tensor(sorted(sampling.ends), device=device)
    total, steps = len(prompts) * copies, int(room.max())
    ids = torch.full((total, steps), -1, device=device)
    logprobs = torch.zeros(total, steps, device=device)
    row = torch.arange(total, device=device)  # of ids: where a batch row's tokens go
    alive = torch.ones(total, dtype=torch.bool, device=device)

    for step in range(steps):
        token, logprob = _pick(logits, sampling.temperature, generator)
        ids[row, step] = torch.where(alive, token, -1)
        logprobs[row, step] = logprob
        alive = alive & ~torch.isin(token, ends) & (step + 1 < room[row])
        left = int(alive.sum())
        if left == 0:
            break
        if left <= COMPACT * len(alive):
            keep = alive.nonzero()[:, 0]
            row, token, position, mask, alive = row[keep], token[keep], position[keep], mask[keep], alive[keep]
            cache.batch_select_indices(keep)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        position = position + 1
        out = network(input_ids=token[:, None], attention_mask=mask, position_ids=position[:, None], past_key_values=cache, use_cache=True)
        logits = out.logits[:, -1]
    return [_sample(r, p, sampling.ends) for r, p in zip(ids.tolist(), logprobs.tolist(), strict=True)]


def _prefill(
    network: nn.Module, prompts: Sequence[Sequence[int]], copies: int, device: torch.device
) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
    """Each prompt once, padded on the left; then, `copies` times: its keys and values, logits [rows, V], mask [rows, T], last position."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    position = (mask.cumsum(1) - 1).clamp_(min=0)
    cache = DynamicCache(config=network.config)
    out: Any = network(input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(copies)
    logits, mask, position = (t.repeat_interleave(copies, dim=0) for t in (out.logits[:, -1], mask, position[:, -1]))
    return cache, logits, mask, position


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One token a row and its log-probability; logits [rows, V].

    Of independent exponentials divided by p, the smallest falls on i with probability p_i: a draw without a cumulative sum.
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature:
        race = torch.empty_like(logprobs).exponential_(generator=generator)
        token = (logprobs - race.log_()).argmax(dim=-1)
    else:
        token = logits.argmax(dim=-1)
    return token, logprobs.gather(1, token[:, None])[:, 0]


def _sample(ids: list[int], logprobs: list[float], ends: frozenset[int]) -> Sample:
    length = ids.index(-1) if -1 in ids else len(ids)
    return Sample(tuple(ids[:length]), tuple(logprobs[:length]), ended=length > 0 and ids[length - 1] in ends)
