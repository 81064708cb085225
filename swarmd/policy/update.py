"""One policy-gradient step: forward and backward in micro-batches that fit, clip, Adam."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from swarmd.errors import NoModel, SwarmdError
from swarmd.policy import losses
from swarmd.policy.attention import adopt
from swarmd.policy.device import is_out_of_memory, release_cached
from swarmd.policy.head import Decoder, recomputing
from swarmd.policy.packing import Packed, Padded, Row, Scores, micro_batches, pack, packed_tokens, pad, padded_micro_batches
from swarmd.types import UpdateReport

log = logging.getLogger(__name__)

SKIPS_IN_A_ROW: Final = 5
PADDED_LOGITS: Final = 2**27  # elements of a padded micro-batch's logits: half a GiB in float32, held about three times over


class Diverged(SwarmdError):
    """Training has diverged: loss or gradient was not finite several times in a row. Lower train.learning_rate and rejoin."""


@dataclass(frozen=True, slots=True)
class Learning:
    learning_rate: float
    clip_low: float
    clip_high: float
    max_grad_norm: float
    temperature: float  # the one the policy samples at: ratios and entropy are of that distribution
    micro_batch_tokens: int  # of one forward pass
    loss: Literal["grpo", "asymre"] = "grpo"
    importance_cap: float = 0.0  # above 0: no ratio to clip, but truncated importance weights (losses.truncated_weights)
    checkpointing: Literal["auto", "on", "off"] = "auto"  # auto: from the first time that memory is short
    head_tokens: int = 0  # whose logits are held at once; 0: by the vocabulary


@dataclass(slots=True)
class Sums:
    """Over the completion tokens that were computed."""

    loss: float = 0.0  # weighted
    entropy: float = 0.0
    clipped: float = 0.0
    tokens: int = 0


class Learner:
    """The network's trainable weights and their Adam. Adam as in SAPO section 5: default betas, no weight decay, constant rate."""

    def __init__(self, network: nn.Module, learning: Learning, device: torch.device) -> None:
        self.weights = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=learning.learning_rate, weight_decay=0.0, fused=True)
        self.updates = 0
        self.skipped = 0  # in a row
        # Of several trainers: makes everybody's gradients and sums those of all. Then a step with no rows of its own is a step, too.
        self.combine: Callable[[Sequence[nn.Parameter], Sums], None] | None = None
        self._network, self._learning, self._device = network, learning, device
        self._head: nn.Linear = network.get_output_embeddings()  # type: ignore[operator]  # of every causal language model
        self._decoder = Decoder(network, device, learning.head_tokens) if adopt(network) else None  # None: padded batches
        self._budget = learning.micro_batch_tokens
        self._recompute = learning.checkpointing == "on"

    def step(self, rows: Sequence[Row]) -> UpdateReport:
        """One step down the rows' weighted loss (`packing.rows_of`).

        Where nothing has a gradient, nothing moves. A loss or gradient that is not finite: the step is left out and the report says
        0 tokens; Diverged after five in a row. Out of memory: recomputation where it may, then smaller micro-batches, from then on; NoModel
        when not even one row fits.
        """
        if not rows and self.combine is None:
            return UpdateReport()
        sums = self._gradients(rows)
        if self.combine is not None:
            self.combine(tuple(self.weights.values()), sums)
        norm = float(nn.utils.clip_grad_norm_(self.weights.values(), self._learning.max_grad_norm))
        if not (math.isfinite(sums.loss) and math.isfinite(norm)):
            return self._skip(sums.loss, norm)
        self._apply()
        self.updates, self.skipped = self.updates + 1, 0
        return UpdateReport(sums.loss, norm, sums.entropy / sums.tokens, sums.clipped / sums.tokens, sums.tokens)

    def _gradients(self, rows: Sequence[Row]) -> Sums:
        while True:
            groups = list(self._micro_batches(rows))
            self.optimizer.zero_grad(set_to_none=True)
            try:
                return self._accumulate(groups)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            # Out of the handler, so that the traceback no longer holds the tensors.
            self._shrink(groups)

    def _micro_batches(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        if self._decoder:
            return micro_batches(rows, self._budget)
        return padded_micro_batches(rows, self._budget, max(1, PADDED_LOGITS // self._head.weight.shape[0]))

    def _shrink(self, groups: Sequence[Sequence[Row]]) -> None:
        release_cached(self._device)
        if self._learning.checkpointing == "auto" and not self._recompute:
            self._recompute = True
            log.warning("out of memory in the update: activations are computed twice from now on, rather than kept")
            return
        if all(len(group) == 1 for group in groups):
            raise NoModel(
                f"not enough memory on {self._device} to train on one completion of {max(len(g[0]) for g in groups)} tokens, question "
                "included. Lower generate.max_new_tokens, close other programs, or choose a smaller model."
            )
        # Half of the largest that can be parted: a single long row would else keep the budget up for ever.
        self._budget = max(packed_tokens(g) if self._decoder else len(g) * len(g[0]) for g in groups if len(g) > 1) // 2
        log.warning("out of memory in the update: micro-batches of at most %d tokens from now on", self._budget)

    def _accumulate(self, groups: Sequence[Sequence[Row]]) -> Sums:
        sums = Sums()
        with recomputing(self._network) if self._recompute else nullcontext():
            for group in groups:
                if self._decoder:
                    self._backward_packed(self._decoder, pack(group, self._device), sums)
                else:
                    batch = pad(group, self._device)
                    self._backward_logits(self._padded_logits(batch), batch.scores, sums)
        return sums

    def _backward_packed(self, decoder: Decoder, batch: Packed, sums: Sums) -> None:
        """The head and its loss forward and backward in chunks, then the rest backward at once: no more than a chunk of logits is held."""
        hidden = decoder.hidden(batch)
        gradient = torch.empty_like(hidden)
        for begin in range(0, len(hidden), decoder.chunk):
            part = slice(begin, begin + decoder.chunk)
            seen = hidden[part].detach().requires_grad_()
            self._backward_logits(decoder.logits(seen), batch.scores[part], sums)
            assert seen.grad is not None
            gradient[part] = seen.grad
        hidden.backward(gradient)  # type: ignore[no-untyped-call]

    def _backward_logits(self, logits: Tensor, scores: Scores, sums: Sums) -> None:
        """logits: [N, V], with a graph. Adds their weights' gradients and the sums."""
        temperature = self._learning.temperature
        logprobs, entropy, probabilities = losses.token_logprobs(logits, scores.targets, temperature)
        loss, cut = self._loss(logprobs.requires_grad_(), scores)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        logits.backward(losses.logits_gradient(probabilities, scores.targets, gradient, temperature).to(logits.dtype))  # type: ignore[no-untyped-call]
        found = torch.stack([loss.detach(), entropy.sum(), cut.sum()]).tolist()  # one wait for the device
        sums.loss, sums.entropy, sums.clipped = sums.loss + found[0], sums.entropy + found[1], sums.clipped + found[2]
        sums.tokens += len(scores.targets)

    def _loss(self, logprobs: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """The weighted sum, and which tokens were clipped."""
        learning, none = self._learning, torch.zeros_like(scores.weights, dtype=torch.bool)
        current = logprobs.detach()
        # Text that came from elsewhere is taken as if our current policy had written it: ratio 1 (SAPO section 4).
        old = torch.where(scores.old.isnan(), current, scores.old)
        if learning.loss == "asymre":
            return (losses.asymre(logprobs, scores.advantages) * scores.weights).sum(), none
        low, high = learning.clip_low, learning.clip_high
        if learning.importance_cap:
            each = losses.grpo(logprobs, current, scores.advantages, low, high)
            return (each * losses.truncated_weights(current, old, learning.importance_cap) * scores.weights).sum(), none
        each = losses.grpo(logprobs, old, scores.advantages, low, high)
        return (each * scores.weights).sum(), losses.clipped(current, old, scores.advantages, low, high)

    def _padded_logits(self, batch: Padded) -> Tensor:
        """[N, V]: the head sees only the positions that predict a completion token.

        They are picked in front of the head, so that whatever a model does after it (soft-capping, scaling) still happens.
        """

        def pick(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            return (inputs[0][batch.predicts][None],)

        hook = self._head.register_forward_pre_hook(pick)
        try:
            out: Any = self._network(input_ids=batch.ids, use_cache=False)
        finally:
            hook.remove()
        logits: Tensor = out.logits[0]
        return logits

    def _apply(self) -> None:
        try:
            self.optimizer.step()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise NoModel(
                f"not enough memory on {self._device} for the optimizer. "
                "Close other programs, set model.lora to 'on', or choose a smaller model."
            ) from error
        self.optimizer.zero_grad(set_to_none=True)

    def _skip(self, loss: float, norm: float) -> UpdateReport:
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped += 1
        log.warning("step left out: loss %s, gradient norm %s (%d in a row)", loss, norm, self.skipped)
        if self.skipped >= SKIPS_IN_A_ROW:
            raise Diverged(
                f"loss or gradient was not finite {self.skipped} times in a row (last: loss {loss}, gradient norm {norm}); nothing was "
                "changed by those steps. Lower train.learning_rate, set model.dtype to 'float32', or go back to an older checkpoint."
            )
        return UpdateReport()
