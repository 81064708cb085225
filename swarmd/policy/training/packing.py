"""Packing: converts rollouts to tensors, completions after their shared prompt, in micro-batches that fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby
from typing import Final

import torch
from torch import Tensor

from swarmd.policy.attention import Span, common_length, grouped, shared_prefix
from swarmd.policy.models.chat import Chat
from swarmd.policy.models.device import to_device
from swarmd.types import Scored

# A micro-batch of at least this many padded tokens is ended rather than padded more. Smaller micro-batches
# would cost more in calls than in padding.
WASTE_FROM_TOKENS: Final = 512
# A row shorter than this share of the longest starts a new micro-batch.
RAGGED: Final = 0.75


@dataclass(frozen=True, slots=True)
class Row:
    """One completion that has a gradient."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    advantage: float
    old: tuple[float, ...] | None  # log-probabilities at sampling; None: use the current policy's
    weight: float  # weight of each of its tokens in the batch's loss
    own: bool = False  # whether this node's policy drew it
    # Which tokens of the completion a model wrote; the others, of observations, are context. (): all.
    mask: tuple[bool, ...] = ()

    @property
    def targets(self) -> tuple[int, ...]:
        """The tokens that a model wrote, which are trained on. `old` has one entry for each."""
        return self.only(self.completion)

    def only(self, of: Sequence[int]) -> tuple[int, ...]:
        """Return the entries, one for each token of the completion, of the tokens that a model wrote."""
        return tuple(compress(of, self.mask) if self.mask else of)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, slots=True)
class Scores:
    """The inputs of the loss for each completion token; every tensor is [N], in the order of the rows."""

    targets: Tensor
    advantages: Tensor
    old: Tensor  # NaN for a token whose log-probability is taken from the current policy
    weights: Tensor
    own: Tensor  # bool: whether this node's policy drew the token

    def __getitem__(self, part: slice) -> "Scores":
        return Scores(
            self.targets[part], self.advantages[part], self.old[part], self.weights[part], self.own[part]
        )


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch of T tokens, with N completion tokens to predict.

    The stream starts with the common prefix of all prompts. Then comes the rest of each prompt, once,
    followed by its completions. Common prefixes of a prompt's completions are stored once (a trie), so equal
    completions are computed once. The last token of a completion is not stored, since it predicts nothing.
    """

    ids: Tensor  # [T]
    positions: Tensor  # [T], within each token's own sequence
    spans: tuple[Span, ...]
    sources: Tensor  # [N]: stream index of the token that predicts each completion token
    scores: Scores


@dataclass(frozen=True, slots=True)
class Padded:
    """A micro-batch of B rows padded on the right to T tokens, for networks that cannot read a stream.

    No attention mask is needed: attention is causal, and padding comes after all tokens that matter.
    """

    ids: Tensor  # [B, T]
    predicts: Tensor  # bool [B, T]: positions whose logits predict a completion token
    scores: Scores


def rows_of(
    batch: Sequence[Scored],
    advantages: Sequence[Sequence[float]],
    chat: Chat,
    limit: int,
    context: int,
    mean: Callable[[Sequence[int]], Sequence[float]],
) -> list[Row]:
    """Return the completions that have a gradient.

    Completions of this node keep their token ids and their log-probabilities at sampling. Completions of
    other nodes are encoded again. Both are truncated where this node's sampling would have stopped: at
    `limit` tokens, or at the end of the context.

    Args:
        batch: scored rollouts.
        advantages: of each rollout's completions (`swarmd.experience.advantages`).
        chat: encodes prompts and completions.
        limit: maximum number of tokens of a completion.
        context: maximum number of tokens of a prompt and its completion.
        mean: maps the lengths of all completions of the batch, including those without a gradient, to the
            weight of each completion's tokens in the loss.
    """
    rows: list[Row] = []
    for scored, of_rollout in zip(batch, advantages, strict=True):
        prompt, found = encoded(scored, chat, limit, context)
        tokens = scored.tokens
        logprobs = [None] * len(found) if tokens is None else tokens.logprobs
        for (ids, mask), advantage, old in zip(found, of_rollout, logprobs, strict=True):
            row = Row(prompt, ids, advantage, None, 0.0, tokens is not None and tokens.own, mask)
            rows.append(row if old is None else replace(row, old=old[: len(row.targets)]))
    weights = mean([len(row.targets) for row in rows])
    return [
        replace(row, weight=weight)
        for row, weight in zip(rows, weights, strict=True)
        if row.targets and row.advantage
    ]


def encoded(
    scored: Scored, chat: Chat, limit: int, context: int
) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[bool, ...]]]]:
    """Return a rollout's prompt, and all its completions as they are trained on; see `rows_of`.

    A completion is its ids and its mask (`Row.mask`).
    """
    prompt, tokens = tuple(chat.prompt(scored.question)), scored.tokens
    room = max(0, min(limit, context - len(prompt)))
    if tokens is not None:
        masks = tokens.sampled or [()] * len(tokens.ids)
        return prompt, [(ids[:room], mask[:room]) for ids, mask in zip(tokens.ids, masks, strict=True)]
    if scored.observations:
        pairs = zip(scored.rollout.completions, scored.observations, strict=True)
        turns = [chat.encode_turns(completion, replies, room) for completion, replies in pairs]
        return prompt, [(tuple(ids), tuple(mask)) for ids, mask in turns]
    return prompt, [(tuple(chat.encode(completion, room)), ()) for completion in scored.rollout.completions]


def micro_batches(rows: Sequence[Row], budget: int) -> Iterator[list[Row]]:
    """Group the rows into micro-batches of at most `budget` tokens, counting each prompt once.

    A single row may exceed the budget. The completions of one prompt are split only if they alone exceed it.
    """

    # A piece has rows of one prompt only.
    def fits(piece: Sequence[Row], row: Row) -> bool:
        return len(row.prompt) + sum(len(r.completion) for r in (*piece, row)) <= budget

    pieces = [piece for rows_of_one in by_prompt(rows) for piece in grouped(rows_of_one, fits)]
    sized = [(packed_tokens(piece), piece) for piece in pieces]
    for group in grouped(sized, lambda group, piece: sum(size for size, _ in (*group, piece)) <= budget):
        yield [row for _, piece in group for row in piece]


def by_prompt(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each prompt as a list, in order."""
    found: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(row.prompt, []).append(row)
    return list(found.values())


