"""Batched sampling: a prompt is computed once for all its completions, and finished rows leave the batch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmd.policy.attention import adopt, grouped
from swarmd.policy.inference.fused_decoder import blocks_of
from swarmd.policy.inference.padded import PaddedRows
from swarmd.policy.inference.prefix_cache import SharedPrefix
from swarmd.policy.models.device import to_device

# About the square root of a vocabulary's size, for small and large vocabularies.
STRIDE_TOKENS: Final = 64
# Weights are packed for at least this many steps. Packing pays from 6 steps on with 32 rows, and from 22 on
# with one row (SmolLM2-135M).
PACKED_FROM_STEPS: Final = 16
# Called with the number of finished answers, the number of all answers, and the finished share of the work.
Done = Callable[[int, int, float], object]
# Called with rows that ended a turn: the prompt's number, the row's tokens, and which of them were drawn.
# Returns the tokens that each row reads before its next turn; none if the answer is complete.
Reply = Callable[[Sequence[tuple[int, Sequence[int], Sequence[bool]]]], Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parameters of decoding.

    The policy is softmax(logits / temperature) over the whole vocabulary, without truncation.
    """

    limit: int  # maximum number of new tokens of a sample
    context: int  # maximum number of tokens of prompt and completion together
    ends: frozenset[int]
    temperature: float  # 0: always the likeliest token, with log-probabilities at temperature 1
    # Maximum number of new tokens for each prompt, not above `limit`; (): `limit` for all.
    limits: tuple[int, ...] = ()
    # Gives the ids to read between two turns of an answer; None: answers have one turn.
    reply: "Reply | None" = None

    def room(self, i: int, prompt: Sequence[int]) -> int:
        """Return the maximum number of new tokens for prompt number i; 0 if the prompt fills the context."""
        return max(0, min(self.limits[i] if self.limits else self.limit, self.context - len(prompt)))


@dataclass(frozen=True, slots=True)
class Sample:
    ids: tuple[int, ...]  # includes the end-of-sequence token if it was drawn
    logprobs: tuple[float, ...]
    ended: bool
    # The version of the weights that drew each token; empty without `between`.
    versions: tuple[int, ...] = ()
    # Whether each token was drawn, or read between two turns; (): all were drawn. `logprobs` has an entry for
    # each drawn token.
    drawn: tuple[bool, ...] = ()


@torch.inference_mode()
def decode(
    network: nn.Module,
    prompts: Sequence[Sequence[int]],
    copies: int,
    sampling: Sampling,
    generator: torch.Generator,
    cache_tokens: int,
    between: Callable[[], int] | None = None,
    rest: Callable[[], object] = lambda: None,
    drawn: Callable[[Tensor], object] = lambda _: None,
    done: Done = lambda *_: None,
    *,
    packed: bool = True,
) -> list[list[Sample]]:
    """Draw `copies` samples of each prompt, in order.

    A prompt that fills the context gets empty samples.

    Args:
        network: the policy.
        prompts: token ids.
        copies: samples per prompt.
        sampling: the parameters of decoding.
        generator: the source of randomness.
        cache_tokens: maximum number of tokens whose keys and values are held at the same time. One prompt's
        completions are always decoded together, even if they need more.
        between: called before each forward pass; returns the version of the weights, which it may have
            changed in place. Keys and values of earlier tokens are kept (PipelineRL, arXiv 2509.19128,
            section 4). Nothing else that is computed from weights may be kept between passes.
        rest: called before each pass, too; may block.
        drawn: called with the tokens of each step, one per remaining row; may raise to end the decoding.
        done: called after each step with the progress.
        packed: whether to pack the weights, if that works and pays.
    """
    answers = [[Sample((), (), ended=False)] * copies for _ in prompts]
    device, shared, ended = generator.device, adopt(network), 0
    packed_rows = len(prompts) * copies if packed and sampling.limit >= PACKED_FROM_STEPS else 0
    blocks = blocks_of(network, between is None, packed_rows) if shared else None
    for group in groups(prompts, copies, sampling, cache_tokens, shared):
        asked = [prompts[i] for i in group]
        room = [sampling.room(i, prompts[i]) for i in group for _ in range(copies)]
        rows: SharedPrefix | PaddedRows = (
            SharedPrefix(network, asked, copies, max(room), device, blocks=blocks)
            if shared
            else PaddedRows(network, asked, copies, device)
        )
        note = partial(_note, done, ended, len(room), len(prompts) * copies)
        replies = (
            Replies(sampling.reply, [i for i in group for _ in range(copies)], room)
            if sampling.reply
            else None
        )
        samples = decode_rows(rows, room, sampling, generator, between, rest, drawn, note, replies)
        ended += len(room)
        for place, i in enumerate(group):
            answers[i] = samples[place * copies : (place + 1) * copies]
    return answers


