"""Two ways to do the same work, in one process, in turn: CPU seconds of each, and the ratio of every pair."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import workload

WARM_UP = 1  # pairs


def arguments_of(program: str, text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{program}", description=(text or "").split("\n")[0])
    parser.add_argument("--size", choices=sorted(workload.SIZES), default="2.4m")
    parser.add_argument("--lengths", choices=["full", "varied"], default="varied")
    parser.add_argument("--tokens", type=int, default=64, help="the longest completion")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    return parser


def material(folder: Path) -> tuple[Any, list[list[int]]]:
    """A fresh network of the work in this folder, and its questions as prompts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    _, questions = workload.read(folder)
    messages = [[{"role": "system", "content": workload.SYSTEM}, {"role": "user", "content": question}] for question in questions]
    texts = [tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=False) for m in messages]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), [tokenizer(t)["input_ids"] for t in texts]


def lengths_of(count: int, lengths: str, longest: int) -> list[int]:
    """Target lengths of the completions: all the longest, or lognormal with a mean of 22.6 where the longest is 64; it grows in step."""
    if lengths == "full":
        return [longest] * count
    drawn = torch.empty(count).log_normal_(3.1, 0.6, generator=torch.Generator().manual_seed(1)) * (longest / 64)
    return [int(n) for n in drawn.clamp(4, longest)]


def alternate(ours: Callable[[], object], peer: Callable[[], object], pairs: int) -> list[tuple[float, float]]:
    """CPU seconds of each pair, after a warm-up."""
    found = []
    for _ in range(WARM_UP + pairs):
        times = []
        for side in (ours, peer):
            begun = time.process_time()
            side()
            times.append(time.process_time() - begun)
        found.append((times[0], times[1]))
    return found[WARM_UP:]


def report(arguments: argparse.Namespace, peer: str, pairs: list[tuple[float, float]], tokens: int, **more: Any) -> None:
    """A table, and with --json one object as the last line. more: figures beside the ratio, of both sides where they are pairs."""
    ratios = sorted(theirs / ours for ours, theirs in pairs)
    ours, theirs = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    out = sys.stderr if arguments.json else sys.stdout
    what = f"median of {len(pairs)} pairs, {arguments.size}, {arguments.lengths}, at most {arguments.tokens} tokens"
    print(f"{'':24} {'swarmd':>9} {peer:>16} {'ratio':>8}   {what}", file=out)
    print(f"{'CPU seconds':24} {ours:9.3f} {theirs:16.3f} {statistics.median(ratios):8.2f}   {ratios[0]:.2f} to {ratios[-1]:.2f}", file=out)
    print(f"{'tokens per CPU second':24} {tokens / ours:9.0f} {tokens / theirs:16.0f}", file=out)
    for name, (a, b) in more.items():
        print(f"{name.replace('_', ' '):24} {a:9.1f} {b:16.1f} {b / a:8.2f}", file=out)
    if arguments.json:
        figures: Mapping[str, Any] = {name: {"ours": a, "peer": b, "ratio": b / a} for name, (a, b) in more.items()}
        result = {"ours": ours, "peer": theirs, "ratio": statistics.median(ratios)}
        print(json.dumps({"schema": 1, "work": vars(arguments), **result, **figures}))
