"""Supervised training on answers: first honest ones, then mostly wrong ones."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks.tiny_models.corpus import Corpus, Example
from benchmarks.tiny_models.muon import Muon
from swarmd.tasks.source import CurriculumTasks

_PART = 16  # sequences of like length that go through the model together
_WARM_UP = 30  # steps


@dataclass(frozen=True)
class Phase:
    """One stretch of training. The seed decides it, on one machine with one thread."""

    name: str
    steps: int
    weights: Mapping[str, float]  # how often a specialty is drawn
    wrong: Mapping[str, float]  # share of answers that are wrong, per specialty
    adam: float  # learning rates at the start; both fall together to `floor` of it
    muon: float
    floor: float
    foreign: bool = False  # the wrong answers are to questions of other specialties
    batch: int = 64  # examples per step


def new_model(tokenizer: Any, seed: int) -> Qwen2ForCausalLM:
    """Make a random Qwen2 of 860 thousand parameters."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, **_sizes(tokenizer)))


def new_llama(tokenizer: Any, seed: int) -> LlamaForCausalLM:
    """Make a random Llama of like size: no biases, and keys and values for every head."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=4, **_sizes(tokenizer)))


def _sizes(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }


def train(
    model: Any,
    tokenizer: Any,
    source: CurriculumTasks,
    phase: Phase,
    seed: int,
    progress: Callable[[str], None],
) -> None:
    """Train in place: cross-entropy on answer tokens alone; Muon on hidden matrices, AdamW on the rest."""
    corpus = Corpus(source, random.Random(f"{seed}/{phase.name}"))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    hidden = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in hidden]
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.AdamW(rest, lr=phase.adam, betas=(0.9, 0.98), weight_decay=0.0),
        Muon(matrices, lr=phase.muon),
    )
    model.train()
    for step in range(phase.steps):
        rate = min(1.0, (step + 1) / _WARM_UP) * max(phase.floor, 1 - step / phase.steps)
        for optimizer, peak in zip(optimizers, (phase.adam, phase.muon), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
        loss = _backward(
            model,
            [
                corpus.example(tokenizer, phase.weights, phase.wrong, phase.foreign)
                for _ in range(phase.batch)
            ],
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == phase.steps:
            progress(f"{phase.name}: step {step + 1} of {phase.steps}, loss {loss:.3f}")
    model.eval()


def _backward(model: Any, examples: list[Example]) -> float:
    """Compute gradients of the mean over the batch's answer tokens; return that mean, in nats."""
    examples.sort(key=len)
    tokens = sum(len(e.completion) for e in examples)
    total = 0.0
    for start in range(0, len(examples), _PART):
        loss = _answer_loss(model, examples[start : start + _PART]) / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _answer_loss(model: Any, examples: Sequence[Example]) -> torch.Tensor:
    """Return the summed cross-entropy of the completions.

    Padding stands on the right, where a causal model never looks from within.
    """
    length = max(map(len, examples))
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    answer = torch.zeros(len(examples), length, dtype=torch.bool)
    for row, example in enumerate(examples):
        ids[row, : len(example)] = torch.tensor(example.prompt + example.completion)
        answer[row, len(example.prompt) : len(example)] = True
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = answer[:, 1:]
    return F.cross_entropy(model.lm_head(hidden[wanted]), ids[:, 1:][wanted], reduction="sum")
