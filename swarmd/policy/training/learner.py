"""One policy-gradient step: forward and backward in micro-batches that fit, clip, Adam.

What is taken from GRPO (arXiv 2402.03300), and what is changed:

1. Advantages come with the rows (`packing.rows_of`). The learner knows neither groups nor rewards.
2. One step a batch, so text that these very weights drew has ratio 1 by definition (`on_policy`), as in TRL:
   the sampler's rounding in 16 bits would clip 3 to 4 % of its tokens. Replay and generators outside the
   trainer bring old log-probabilities. Text of other nodes has ratio 1 (SAPO, section 3.2).
3. No KL term in the loss; the KL from the start is only measured, every `kl_every` updates.
4. A step is a sum over micro-batches of loss times weight, so their size changes memory and never the result.

`Learner` holds weights and optimizer, `ReferencePolicy` the start; `losses.LOSSES` has the loss per token.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from swarmd.config.config import TrainConfig
from swarmd.errors import NoModel, SwarmdError
from swarmd.policy.attention import adopt
from swarmd.policy.models.device import is_out_of_memory, release_cached, within_memory
from swarmd.policy.models.lora import lora_layers
from swarmd.policy.training.chunked_head import Decoder, logits_gradient, recomputing, token_logprobs
from swarmd.policy.training.losses import LOSSES, k3
from swarmd.policy.training.optimizer import Optimizer
from swarmd.policy.training.packing import (
    Packed,
    Padded,
    Row,
    Scores,
    micro_batches,
    pack,
    packed_tokens,
    pad,
    padded_micro_batches,
)
from swarmd.types import UpdateReport


class ReferencePolicy:
    """The weights that training began from, to measure the KL divergence from them; made before it begins.

    An adapter is switched off: the base model is there. Where all weights are trained, a copy is put aside in
    the machine's memory (not the accelerator's), as they were loaded, so before a checkpoint is restored; it
    is exchanged with the trained ones while it is needed.
    """

    def __init__(self, network: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
        """Keep what is needed to restore the network's start.

        weights: the trained ones.
        """
        self._adapted = [layer for _, layer in lora_layers(network)]
        self._copies = [
            (weight, weight.detach().to("cpu", copy=True)) for weight in weights.values() if not self._adapted
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the network back to its start until the block ends; nothing may be trained there."""
        # Room for one weight. Where there is none, this fails before any has moved.
        most = max((w.nbytes for w, _ in self._copies if w.device.type != "cpu"), default=0)
        spare = torch.empty(most, dtype=torch.uint8)
        self._adapters(on=False)
        self._exchange(spare)
        try:
            yield
        finally:
            self._exchange(spare)
            self._adapters(on=True)

    def _adapters(self, *, on: bool) -> None:
        for layer in self._adapted:
            layer.enable_adapters(on)

    @torch.no_grad()
    def _exchange(self, spare: Tensor) -> None:
        for i, (weight, other) in enumerate(self._copies):
            if weight.device.type == "cpu":
                self._copies[i], weight.data = (weight, weight.data), other
            else:
                now = spare[: weight.nbytes].view(weight.dtype).view(weight.shape)
                now.copy_(weight)
                weight.copy_(other)
                other.copy_(now)


log = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_SKIPS_IN_A_ROW: Final = 5
# In float16 the loss is multiplied by a power of two, lest small gradients become 0 (arXiv 1710.03740,
# section 3.2): by a quarter of it after a gradient that was not finite, by twice it after so many steps.
FIRST_SCALE: Final = 2.0**14
STEPS_TO_DOUBLE: Final = 200
# The logits of a padded micro-batch: half a GiB in float32, held about three times over.
MAX_PADDED_LOGITS: Final = 2**27


class Diverged(SwarmdError):
    """Training has diverged: loss or gradient was not finite several times in a row.

    Lower train.learning_rate and rejoin.
    """


@dataclass(frozen=True, slots=True)
class Learning:
    train: TrainConfig  # with a learning rate, and an importance cap
    # The temperature that the policy samples at: ratios and entropy are of that distribution.
    temperature: float
    micro_batch_tokens: int  # tokens of one forward pass
    checkpointing: bool = False  # gradient checkpointing; else from the first time that memory is short
    # Tokens whose logits are held at once (`Plan.head_tokens`); 0: chosen by the vocabulary.
    head_tokens: int = 0