def _note(done: Done, before: int, rows: int, of: int, ended: int, share: float) -> None:
    """Report the progress of all groups, given the progress of one.

    before: answers of the earlier groups. rows: answers of this group. ended: how many of them have ended.
    share: the finished share of this group's steps.
    """
    done(before + ended, of, (before + max(ended, rows * share)) / of)


def groups(
    prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, cache_tokens: int, shared: bool
) -> Iterator[list[int]]:
    """Yield the indices of prompts that are decoded together, which have similar lengths to save padding.

    shared: whether a prompt is stored once for all its completions.
    """

    def fits(group: Sequence[int], _: int) -> bool:
        longest = len(prompts[group[0]])
        each = longest + copies * sampling.limit if shared else copies * (longest + sampling.limit)
        return (len(group) + 1) * each <= cache_tokens

    asked = (i for i, p in enumerate(prompts) if len(p) < sampling.context)
    return grouped(sorted(asked, key=lambda i: -len(prompts[i])), fits)


def decode_rows(
    rows: SharedPrefix | PaddedRows,
    room: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator,
    between: Callable[[], int] | None = None,
    rest: Callable[[], object] = lambda: None,
    drawn: Callable[[Tensor], object] = lambda _: None,
    note: Callable[[int, float], object] = lambda *_: None,
    replies: "Replies | None" = None,
) -> list[Sample]:
    """Decode rows until all have ended or are full.

    The host waits for the device once per token, to learn which rows are left.

    Args:
        rows: the cache with the prompts.
        room: maximum number of tokens of each row.
        sampling: the parameters of decoding.
        generator: the source of randomness.
        between: see `decode`.
        rest: see `decode`.
        drawn: see `decode`.
        note: called after each step with the number of ended rows and the finished share of the steps.
        replies: feeds the tokens that rows read between two turns; None: answers have one turn.
    """
    device = generator.device
    ends = torch.tensor(sorted(sampling.ends), device=device)
    total, steps, most = len(room), max(room), torch.tensor(room, device=device)
    ids = torch.full((total, steps), -1, device=device)
    logprobs = torch.zeros(total, steps, device=device)
    row = torch.arange(total, device=device)  # the row of `ids` for each batch row's tokens
    alive = torch.ones(total, dtype=torch.bool, device=device)

    versions = [between()] if between else []  # version of the weights at each step
    rest()
    logits = rows.first()
    for step in range(steps):
        token, logprob = _pick(logits, sampling.temperature, generator)
        if replies:
            token = replies.read(token, row)
        ids[row, step] = torch.where(alive, token, -1)
        logprobs[row, step] = logprob
        drawn(token)
        going = (token[:, None] != ends).all(1)
        if replies:
            going = replies.go_on(going, alive, row, ids[:, : step + 1])
        alive = alive & going & (step + 1 < most[row])
        left = [place for place, lives in enumerate(alive.tolist()) if lives]
        note(total - len(left), (step + 1) / steps)
        if not left:
            break
        if len(left) <= rows.compact_at * len(alive):
            keep = to_device(left, device)
            row, token, alive = row[keep], token[keep], alive[keep]
            rows.keep(left)
        if between:
            versions.append(between())
        rest()
        logits = rows.next(token)
    masks = replies.drawn if replies else [()] * total
    return [
        _sample(*of_row, sampling.ends, versions)
        for of_row in zip(ids.tolist(), logprobs.tolist(), masks, strict=True)
    ]


