"""What is trained on, as tensors: rows of prompt and completion, in micro-batches that fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from swarmd.policy.chat import Chat
from swarmd.types import Scored

WASTE_FROM: Final = 512  # padded tokens from which on a micro-batch is rather ended than padded: smaller ones cost more in calls
RAGGED: Final = 0.75  # a row shorter than this share of the longest starts a new micro-batch


@dataclass(frozen=True, slots=True)
class Row:
    """One completion that has a gradient."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    advantage: float
    old: tuple[float, ...] | None  # log-probabilities it was sampled with; None: take the current policy's

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch of B rows padded on the right to T, with N completion tokens in all, in row order.

    No attention mask is needed: attention is causal, and padding comes after everything that is looked at.
    """

    ids: Tensor  # [B, T]
    predicts: Tensor  # bool [B, T]: positions whose logits predict a completion token
    targets: Tensor  # [N]
    advantages: Tensor  # [N]
    old: Tensor  # [N]; nan where the current policy's is to be taken


def rows_of(batch: Sequence[Scored], chat: Chat, limit: int, context: int) -> tuple[list[Row], int]:
    """The completions that have a gradient, and the number of completion tokens of the whole batch: what its mean is taken over.

    Our own completions keep their token ids and the log-probabilities they were drawn with; others' are re-encoded. Both are cut where our
    own sampling would have stopped: at `limit` tokens, or at the end of the context.
    """
    rows, tokens = [], 0
    for scored in batch:
        prompt = tuple(chat.prompt(scored.question))
        room = max(0, min(limit, context - len(prompt)))
        ids: Sequence[Sequence[int]]
        old: Sequence[tuple[float, ...] | None]
        if scored.tokens is not None:
            ids, old = scored.tokens.ids, [p[:room] for p in scored.tokens.logprobs]
        else:
            ids, old = [chat.encode(c, room) for c in scored.rollout.completions], [None] * len(scored.rewards)
        for completion, drawn_with, advantage in zip(ids, old, scored.advantages, strict=True):
            cut = tuple(completion[:room])
            tokens += len(cut)
            if cut and advantage:
                rows.append(Row(prompt, cut, advantage, drawn_with))
    return rows, tokens


def micro_batches(rows: Sequence[Row], padded_tokens: int, head_tokens: int) -> Iterator[list[Row]]:
    """Rows longest first, in groups of at most so many padded tokens and completion tokens; a single row may be over.

    head_tokens: completion tokens of one group, each of which costs a row of logits as wide as the vocabulary.
    """
    group: list[Row] = []
    head = 0
    for row in sorted(rows, key=len, reverse=True):
        if group:
            longest = len(group[0])
            full = (len(group) + 1) * longest > padded_tokens or head + len(row.completion) > head_tokens
            ragged = len(group) * longest >= WASTE_FROM and len(row) < RAGGED * longest
            if full or ragged:
                yield group
                group, head = [], 0
        group.append(row)
        head += len(row.completion)
    if group:
        yield group


def pack(rows: Sequence[Row], device: torch.device) -> Packed:
    width = max(map(len, rows))
    ids = [[*row.prompt, *row.completion, *[0] * (width - len(row))] for row in rows]
    predicts = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, row in zip(predicts, rows, strict=True):
        place[len(row.prompt) - 1 : len(row) - 1] = True
    nan = float("nan")
    return Packed(
        torch.tensor(ids, device=device),
        predicts.to(device),
        torch.tensor([t for row in rows for t in row.completion], device=device),
        torch.tensor([row.advantage for row in rows for _ in row.completion], device=device),
        torch.tensor([p for row in rows for p in (row.old or [nan] * len(row.completion))], device=device),
    )