@dataclass(slots=True)
class Sums:
    """Sums over the completion tokens that were computed."""

    loss: float = 0.0  # the weighted loss
    entropy: float = 0.0
    clipped: float = 0.0
    tokens: int = 0
    drift: float = 0.0
    # Tokens with log-probabilities of the policy that drew them, over which `drift` is taken.
    drawn: int = 0
    kl: float = 0.0
    measured: int = 0  # tokens over which `kl` is taken


# Where there are several trainers, makes every rank's gradients and sums those of all.
Combine = Callable[[Sequence[nn.Parameter], Sums], None]


class Learner:
    """The network's trainable weights and their optimizer."""

    def __init__(
        self,
        network: nn.Module,
        learning: Learning,
        device: torch.device,
        rest: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare to train a network. Raises NoModel.

        network: as training begins with it; what a checkpoint holds is loaded later.
        """
        self.weights = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.optimizer = Optimizer(self.weights, learning.train.optimizer)
        self.updates = 0
        self.skipped = 0  # consecutive updates that were skipped
        self._network, self._learning, self._device, self.rest = network, learning, device, rest
        self._head: nn.Linear = network.get_output_embeddings()  # type: ignore[operator]  # of every causal language model
        # None means padded batches.
        self._decoder = Decoder(network, device, learning.head_tokens) if adopt(network) else None
        self._budget = learning.micro_batch_tokens
        self._recompute = learning.checkpointing
        # Whether old log-probabilities are of the weights as they are, but for rounding.
        self.on_policy = False
        self._scale = FIRST_SCALE if self._head.weight.dtype == torch.float16 else 1.0
        self.reference = ReferencePolicy(network, self.weights) if learning.train.kl_every else None
        # Told how many rows are done, of how many, and the share.
        self.done: Callable[[int, int, float], object] = lambda *_: None

    def step(self, rows: Sequence[Row], combine: Combine | None = None) -> UpdateReport:
        """Take one step down the rows' weighted loss (`packing.rows_of`).

        Where nothing has a gradient, nothing moves. Where loss or gradient is not finite, the step is left
        out and the report says 0 tokens and 1 skipped. Out of memory, it recomputes where it may, then uses
        smaller micro-batches, from then on.

        Raises Diverged after five skipped steps in a row, NoModel when not even one row fits.
        """
        if not rows and combine is None:
            return UpdateReport()
        # With several trainers the others would wait for us within a step, and take us for lost.
        rest = self.rest if combine is None else None
        sums = self._with_memory(rows, partial(self._accumulate, rest=rest))
        for weight in self.weights.values() if self._scale != 1 else ():
            if weight.grad is not None:
                weight.grad.mul_(1 / self._scale)
        if combine is not None:
            combine(tuple(self.weights.values()), sums)
        norm = self._clip()
        if not (math.isfinite(sums.loss) and math.isfinite(norm)):
            return self._skip(sums.loss, norm)
        rate = self._learning.train.learning_rate
        with within_memory(
            NoModel(
                f"not enough memory on {self._device} for the optimizer. Close other programs, or choose a"
                " smaller model"
                + " or model.lora = 'on'" * (not any("lora_" in n for n in self.weights))
                + "."
            )
        ):
            self.optimizer.step(rate)
        self.updates, self.skipped = self.updates + 1, 0
        if self._head.weight.dtype == torch.float16 and self.updates % STEPS_TO_DOUBLE == 0:
            self._scale *= 2
        return UpdateReport(
            sums.loss,
            norm,
            sums.entropy / sums.tokens,
            sums.clipped / sums.tokens,
            sums.tokens,
            drift=sums.drift / max(1, sums.drawn),
            kl=sums.kl / sums.measured if sums.measured else None,
            rate=rate,
        )

    def logprobs(self, rows: Sequence[Row]) -> dict[Row, tuple[float, ...]]:
        """Return the log-probabilities that the current policy gives each row's completion.

        Trains nothing; memory as in `step`.
        """
        return self._with_memory(rows, self._row_logprobs)

    def _with_memory(self, rows: Sequence[Row], work: Callable[[Sequence[Sequence[Row]]], _T]) -> _T:
        """Run `work` on micro-batches that fit into memory."""
        while True:
            groups = list(self._micro_batches(rows))
            self.optimizer.clear()
            try:
                return work(groups)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Out of the handler, so that the traceback no longer holds the tensors.
            self._shrink(groups)

    def _micro_batches(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        if self._decoder:
            return micro_batches(rows, self._budget)
        return padded_micro_batches(
            rows, self._budget, max(1, MAX_PADDED_LOGITS // self._head.weight.shape[0])
        )

    def _shrink(self, groups: Sequence[Sequence[Row]]) -> None:
        release_cached(self._device)
        if not self._recompute:
            self._recompute = True
            log.warning(
                "out of memory in the update: activations are computed twice from now on, rather than kept"
            )
            return
        if all(len(group) == 1 for group in groups):
            raise NoModel(
                f"not enough memory on {self._device} to train on one completion of"
                f" {max(len(g[0]) for g in groups)} tokens, question included. Lower generate.max_new_tokens,"
                " close other programs, or choose a smaller model."
            )
        # Half of the largest that can be parted: a single long row would else keep the budget up for ever.
        self._budget = (
            max(packed_tokens(g) if self._decoder else len(g) * len(g[0]) for g in groups if len(g) > 1) // 2
        )
        log.warning(
            "out of memory in the update: micro-batches of at most %d tokens from now on", self._budget
        )

    def _accumulate(self, groups: Sequence[Sequence[Row]], rest: Callable[[], object] | None) -> Sums:
        references, figures = self._reference_logprobs(groups), list[Tensor]()
        with recomputing(self._network) if self._recompute else nullcontext():
            for i, (group, reference) in enumerate(zip(groups, references, strict=True)):
                if rest is not None:
                    rest()
                if self._decoder:
                    figures += self._backward_packed(self._decoder, pack(group, self._device), reference)
                else:
                    batch = pad(group, self._device)
                    figures.append(self._backward_logits(self._padded_logits(batch), batch.scores, reference))
                self._note(groups, i)
        if not figures:
            return Sums()
        # The one wait for the device.
        loss, entropy, clipped, drift, drawn, kl, own = torch.stack(figures).sum(0).tolist()
        tokens = sum(len(row.completion) for group in groups for row in group)
        measured = 0 if references[0] is None else int(own)
        return Sums(loss, entropy, clipped, tokens, drift, int(drawn), kl, measured)

    def _reference_logprobs(self, groups: Sequence[Sequence[Row]]) -> Sequence[Tensor | None]:
        """Return the reference policy's log-probabilities [N] of each group, or None if not measured now."""
        if self.reference is None or self.updates % self._learning.train.kl_every:
            return [None] * len(groups)
        with self.reference.in_place():
            return [self._logprobs(group) for group in groups]

    def _row_logprobs(self, groups: Sequence[Sequence[Row]]) -> dict[Row, tuple[float, ...]]:
        found: dict[Row, tuple[float, ...]] = {}
        for i, group in enumerate(groups):
            self.rest()
            each = iter(self._logprobs(group).tolist())
            found |= {row: tuple(islice(each, len(row.completion))) for row in group}
            self._note(groups, i)
        return found

    def _note(self, groups: Sequence[Sequence[Row]], last: int) -> None:
        """Tell that the micro-batches up to the `last` are done."""
        done, of = sum(map(len, groups[: last + 1])), sum(map(len, groups))
        self.done(done, of, done / of)

    @torch.no_grad()
    def _logprobs(self, group: Sequence[Row]) -> Tensor:
        """Return the log-probabilities [N] of the group's completion tokens, in order."""
        if self._decoder is None:
            padded = pad(group, self._device)
            return token_logprobs(
                self._padded_logits(padded), padded.scores.targets, self._learning.temperature
            )[0]
        batch = pack(group, self._device)
        hidden, found = self._decoder.hidden(batch), []
        for begin in range(0, len(hidden), self._decoder.chunk):
            part = slice(begin, begin + self._decoder.chunk)
            logits = self._decoder.logits(hidden[part])
            found.append(token_logprobs(logits, batch.scores[part].targets, self._learning.temperature)[0])
        return torch.cat(found)

    def _backward_packed(self, decoder: Decoder, batch: Packed, reference: Tensor | None) -> list[Tensor]:
        """Run head and loss forward and backward in chunks, then the rest backward at once.

        No more than a chunk of logits is held at a time. Returns the figures of each chunk.
        """
        hidden, figures = decoder.hidden(batch), []
        gradient = torch.empty_like(hidden)
        for begin in range(0, len(hidden), decoder.chunk):
            part = slice(begin, begin + decoder.chunk)
            seen = hidden[part].detach().requires_grad_()
            of_part = None if reference is None else reference[part]
            figures.append(self._backward_logits(decoder.logits(seen), batch.scores[part], of_part))
            assert seen.grad is not None
            gradient[part] = seen.grad
        hidden.backward(gradient)  # type: ignore[no-untyped-call]
        return figures

    def _backward_logits(self, logits: Tensor, scores: Scores, reference: Tensor | None) -> Tensor:
        """Add the gradients of the logits; return seven sums for the report, on the device.

        logits: [N, V], with a graph. reference: [N], log-probabilities.
        """
        temperature = self._learning.temperature
        logprobs, entropy, probabilities = token_logprobs(logits, scores.targets, temperature)
        # Text that came from elsewhere is taken as if our current policy had written it: ratio 1 (SAPO
        # section 3.2).
        drawn, current = ~scores.old.isnan(), logprobs.clone()
        drew = torch.where(drawn, scores.old, current)
        old = current if self.on_policy else drew
        train, none = self._learning.train, current.new_zeros(1)
        each, clipped = LOSSES[train.loss].per_token(logprobs.requires_grad_(), old, scores.advantages, train)
        loss = (each * scores.weights).sum()
        (gradient,) = torch.autograd.grad(loss * self._scale, logprobs)
        logits.backward(
            logits_gradient(probabilities, scores.targets, gradient, temperature).to(logits.dtype)
        )  # type: ignore[no-untyped-call]
        # The drift is 0 where the policy that drew is not known. The KL is taken over our own tokens: `k3`
        # estimates none over text of other nodes, also if its log-probabilities of first use are known.
        drift, kl = k3(current, drew), none
        if reference is not None:
            kl = torch.where(scores.own, k3(reference, current), 0.0)
        # All of one type, for MPS stacks no others; a count of tokens is exact in float32.
        figures = (loss.detach(), entropy, none if clipped is None else clipped, drift, drawn, kl, scores.own)
        return torch.stack([figure.float().sum() for figure in figures])

    def _padded_logits(self, batch: Padded) -> Tensor:
        """Return the logits [N, V] at the positions that predict a completion token.

        They are picked in front of the head, so that whatever a model does after it (soft-capping, scaling)
        still happens.
        """

        def pick(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            return (inputs[0][batch.predicts][None],)

        with self._head.register_forward_pre_hook(pick):
            logits: Tensor = self._network(input_ids=batch.ids, use_cache=False).logits[0]
        return logits

    def _clip(self) -> float:
        """Scale the gradients down to the largest norm allowed; return the norm they had.

        It is summed in float32 whatever the gradients are in.
        """
        gradients = [weight.grad for weight in self.weights.values() if weight.grad is not None]
        if not gradients:
            return 0.0
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients])
        )
        nn.utils.clip_grads_with_norm_(self.weights.values(), self._learning.train.max_grad_norm, norm)
        return float(norm)

    def _skip(self, loss: float, norm: float) -> UpdateReport:
        self.optimizer.clear()
        if self._scale > 1 and math.isfinite(loss):
            self._scale = max(1.0, self._scale / 4)
            log.info("step left out: a gradient in float16 is scaled by %g from now on", self._scale)
            return UpdateReport(skipped=1)
        self.skipped += 1
        log.warning("step left out: loss %s, gradient norm %s (%d in a row)", loss, norm, self.skipped)
        if self.skipped >= MAX_SKIPS_IN_A_ROW:
            raise Diverged(
                f"loss or gradient was not finite {self.skipped} times in a row (last: loss {loss}, gradient"
                f" norm {norm}); nothing was changed by those steps. Lower train.learning_rate, or go back to"
                " an older checkpoint"
                + ", or set model.dtype to 'float32'" * (self._head.weight.dtype != torch.float32)
                + "."
            )
        return UpdateReport(skipped=1)
