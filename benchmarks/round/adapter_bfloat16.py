"""Compares how a new LoRA adapter learns on a bfloat16 base model and in float32.

    python -m benchmarks.round.adapter_bfloat16 [--rate 1e-5] [--updates 1,10,30,100] [--seed 0]
        [--device cpu|cuda|mps] [--json]

The model is one random Qwen2 layer of width 896 (as in Qwen2.5-0.5B), vocabulary 4,096, rank 16. A batch has
4 questions × 8 completions of 32 random tokens; a completion's advantage grows with the number of its tokens
from the lower half of the vocabulary. The update is swarmd's own code.

    same batch       one batch in all updates; the gain is measured on this batch
    fresh batches    a new batch for each update; the gain is measured on the last four

"gain" is the mean over tokens of A (log p − log p without the adapter). p is computed by the sampler (one
token at a time, prompts shared, as in decoding), by the learner (its packed pass), and by the reference:
float32 weights with the same adapter. Two rejected variants are shown as well: W + s B A folded into bfloat16
weights, and peft's own forward, which adds the adapter to a rounded product. "lost" is the share of the
energy of s B A that rounding loses, Σ (rounded − exact)² / Σ exact², as swarmd computes it now and if the
adapter is folded. "±" is the standard error, over completions, of the sampler's gain minus the learner's.

The second table shows log p of 8 × 8 fresh answers, by the engine `own` minus by the learner: the mean
absolute difference, and the mean difference ± its standard error. Before the first update, only bfloat16's
rounding causes a difference.
"""

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config

from swarmd.config.config import TrainConfig
from swarmd.policy.attention import adopt
from swarmd.policy.inference.decode import Sampling
from swarmd.policy.inference.fused_decoder import blocks_of
from swarmd.policy.inference.own_engine import OwnEngine
from swarmd.policy.inference.prefix_cache import SharedPrefix
from swarmd.policy.models.device import seeded
from swarmd.policy.models.load import with_adapter
from swarmd.policy.models.lora import fold, lora_layers
from swarmd.policy.training.learner import Learner, Learning
from swarmd.policy.training.packing import Row
from testbed.model_configurations import QWEN_05B

VOCABULARY, QUESTIONS, COMPLETIONS, PROMPT, TOKENS, RANK = 4096, 4, 8, 24, 32, 16
LAST = 4  # batches
SEEN = ("sampler", "learner", "float32", "folded", "peft")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.round.adapter_bfloat16", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument(
        "--updates", type=lambda text: tuple(map(int, text.split(","))), default=(1, 10, 30, 100)
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, adapter and batches")
    parser.add_argument("--device", choices=["cpu", "cuda", "mps"], default="cpu")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out = sys.stderr if arguments.json else sys.stdout
    print("batches, updates | lost: now, folded | gain: " + ", ".join(SEEN), file=out)
    found = []
    for fresh in (False, True):
        for figures in play(
            arguments.rate, arguments.updates, fresh, arguments.seed, torch.device(arguments.device)
        ):
            found.append(figures)
            gains = "  ".join(f"{figures['gain'][name]:+.5f}" for name in SEEN)
            lost = f"{figures['lost']['now']:8.4%} {figures['lost']['folded']:6.1%}"
            print(
                f"{figures['batches']:5} {figures['updates']:4} | {lost} | {gains}  ± {figures['error']:.5f}",
                file=out,
                flush=True,
            )
    print("updates | sampler less learner: size, mean", file=out)
    apart = []
    for figures in engine_apart(
        arguments.rate, arguments.updates, arguments.seed, torch.device(arguments.device)
    ):
        apart.append(figures)
        print(
            f"{figures['updates']:4} | {figures['size']:.5f}  {figures['mean']:+.5f}"
            f" ± {figures['error']:.5f}",
            file=out,
            flush=True,
        )
    if arguments.json:
        said = {"schema": 1, "rate": arguments.rate, "seed": arguments.seed}
        print(json.dumps(said | {"figures": found, "engine": apart}))


