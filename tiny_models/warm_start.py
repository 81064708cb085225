"""Supervised training on answers: first on right answers, then mostly on wrong ones."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from swarmd.tasks.source import CurriculumTasks
from tiny_models.corpus import Corpus, Example
from tiny_models.muon import Muon

# Number of sequences of similar length per forward pass on the CPU. On a GPU, padding costs less than further
# kernel launches, so the whole batch is one forward pass.
_PART = 16
_WARM_UP = 30  # steps


@dataclass(frozen=True)
class Phase:
    """One phase of training. On one machine with one thread, its result depends only on the seed."""

    name: str
    steps: int
    weights: Mapping[str, float]  # relative frequency of each specialty
    wrong: Mapping[str, float]  # share of wrong answers per specialty
    adam: float  # initial learning rates; both fall to the share `floor`
    muon: float
    floor: float
    foreign: bool = False  # wrong answers come from other specialties
    batch: int = 64  # examples per step


def new_model(tokenizer: Any, seed: int) -> Qwen2ForCausalLM:
    """Make a Qwen2 with 860 thousand random parameters."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, **_sizes(tokenizer)))


def new_mid(tokenizer: Any, seed: int) -> Qwen2ForCausalLM:
    """Make a Qwen2 with 12.8 million random parameters, three times as wide and twice as deep."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
    }
    return Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, **_sizes(tokenizer) | sizes))


def new_llama(tokenizer: Any, seed: int) -> LlamaForCausalLM:
    """Make a random Llama of similar size, without biases and with keys and values for every head."""
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


class _Batches(IterableDataset[list[Example]]):
    """The batches of a phase, in order; they are the same in every process."""

    def __init__(self, tokenizer: Any, source: CurriculumTasks, phase: Phase, seed: int) -> None:
        self._corpus = Corpus(source, random.Random(f"{seed}/{phase.name}"))
        self._tokenizer = tokenizer
        self._phase = phase

    def __iter__(self) -> Iterator[list[Example]]:
        phase = self._phase
        for _ in range(phase.steps):
            yield [
                self._corpus.example(self._tokenizer, phase.weights, phase.wrong, phase.foreign)
                for _ in range(phase.batch)
            ]


def train(
    model: Any,
    tokenizer: Any,
    source: CurriculumTasks,
    phase: Phase,
    seed: int,
    progress: Callable[[str], None],
) -> None:
    """Train the model in place, on its device.

    The loss is the cross-entropy of answer tokens only. Muon trains hidden matrices, AdamW all other weights.
    For a GPU, a separate process makes the batches.
    """
    stream = _Batches(tokenizer, source, phase, seed)
    batches: Iterable[list[Example]] = (
        stream
        if model.device.type == "cpu"
        else DataLoader(stream, batch_size=None, num_workers=1, prefetch_factor=16)
    )
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    hidden = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in hidden]
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.AdamW(rest, lr=phase.adam, betas=(0.9, 0.98), weight_decay=0.0),
        Muon(matrices, lr=phase.muon),
    )
    model.train()
    for step, examples in enumerate(batches):
        rate = min(1.0, (step + 1) / _WARM_UP) * max(phase.floor, 1 - step / phase.steps)
        for optimizer, peak in zip(optimizers, (phase.adam, phase.muon), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
        losses = _backward(model, examples)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == phase.steps:
            loss = sum(part.item() for part in losses)  # only for these steps, because it waits for the GPU
            progress(f"{phase.name}: step {step + 1} of {phase.steps}, loss {loss:.3f}")
    model.eval()


def _backward(model: Any, examples: list[Example]) -> list[torch.Tensor]:
    """Compute the gradient of the mean loss per answer token; return the parts of this mean, in nats."""
    examples.sort(key=len)
    tokens = sum(len(e.completion) for e in examples)
    size = _PART if model.device.type == "cpu" else len(examples)
    losses = []
    for start in range(0, len(examples), size):
        loss = _answer_loss(model, examples[start : start + size]) / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return losses


def _answer_loss(model: Any, examples: Sequence[Example]) -> torch.Tensor:
    """Return the summed cross-entropy of the completions.

    Padding is on the right, so no answer token of a causal model attends to it.
    """
    length = max(map(len, examples))
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    answer = torch.zeros(len(examples), length, dtype=torch.bool)
    for row, example in enumerate(examples):
        ids[row, : len(example)] = torch.tensor(example.prompt + example.completion)
        answer[row, len(example.prompt) : len(example)] = True
    wanted = answer[:, 1:].nonzero(as_tuple=True)  # computed on the CPU, without waiting for a GPU
    targets = ids[:, 1:][wanted].to(model.device)
    hidden = model.model(input_ids=ids[:, :-1].to(model.device), use_cache=False).last_hidden_state
    rows, columns = (places.to(model.device) for places in wanted)
    return F.cross_entropy(model.lm_head(hidden[rows, columns]), targets, reduction="sum")
