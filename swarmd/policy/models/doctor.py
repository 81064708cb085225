"""`swarmd doctor model`: the memory plan of a model on this machine, as text and as a document."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from transformers.utils import logging as transformers_logging

from swarmd.config.config import NodeConfig
from swarmd.policy.models.device import LORA_FROM, SLOW_AT_BF16, free_memory, quick_at_bf16
from swarmd.policy.models.fit import Fit, fit, gigabytes, measures_start, require, too_large, work_of

SCHEMA = 1
PRECISION: Final = {
    None: "",
    "master": ", on a float32 copy of the weights",
    "stochastic": ", the weights rounded at random",
}


@dataclass(frozen=True, slots=True)
class Examination:
    """The findings about one model."""

    fit: Fit

    def require(self) -> None:
        """Raise NoModel where the model cannot be trained here."""
        require(self.fit)

    def document(self) -> dict[str, Any]:
        """Return the examination for programs.

        `least`, `peak`, `free` and the items' `bytes` are bytes; budgets are tokens.
        """
        fit, plan = self.fit, self.fit.plan
        return {
            "schema": SCHEMA,
            "model": fit.place.source,
            "revision": fit.place.revision,
            "device": str(fit.device),
            "parameters": fit.shape.parameters,
            "fits": plan.fits,
            "message": fit.fault if plan.fits else too_large(fit),
            "work": {key: value for key, value in asdict(fit.work).items() if key != "asked"},
            "plan": asdict(plan),
        }

    @property
    def kl(self) -> str:
        """The start of the run that its distance is measured against, in words."""
        fit = self.fit
        if not fit.work.start_copy:
            return "not measured"
        if not measures_start(fit.plan, fit.device):
            return "not measured: no room for a copy of the weights as they were"
        if fit.plan.lora_rank:
            return "measured against the model without its adapter"
        return "measured against a copy of the weights as they were" + (
            ", in main memory" if fit.device.type == "cuda" else ""
        )

    @property
    def dtype(self) -> str:
        """The data type in words, with the reason where a large model is in float32."""
        fit, dtype = self.fit, self.fit.plan.dtype
        if dtype != "float32" or fit.shape.parameters <= LORA_FROM or quick_at_bf16(fit.device):
            return dtype
        return f"{dtype}: {SLOW_AT_BF16[fit.device.type]}, and float16 is not used"

    def lines(self) -> Sequence[str]:
        """Return the examination for people: what will be used, then the arithmetic."""
        fit, plan = self.fit, self.fit.plan
        rows = [
            ("dtype", self.dtype),
            (
                "trained",
                (
                    f"LoRA of rank {plan.lora_rank}, {plan.trained:,} weights"
                    if plan.lora_rank
                    else "all weights"
                ),
            ),
            ("optimizer", plan.optimizer + PRECISION[plan.precision]),
            ("KL from the start", self.kl),
            ("gradient checkpointing", "on" if plan.checkpointing else "off"),
            (
                "micro-batch",
                f"{plan.micro_batch_tokens:,} tokens, logits of {plan.head_tokens:,} of them at once",
            ),
            ("prompts", f"{fit.work.prompt_tokens:,} tokens at most, of the curriculum's questions"),
            (
                "answers",
                (
                    f"{fit.work.new_tokens:,} new tokens; keys and values of {plan.cache_tokens:,} tokens at"
                    " once, at most"
                ),
            ),
            ("context", f"{plan.context:,} tokens, question and answer"),
        ]
        width = max(len(item.name) for item in plan.items)
        formulas = max(len(item.formula) for item in plan.items)
        lines = [f"{fit.place.source}: {fit.shape.parameters:,} parameters, on {fit.device}", ""]
        lines += [f"  {name:<24}{value}" for name, value in rows]
        for phase in ("always", "answering", "training"):
            lines += ["", f"  {phase}"]
            lines += [
                f"    {item.name:<{width}}  {item.formula:>{formulas}}  {gigabytes(item.bytes):>10}"
                for item in plan.items
                if item.phase == phase
            ]
        lines += [
            "",
            f"  at most   {gigabytes(plan.peak):>10}  always, and the larger of answering and training",
            f"  at least  {gigabytes(plan.least):>10}  with one completion at a time",
            f"  free      {gigabytes(plan.free):>10}  of which {gigabytes(plan.usable)} are counted on",
        ]
        if fit.shape.context is not None and fit.work.new_tokens >= fit.shape.context:
            lines += [
                "",
                f"  Answers end with the model's context of {fit.shape.context:,} tokens, question included.",
            ]
        if plan.fits and plan.peak > plan.usable:
            lines += [
                "",
                (
                    f"  {plan.micro_batch_tokens:,} tokens, as train.micro_batch_tokens says, are too many:"
                    " fewer will be tried."
                ),
            ]
        return lines


def examine(config: NodeConfig, free: Callable[[torch.device], int] = free_memory) -> Examination:
    """Examine how the configured model fits; download its configuration and tokenizer at most.

    free: bytes free on a device. Raises NoModel and Unreachable.
    """
    transformers_logging.disable_progress_bar()
    return Examination(fit(config.model, work_of(config), free))
