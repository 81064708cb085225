"""One policy-gradient step: forward and backward in micro-batches that fit, gradient clipping, Adam.

The step follows GRPO (arXiv 2402.03300), with these changes:

1. Advantages come with the rows (`packing.rows_of`). The learner knows neither groups nor rewards.
2. There is one step per batch. So text that these very weights drew has ratio 1 by definition (`on_policy`),
   as in TRL; otherwise the sampler's rounding in 16 bits would clip 3 to 4 % of its tokens. Replay and
   generators outside of the trainer bring old log-probabilities. Text of other nodes has ratio 1 (SAPO,
   section 3.2).
3. The loss has no KL term. The KL divergence from the start is only measured, every `kl_every` updates.
4. A step is a sum over micro-batches of loss times weight. So their size changes the memory, never the
result.

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
    """The weights from before training, to measure the KL divergence from them. Made before training starts.

    With an adapter, the adapter is switched off, which leaves the base model. If all weights are trained, a
    copy is kept in the machine's memory (not the accelerator's) and exchanged with the trained weights while
    it is needed. The copy holds the weights as they were loaded, before a checkpoint is restored.
    """

    def __init__(self, network: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
        """Keep the data that is needed to restore the weights from before training.

        weights: the trained parameters.
        """
        self._adapted = [layer for _, layer in lora_layers(network)]
        self._copies = [
            (weight, weight.detach().to("cpu", copy=True)) for weight in weights.values() if not self._adapted
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Restore the weights from before training until the block ends. Do not train inside the block."""
        # A buffer for one weight. If there is no memory for it, this fails before any weight has moved.
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
# In float16 the loss is multiplied by a power of two, so that small gradients do not become 0 (arXiv
# 1710.03740, section 3.2). The factor is divided by 4 after a non-finite gradient, and doubled every
# STEPS_TO_DOUBLE updates.
FIRST_SCALE: Final = 2.0**14
STEPS_TO_DOUBLE: Final = 200
# Maximum number of logits of a padded micro-batch: half a GiB in float32, held about three times over.
MAX_PADDED_LOGITS: Final = 2**27


class Diverged(SwarmdError):
    """Training has diverged: loss or gradient was not finite several times in a row.

    Lower train.learning_rate and rejoin.
    """


@dataclass(frozen=True, slots=True)
class Learning:
    train: TrainConfig  # with the learning rate and the importance cap filled in
    # The sampling temperature, since ratios and entropy refer to the distribution that is sampled.
    temperature: float
    micro_batch_tokens: int  # maximum number of tokens of one forward pass
    checkpointing: bool = False  # gradient checkpointing from the start; else after the first lack of memory
    # Tokens whose logits are held at once (`Plan.head_tokens`); 0: chosen by the size of the vocabulary.
    head_tokens: int = 0


@dataclass(slots=True)
class Sums:
    """Sums over the completion tokens that were computed."""

    loss: float = 0.0  # the weighted loss
    entropy: float = 0.0
    clipped: float = 0.0
    tokens: int = 0
    drift: float = 0.0
    # Tokens whose log-probability under the policy that drew them is known; `drift` is summed over them.
    drawn: int = 0
    kl: float = 0.0
    measured: int = 0  # tokens over which `kl` is summed


