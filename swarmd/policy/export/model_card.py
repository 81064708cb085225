"""The model card of an exported model: its base, its training run and what was measured.

Pure text; no torch, no files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from swarmd.policy.models.hub import REPOSITORIES
from swarmd.policy.models.tiny import WEIGHTS as TINY

APACHE: Final = "apache-2.0"  # of every model that has a short name
# The first and last reward are the mean of so many rounds at either end.
EDGE_ROUNDS: Final = 10


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run, from its metrics.jsonl; None where that has no value."""

    rounds: int
    hours: float  # of the rounds themselves
    reward_first: float | None  # mean reward of the node's own completions, over the first rounds
    reward_last: float | None
    edge: int  # rounds each of the two is the mean of
    external_share: float | None  # of the rollouts that were trained on
    tokens_generated: int
    tokens_trained: int
    judge_score: float | None  # pass@1 of the last evaluation
    judge_n: int | None


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of an exported model."""

    base: str  # repository, folder or short name
    repository: bool  # whether `base` is one of the hub
    revision: str | None
    lora_rank: int | None
    adapter_only: bool
    dtype: str
    curriculum: str
    version: str  # of swarmd
    # Share of the adapter's energy that merging lost to rounding (`lora.fold`); None: nothing was merged
    lost: float | None = None


def figures_of(lines: Sequence[Mapping[str, Any]]) -> Figures:
    """Summarise a run for the card.

    lines: of metrics.jsonl, in order of rounds.
    """
    rewards = [
        line["reward_mean"]
        for line in lines
        if _number(line.get("reward_mean")) and line.get("tokens", {}).get("generated", 1)
    ]
    edge = max(1, min(EDGE_ROUNDS, len(rewards) // 2))
    local, external = (sum(line.get(key) or 0 for line in lines) for key in ("local", "external"))
    judged: Mapping[str, Any] = next((line["judge"] for line in reversed(lines) if line.get("judge")), {})
    return Figures(
        rounds=lines[-1]["round"] if lines else 0,
        hours=sum(value for line in lines for value in line.get("seconds", {}).values() if _number(value))
        / 3600,
        reward_first=fmean(rewards[:edge]) if rewards else None,
        reward_last=fmean(rewards[-edge:]) if rewards else None,
        edge=edge,
        external_share=external / (local + external) if local + external else None,
        tokens_generated=sum(line.get("tokens", {}).get("generated") or 0 for line in lines),
        tokens_trained=sum(line.get("tokens", {}).get("trained") or 0 for line in lines),
        judge_score=judged.get("score"),
        judge_n=judged.get("n"),
    )


def card(origin: Origin, figures: Figures) -> str:
    """Write the README.md of the exported folder."""
    library = "peft" if origin.adapter_only else "transformers"
    base = [f"base_model: {origin.base}"] if origin.repository else []
    licence = [f"license: {APACHE}"] if origin.base in (*TINY, *REPOSITORIES.values()) else []
    tags = "tags: [swarmd, sapo, grpo, reasoning-gym]"
    head = ["---", *base, *licence, f"library_name: {library}", "pipeline_tag: text-generation", tags, "---"]
    name = origin.base.rstrip("/").rpartition("/")[2]
    what = "A LoRA adapter for" if origin.adapter_only else "A model trained from"
    at = f" at revision `{origin.revision}`" if origin.revision else ""
    method = (
        f"a LoRA adapter of rank {origin.lora_rank} on every linear layer but the head"
        if origin.lora_rank
        else "all weights"
    )
    merged = ", merged into the base weights" if origin.lora_rank and not origin.adapter_only else ""
    rounding = [f"- {lost}"] if (lost := loss_of(origin)) else []
    linked = f"[{origin.base}](https://huggingface.co/{origin.base})" if origin.repository else f"`{name}`"
    text = [
        f"# {name}, trained with swarmd",
        "",
        (
            f"{what} {linked}{at}, by swarmd {origin.version}: GRPO on ReasoningGYM questions,"
            " on a node's own rollouts and on those that other nodes of a swarm"
        ),
        "shared with it (SAPO, arXiv 2509.08721). Every reward was computed by the node itself.",
        "",
        "## Use",
        "",
        *_snippet(adapter=origin.adapter_only),
        "",
        "An answer stands between `<answer>` and `</answer>`.",
        "",
        "## How it was made",
        "",
        f"- Curriculum: {origin.curriculum}",
        f"- Trained: {method}{merged}; {origin.dtype}",
        *rounding,
        (
            f"- Rounds: {figures.rounds:,}, {_duration(figures.hours)}; {figures.tokens_generated:,} tokens"
            f" generated, {figures.tokens_trained:,} trained on"
        ),
        f"- Rollouts of others in what was trained on: {_percent(figures.external_share)}",
        "",
        "## What was measured",
        "",
        "| figure | value |",
        "|---|---|",
        (
            f"| reward of its own answers, mean of the first {figures.edge} rounds |"
            f" {_three(figures.reward_first)} |"
        ),
        (
            f"| reward of its own answers, mean of the last {figures.edge} rounds |"
            f" {_three(figures.reward_last)} |"
        ),
        (
            f"| judge, pass@1{f' of {figures.judge_n:,} answers' if figures.judge_n else ''} |"
            f" {_three(figures.judge_score)} |"
        ),
        "",
        (
            "The rewards are of answers sampled during training, on training questions; the judge's are of"
            " greedy answers to held-out ones."
        ),
        f"The licence is the base model's{f', {APACHE}' if licence else ''}.",
        "",
    ]
    return "\n".join([*head, "", *text])


def _snippet(*, adapter: bool) -> list[str]:
    library, kind = (
        ("peft", "AutoPeftModelForCausalLM") if adapter else ("transformers", "AutoModelForCausalLM")
    )
    return [
        "```python",
        *(
            ["from peft import AutoPeftModelForCausalLM", "from transformers import AutoTokenizer"]
            if adapter
            else []
        ),
        *([] if adapter else [f"from {library} import {kind}, AutoTokenizer"]),
        "",
        'path = "."  # this folder, or the repository that it was pushed to',
        f"tokenizer, model = AutoTokenizer.from_pretrained(path), {kind}.from_pretrained(path)",
        'messages = [{"role": "user", "content": "What is 12 + 30?"}]',
        (
            "inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True,"
            ' return_tensors="pt")'
        ),
        "made = model.generate(**inputs, max_new_tokens=256)",
        'print(tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
        "```",
    ]


def loss_of(origin: Origin) -> str | None:
    """Say what merging lost and how to avoid that; None where it lost nothing that shows."""
    if origin.lost is None or origin.lost < 5e-4:
        return None
    return (
        f"Rounding the merged weights W + ΔW to {origin.dtype} lost {100 * origin.lost:.1f} % of the"
        " adapter's energy, the sum of ΔW²; answers differ from those of the run by so much. `swarmd export"
        " --adapter` writes the adapter whole."
    )


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _three(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.0f} %"