def packed_tokens(rows: Sequence[Row]) -> int:
    """Return the length of these rows' stream if their prompts have no common prefix."""
    return sum(map(len, {row.prompt for row in rows})) + sum(len(row.completion) for row in rows)


def pack(rows: Sequence[Row], device: torch.device) -> Packed:
    """Pack rows into one stream. Rows with the same prompt must be adjacent."""
    ids: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    spans: list[Span] = []

    def add(tokens: Sequence[int], *prefix: Span) -> Span:
        span = Span(len(ids), len(tokens), prefix)
        spans.append(span)
        ids.extend(tokens)
        positions.extend(range(span.position, span.position + span.length))
        return span

    common = shared_prefix(list({row.prompt for row in rows}))
    head = (add(rows[0].prompt[:common]),) if common else ()
    for prompt, members in groupby(rows, key=lambda row: row.prompt):
        rest = add(prompt[common:], *head)
        rows_here = list(members)
        places = _lay([row.completion[:-1] for row in rows_here], (*head, rest), add)
        for row, each in zip(rows_here, places, strict=True):
            sources += row.only((rest.start + rest.length - 1, *each))
    return Packed(
        to_device(ids, device),
        to_device(positions, device),
        tuple(spans),
        to_device(sources, device),
        _scores(rows, device),
    )


def _lay(
    sequences: Sequence[Sequence[int]], behind: tuple[Span, ...], add: Callable[..., Span]
) -> list[list[int]]:
    """Append the sequences after their prefix; store their common prefixes once.

    Returns the stream indices of each sequence's tokens.
    """
    places: list[list[int]] = [[] for _ in sequences]
    branches: list[tuple[Sequence[int], tuple[Span, ...]]] = [(range(len(sequences)), behind)]
    while branches:
        which, prefix = branches.pop()
        by_token: dict[int, list[int]] = {}
        for i in which:
            if len(places[i]) < len(sequences[i]):
                by_token.setdefault(sequences[i][len(places[i])], []).append(i)
        for same in by_token.values():
            left = [sequences[i][len(places[i]) :] for i in same]
            span = add(left[0][: common_length(left)], *prefix)
            for i in same:
                places[i] += range(span.start, span.start + span.length)
            branches.append((same, (*prefix, span)))
    return places


def padded_micro_batches(rows: Sequence[Row], budget: int, head_tokens: int) -> Iterator[list[Row]]:
    """Group rows, longest first, into padded micro-batches of at most `budget` tokens.

    A single row may exceed the budget. head_tokens: maximum number of completion tokens of one group, each of
    which needs a row of logits as wide as the vocabulary.
    """

    def fits(group: Sequence[Row], row: Row) -> bool:
        longest, predicted = len(group[0]), sum(len(r.completion) for r in (*group, row))
        within_limits = (len(group) + 1) * longest <= budget and predicted <= head_tokens
        wastes_little = len(group) * longest < WASTE_FROM_TOKENS or len(row) >= RAGGED * longest
        return within_limits and wastes_little

    return grouped(sorted(rows, key=len, reverse=True), fits)


def pad(rows: Sequence[Row], device: torch.device) -> Padded:
    width = max(map(len, rows))
    ids = [[*row.prompt, *row.completion, *[0] * (width - len(row))] for row in rows]
    predicts = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, row in zip(predicts, rows, strict=True):
        place[len(row.prompt) - 1 : len(row) - 1] = torch.tensor(row.mask) if row.mask else True
    return Padded(to_device(torch.tensor(ids), device), to_device(predicts, device), _scores(rows, device))


def _scores(rows: Sequence[Row], device: torch.device) -> Scores:
    targets = [row.targets for row in rows]
    each = [(row, len(of)) for row, of in zip(rows, targets, strict=True)]
    return Scores(
        to_device([t for of in targets for t in of], device),
        to_device([row.advantage for row, n in each for _ in range(n)], device),
        to_device([p for row, n in each for p in (row.old or [torch.nan] * n)], device),
        to_device([row.weight for row, n in each for _ in range(n)], device),
        to_device([row.own for row, n in each for _ in range(n)], device),
    )