class Replies:
    """Feeds a reply's tokens to the rows of a batch, one by one, in place of drawn tokens.

    So nothing that a row has computed is lost, and its prefix is not computed again.
    """

    def __init__(self, reply: Reply, prompts: Sequence[int], room: Sequence[int]) -> None:
        """Start before the first token.

        prompts: the number of each row's prompt. room: maximum number of tokens of each row.
        """
        self._reply, self._prompts, self._room = reply, prompts, room
        self._next: dict[int, list[int]] = {}  # row -> tokens to read, the next one last
        self.drawn: list[list[bool]] = [[] for _ in prompts]  # by row: whether each token was drawn

    def read(self, token: Tensor, row: Tensor) -> Tensor:
        """Return the tokens [B], with those that rows read in place of those that were drawn for them."""
        for place, number in enumerate(row.tolist()):
            if reading := bool(self._next.get(number)):
                token[place] = self._next[number].pop()
            self.drawn[number].append(not reading)
        return token

    def go_on(self, going: Tensor, alive: Tensor, row: Tensor, ids: Tensor) -> Tensor:
        """Return which rows go on [B]: also those that read, or whose turn has ended but not the answer.

        going: whether each token ends nothing. ids: [rows, steps] so far.
        """
        there = [
            (p, n) for p, (n, lives) in enumerate(zip(row.tolist(), alive.tolist(), strict=True)) if lives
        ]
        ended = [(p, n) for p, n in there if self.drawn[n][-1] and not going[p]]
        asked = [(self._prompts[n], ids[n].tolist(), self.drawn[n]) for _, n in ended]
        for (_, number), tokens in zip(ended, self._reply(asked) if asked else (), strict=True):
            # There must be room for one more token, which is drawn.
            if len(tokens) + ids.shape[1] < self._room[number]:
                self._next[number] = [*reversed(tokens)]
        for place, number in there:
            going[place] |= bool(self._next.get(number)) or not self.drawn[number][-1]
        return going


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one token per row; return the tokens and their log-probabilities.

    logits: [B, V]. One uniform number per row is looked up in the cumulative sum of the row's probabilities,
    since one random number per token of the vocabulary would cost more than the rest of a small model's step.
    A cumulative sum is slower than a sum. So strides of the vocabulary are summed first, and a cumulative sum
    is taken over the strides, then within one stride. It is in float64, so that rare tokens keep their share.
    """
    logits = logits.float()
    probabilities = (logits if temperature in (0, 1) else logits / temperature).softmax(-1)
    token = _drawn(probabilities, generator) if temperature else logits.argmax(dim=-1)
    return token, probabilities.gather(1, token[:, None])[:, 0].log()


def _drawn(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one token per row: [B, V] -> [B]."""
    rows, vocabulary = probabilities.shape
    exact = torch.float32 if probabilities.device.type == "mps" else torch.float64  # MPS has no float64
    missing = -vocabulary % STRIDE_TOKENS
    whole = F.pad(probabilities, (0, missing)) if missing else probabilities
    strides = whole.view(rows, -1, STRIDE_TOKENS)
    above = strides.sum(-1).to(exact).cumsum(-1)
    uniform = (
        torch.rand(rows, 1, dtype=exact, device=probabilities.device, generator=generator) * above[:, -1:]
    )
    # Take the first sum strictly above the number, and the number is below the last sum. So a stride or token
    # of probability 0 is never drawn.
    stride = torch.searchsorted(above, uniform, right=True).clamp_(max=above.shape[-1] - 1)
    before = F.pad(above, (1, 0)).gather(1, stride)
    within = strides.gather(1, stride[:, :, None].expand(-1, -1, STRIDE_TOKENS))[:, 0].cumsum(-1, dtype=exact)
    place = torch.searchsorted(within, uniform - before, right=True)
    # If rounding puts the number at the stride's end, take the stride's last token of nonzero probability.
    last = (within < within[:, -1:]).sum(-1, keepdim=True)
    return (stride * STRIDE_TOKENS + place.minimum(last))[:, 0]


def _sample(
    ids: list[int],
    logprobs: list[float],
    drawn: Sequence[bool],
    ends: frozenset[int],
    versions: list[int],
) -> Sample:
    length = ids.index(-1) if -1 in ids else len(ids)
    mask = tuple(drawn[:length])
    return Sample(
        tuple(ids[:length]),
        tuple(compress(logprobs[:length], mask) if mask else logprobs[:length]),
        length > 0 and ids[length - 1] in ends,
        tuple(versions[:length]),
        mask,
    )