# With several trainers: replaces each rank's gradients and sums by the totals of all ranks.
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

        Args:
            network: as it is before training; a checkpoint's weights are loaded later.
            learning: the settings of the updates.
            device: the network's device.
            rest: called between micro-batches; blocks while the process must rest.
        """
        self.weights = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.optimizer = Optimizer(self.weights, learning.train.optimizer)
        self.updates = 0
        self.skipped = 0  # consecutive updates that were skipped
        self._network, self._learning, self._device, self.rest = network, learning, device, rest
        self._head: nn.Linear = network.get_output_embeddings()  # type: ignore[operator]  # all causal language models have it
        # None: the network needs padded batches.
        self._decoder = Decoder(network, device, learning.head_tokens) if adopt(network) else None
        self._budget = learning.micro_batch_tokens
        self._recompute = learning.checkpointing
        # Whether old log-probabilities come from the present weights and differ only by rounding.
        self.on_policy = False
        self._scale = FIRST_SCALE if self._head.weight.dtype == torch.float16 else 1.0
        self.reference = ReferencePolicy(network, self.weights) if learning.train.kl_every else None
        # Called with the number of finished rows, the number of all rows, and the share.
        self.done: Callable[[int, int, float], object] = lambda *_: None

    def step(self, rows: Sequence[Row], combine: Combine | None = None) -> UpdateReport:
        """Take one step down the rows' weighted loss (`packing.rows_of`).

        If no row has a gradient, no weight changes. If loss or gradient is not finite, the step is skipped
        and the report has 0 tokens and 1 skipped. If memory runs out, all later updates recompute
        activations, and if that is not enough, use smaller micro-batches.

        Args:
            rows: completions with their weights.
            combine: sums gradients over several trainers; None for a single trainer.

        Raises:
            Diverged: after five skipped steps in a row.
            NoModel: if not even one row fits into memory.
        """
        if not rows and combine is None:
            return UpdateReport()
        # With several trainers, a rest within a step would make the other ranks wait until their timeout.
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
            tokens=sums.tokens,
            drift=sums.drift / max(1, sums.drawn),
            kl=sums.kl / sums.measured if sums.measured else None,
            learning_rate=rate,
        )

    def logprobs(self, rows: Sequence[Row]) -> dict[Row, tuple[float, ...]]:
        """Return each row's log-probabilities of its completion under the current policy.

        Trains nothing. Uses memory as `step` does.
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
            # Outside of the handler, so that the traceback no longer holds the tensors.
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
                "out of memory in the update: activations are recomputed from now on, rather than kept"
            )
            return
        if all(len(group) == 1 for group in groups):
            raise NoModel(
                f"not enough memory on {self._device} to train on one completion of"
                f" {max(len(g[0]) for g in groups):,} tokens, question included. Lower"
                " generate.max_new_tokens, close other programs, or choose a smaller model."
            )
        # Halve the largest micro-batch that can be split. A single long row would keep the budget too high.
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
        # The only wait for the device.
        loss, entropy, clipped, drift, drawn, kl, own = torch.stack(figures).sum(0).tolist()
        tokens = sum(len(row.targets) for group in groups for row in group)
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
            found |= {row: tuple(islice(each, len(row.targets))) for row in group}
            self._note(groups, i)
        return found

    def _note(self, groups: Sequence[Sequence[Row]], last: int) -> None:
        """Report that the micro-batches up to `last` are done."""
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
        hidden, targets = (
            torch.split(x, self._decoder.chunk) for x in (self._decoder.hidden(batch), batch.scores.targets)
        )
        return torch.cat(
            [
                token_logprobs(self._decoder.logits(states), of_chunk, self._learning.temperature)[0]
                for states, of_chunk in zip(hidden, targets, strict=True)
            ]
        )

    def _backward_packed(self, decoder: Decoder, batch: Packed, reference: Tensor | None) -> list[Tensor]:
        """Run head and loss forward and backward in chunks, then the decoder backward at once.

        So no more than one chunk of logits is held. Returns the figures of each chunk.
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
        """Backpropagate from the logits. Returns seven sums for the report, as a tensor on the device.

        logits: [N, V], with a graph. reference: [N], the reference policy's log-probabilities.
        """
        temperature = self._learning.temperature
        logprobs, entropy, probabilities = token_logprobs(logits, scores.targets, temperature)
        # Text from other nodes is treated as if the current policy had written it: ratio 1 (SAPO section
        # 3.2).
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
        # The drift is 0 if the policy that drew the token is unknown. The KL is summed over this node's own
        # tokens only: `k3` needs tokens that the measured policy drew. Replayed text of other nodes is
        # excluded, although its log-probabilities at first use are known.
        drift = k3(current, drew)
        kl = none if reference is None else torch.where(scores.own, k3(reference, current), 0.0)
        # All sums have one type, since MPS cannot stack mixed types. A count of tokens is exact in float32.
        figures = (loss.detach(), entropy, none if clipped is None else clipped, drift, drawn, kl, scores.own)
        return torch.stack([figure.float().sum() for figure in figures])

    def _padded_logits(self, batch: Padded) -> Tensor:
        """Return the logits [N, V] at the positions that predict a completion token.

        The positions are selected before the head, so that the model's later operations (soft-capping,
        scaling) still apply.
        """

        def pick(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            return (inputs[0][batch.predicts][None],)

        with self._head.register_forward_pre_hook(pick):
            logits: Tensor = self._network(input_ids=batch.ids, use_cache=False).logits[0]
        return logits

    def _clip(self) -> float:
        """Scale the gradients down to the largest allowed norm; return their norm before.

        The norm is summed in float32 for gradients of any type.
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
            log.info("step skipped: a gradient in float16 is scaled by %g from now on", self._scale)
            return UpdateReport(skipped=1)
        self.skipped += 1
        log.warning("step skipped: loss %s, gradient norm %s (%d in a row)", loss, norm, self.skipped)
        if self.skipped >= MAX_SKIPS_IN_A_ROW:
            raise Diverged(
                f"loss or gradient was not finite {self.skipped} times in a row (last: loss {loss}, gradient"
                f" norm {norm}); nothing was changed by those steps. Lower train.learning_rate, or move the"
                " newest folder of checkpoints/ away"
                + ", or set model.dtype to 'float32'" * (self._head.weight.dtype != torch.float32)
                + "."
            )
        return UpdateReport(skipped=1)
