"""One policy-gradient step: forward and backward in micro-batches that fit, clip, Adam."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from swarmd.errors import NoModel, SwarmdError
from swarmd.policy import losses
from swarmd.policy.device import is_out_of_memory, release_cached
from swarmd.policy.packing import Packed, Row, micro_batches, pack
from swarmd.types import UpdateReport

log = logging.getLogger(__name__)

SKIPS_IN_A_ROW: Final = 5
LOGITS: Final = 2**27  # elements of one micro-batch's logits: half a GiB in float32, held about three times over in the backward pass


class Diverged(SwarmdError):
    """Training has diverged: loss or gradient was not finite several times in a row. Lower train.learning_rate and rejoin."""


@dataclass(frozen=True, slots=True)
class Learning:
    learning_rate: float
    clip_low: float
    clip_high: float
    max_grad_norm: float
    temperature: float  # the one the policy samples at: ratios and entropy are of that distribution
    micro_batch_tokens: int  # padded tokens


@dataclass(slots=True)
class _Sums:
    """Over the completion tokens that were computed."""

    loss: float = 0.0  # already divided by the batch's tokens
    entropy: float = 0.0
    clipped: int = 0
    tokens: int = 0


class Learner:
    """The network's trainable weights and their Adam. Adam as in SAPO section 5: default betas, no weight decay, constant rate."""

    def __init__(self, network: nn.Module, learning: Learning, device: torch.device) -> None:
        self.weights = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=learning.learning_rate, weight_decay=0.0, fused=True)
        self.updates = 0
        self.skipped = 0  # in a row
        self._network, self._learning, self._device = network, learning, device
        self._head: nn.Linear = network.get_output_embeddings()  # type: ignore[operator]  # of every causal language model
        self._budget = learning.micro_batch_tokens

    def step(self, rows: Sequence[Row], tokens: int) -> UpdateReport:
        """Token mean over `tokens` completion tokens (DAPO, arXiv 2503.14476, eq. 12): the whole batch's, those without gradient included.

        Where nothing has a gradient, nothing moves. A loss or gradient that is not finite: the step is left out and the report says
        0 tokens; Diverged after five in a row. Out of memory: smaller micro-batches from then on; NoModel when not even one row fits.
        """
        if not rows:
            return UpdateReport()
        sums = self._gradients(rows, tokens)
        norm = float(nn.utils.clip_grad_norm_(self.weights.values(), self._learning.max_grad_norm))
        if not (math.isfinite(sums.loss) and math.isfinite(norm)):
            return self._skip(sums.loss, norm)
        self._apply()
        self.updates, self.skipped = self.updates + 1, 0
        return UpdateReport(sums.loss, norm, sums.entropy / sums.tokens, sums.clipped / sums.tokens, sums.tokens)

    def _gradients(self, rows: Sequence[Row], tokens: int) -> _Sums:
        while True:
            groups = list(micro_batches(rows, self._budget, max(1, LOGITS // self._head.weight.shape[0])))
            self.optimizer.zero_grad(set_to_none=True)
            try:
                return self._accumulate(groups, tokens)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            # Out of the handler, so that the traceback no longer holds the tensors.
            self._shrink(groups)

    def _shrink(self, groups: Sequence[Sequence[Row]]) -> None:
        release_cached(self._device)
        if all(len(group) == 1 for group in groups):
            raise NoModel(
                f"not enough memory on {self._device} to train on one completion of {max(len(g[0]) for g in groups)} tokens, question "
                "included. Lower generate.max_new_tokens, close other programs, or choose a smaller model."
            )
        self._budget = max(len(group) * len(group[0]) for group in groups) // 2
        log.warning("out of memory in the update: micro-batches of at most %d tokens from now on", self._budget)

    def _accumulate(self, groups: Sequence[Sequence[Row]], tokens: int) -> _Sums:
        sums, learning = _Sums(), self._learning
        for group in groups:
            batch = pack(group, self._device)
            logprobs, entropy = losses.token_logprobs(self._logits(batch), batch.targets, learning.temperature)
            # Text that came from elsewhere is taken as if our current policy had written it: ratio 1 (SAPO section 4).
            old = torch.where(batch.old.isnan(), logprobs.detach(), batch.old)
            loss = losses.grpo(logprobs, old, batch.advantages, learning.clip_low, learning.clip_high).sum() / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            sums.loss += loss.item()
            sums.entropy += entropy.sum().item()
            with torch.no_grad():
                cut = losses.clipped(logprobs, old, batch.advantages, learning.clip_low, learning.clip_high)
            sums.clipped += int(cut.sum())
            sums.tokens += len(batch.targets)
        return sums

    def _logits(self, batch: Packed) -> Tensor:
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