def play(
    rate: float, marks: Sequence[int], fresh: bool, seed: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield the figures after each number of updates in `marks`."""
    base = make(seed)
    network, exact = (
        with_adapter(copy.deepcopy(base).to(device, dtype), RANK, seed).eval()
        for dtype in (torch.bfloat16, torch.float32)
    )
    adopt(network)
    learner, truth = learner_of(network, rate), learner_of(exact, rate)
    ways: dict[str, Callable[[list[Row]], Any]] = {
        "sampler": lambda rows: sampled(network, rows),
        "learner": learner.logprobs,
        "float32": truth.logprobs,
    }
    generator = torch.Generator().manual_seed(seed + 1)
    trained = [batch(generator) for _ in range(max(marks) if fresh else 1)]
    for n in range(1, max(marks) + 1):
        learner.step(trained[n - 1 if fresh else 0])
        if n not in marks:
            continue
        give(network, exact)
        rows = [row for each in (trained[max(0, n - LAST) : n] if fresh else trained) for row in each]
        with zeroed(network), zeroed(exact):
            before = {name: see(rows) for name, see in ways.items()}
        each = {name: gains(see(rows), before[name]) for name, see in ways.items()}
        with peft_forward(network):
            each["peft"] = gains(learner.logprobs(rows), before["learner"])
        folded = copy.deepcopy(network)
        lost = fold(folded)
        with zeroed(folded):
            each["folded"] = gains(sampled(folded, rows), before["sampler"])
        apart = each["sampler"] - each["learner"]
        yield {
            "batches": "fresh" if fresh else "same",
            "updates": n,
            "lost": {"now": lost_now(network), "folded": lost},
            "gain": {name: float(values.mean()) for name, values in each.items()},
            "error": float(apart.std() / len(apart) ** 0.5),
        }


def engine_apart(
    rate: float, marks: Sequence[int], seed: int, device: torch.device
) -> Iterator[dict[str, float]]:
    """Yield the differences between the built-in engine and the learner, before and after updates."""
    network = with_adapter(make(seed).to(device), RANK, seed).eval()
    adopt(network)
    learner, generator = learner_of(network, rate), torch.Generator().manual_seed(seed + 1)
    prompts = [torch.randint(VOCABULARY, (PROMPT,), generator=generator).tolist() for _ in range(8)]
    sampling = Sampling(TOKENS, PROMPT + TOKENS, frozenset(), 1.0)
    for n in range(max(marks) + 1):
        if n:
            learner.step(batch(generator))
        if n in (0, *marks):
            answers = OwnEngine(network, 100_000).generate(prompts, COMPLETIONS, sampling, seeded(device, n))
            given = {
                Row(tuple(prompt), tuple(sample.ids), 1.0, None, 1.0): sample.logprobs
                for prompt, samples in zip(prompts, answers, strict=True)
                for sample in samples
            }
            seen = learner.logprobs(list(given))
            apart = torch.tensor(list(given.values())) - torch.tensor([seen[row] for row in given])
            means = apart.mean(1)
            yield {
                "updates": n,
                "size": float(apart.abs().mean()),
                "mean": float(means.mean()),
                "error": float(means.std() / len(means) ** 0.5),
            }


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = Qwen2Config(**QWEN_05B | {"num_hidden_layers": 1, "vocab_size": VOCABULARY})
    network: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return network


def learner_of(network: nn.Module, rate: float) -> Learner:
    train = TrainConfig(learning_rate=rate, kl_every=0)
    return Learner(network, Learning(train, temperature=1.0, micro_batch_tokens=8192), _device(network))


def _device(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


def batch(generator: torch.Generator) -> list[Row]:
    rows = []
    for _ in range(QUESTIONS):
        prompt = tuple(torch.randint(VOCABULARY, (PROMPT,), generator=generator).tolist())
        completions = torch.randint(VOCABULARY, (COMPLETIONS, TOKENS), generator=generator)
        rewards = (completions < VOCABULARY // 2).sum(1).float()
        advantages = (rewards - rewards.mean()) / rewards.std()
        weight = 1 / (QUESTIONS * COMPLETIONS * TOKENS)
        rows += [
            Row(prompt, tuple(c), a, None, weight)
            for c, a in zip(completions.tolist(), advantages.tolist(), strict=True)
        ]
    return rows


@torch.inference_mode()
def sampled(network: nn.Module, rows: Sequence[Row]) -> dict[Row, Sequence[float]]:
    """Return the log-probabilities of the completions as decoding computes them, step by step."""
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    device = _device(network)
    tokens = torch.tensor([row.completion for row in rows], device=device)
    decoded = SharedPrefix(network, prompts, COMPLETIONS, TOKENS, device, blocks=blocks_of(network))
    logits = decoded.first()
    found = torch.empty(tokens.shape, device=device)
    for step in range(TOKENS):
        found[:, step] = logits.float().log_softmax(-1).gather(1, tokens[:, step, None])[:, 0]
        if step + 1 < TOKENS:
            logits = decoded.next(tokens[:, step])
    return dict(zip(rows, found.tolist(), strict=True))


def gains(found: Mapping[Row, Sequence[float]], before: Mapping[Row, Sequence[float]]) -> Tensor:
    """Return, for each completion, the mean over its tokens of A (log p − log p before)."""
    return torch.stack(
        [row.advantage * (torch.tensor(p) - torch.tensor(before[row])).mean() for row, p in found.items()]
    )


@torch.no_grad()
def give(network: nn.Module, other: nn.Module) -> None:
    """Copy the adapter of `network` into `other`."""
    theirs = dict(other.named_parameters())
    for name, weight in network.named_parameters():
        if "lora_" in name:
            theirs[name].copy_(weight)


@torch.no_grad()
def lost_now(network: nn.Module) -> float:
    """Return the share of the energy of s B A that is lost because A and B are rounded before the product."""
    lost = energy = 0.0
    for _, layer in lora_layers(network):
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        whole, rounded = b @ a, b.bfloat16().float() @ a.bfloat16().float()
        lost, energy = lost + float((whole - rounded).square().sum()), energy + float(whole.square().sum())
    return lost / energy


@contextmanager
def zeroed(network: nn.Module) -> Iterator[None]:
    """Run the block without the adapter."""
    layers = [layer for _, layer in lora_layers(network)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def peft_forward(network: nn.Module) -> Iterator[None]:
    """Run the block with peft's own forward instead of this project's."""
    layers = [layer for _, layer in lora_layers(network)]
    for layer in layers:
        layer.forward = LoraLinear.forward.__get__(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


if __name__ == "__main__":
    main()
