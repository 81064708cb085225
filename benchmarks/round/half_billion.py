"""Plays a round of a model with random weights and a published model's exact configuration.

The default is Qwen2.5-0.5B's configuration. Prints the seconds, and the peak memory against the memory plan.

    python -m benchmarks.round.half_billion [--model qwen2.5-0.5b|qwen2.5-1.5b|qwen3.5-0.8b|smollm2-135m|
                                                qwen3.5-79m|gemma3-113m]
                                      [--lora on|off] [--device cpu|cuda] [--dtype auto|float32|bfloat16|nf4]
                                      [--questions 8] [--completions 8] [--tokens 64] [--micro-batch 0]
                                      [--memory 12] [--optimizer adamw|adamw8bit] [--threads 1]
                                      [--rounds 1] [--json]

The questions are from SAPO's nine specialties, all completions have full length, and rewards are made up so
that every completion has a gradient. A round makes one update, and a second one only to measure the peak,
because Adam's moments exist only after the first. Model, plan, answers and update are the node's own code.
--rounds is the number of rounds; only the last round's seconds count, because the first rounds on a GPU
include one-time work. --memory is the number of GB that the plan may use. --micro-batch is a number of
tokens; the work should fill a micro-batch, so that the plan's peak with its workspace can be compared with
the memory used beyond the imports.

The model is made in a temporary folder; nothing is downloaded. Its tokenizer is a small one of this project:
token ids above the tokenizer's vocabulary are sampled and trained on like all ids, but have no text. On a
CPU, seconds are CPU seconds of all threads, and the peak is the largest resident set of the whole process,
loading included. On CUDA, seconds are wall seconds, and the peak counts torch's memory on the device.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.round import workload
from benchmarks.round.meter import Meter
from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.memory_plan import WORKSPACE_BYTES
from swarmd.types import Rollout, Scored, TaskRef
from testbed.model_configurations import CONFIGURATIONS


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.round.half_billion", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", choices=CONFIGURATIONS, default="qwen2.5-0.5b")
    parser.add_argument("--lora", choices=["on", "off"], default="on")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "nf4"],
        default="auto",
        help="auto: the type that a node would choose",
    )
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--completions", type=int, default=8, help="completions of each question")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each completion")
    parser.add_argument(
        "--micro-batch", type=int, default=0, help="tokens of a micro-batch; 0: the plan decides"
    )
    parser.add_argument("--memory", type=float, default=12.0, help="GB that the plan may use")
    parser.add_argument("--optimizer", choices=["adamw", "adamw8bit"], default="adamw")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; 0: as many as a node uses")
    parser.add_argument(
        "--rounds", type=int, default=1, help="rounds to play; only the last one's seconds count"
    )
    parser.add_argument("--json", action="store_true")
    # A child of this program makes the model, so that this process's figures do not include it.
    parser.add_argument("--make", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.make:
        make(Path(arguments.make), arguments.model)
        return
    with tempfile.TemporaryDirectory() as folder:
        making = ["-m", "benchmarks.round.half_billion", "--model", arguments.model, "--make", folder]
        subprocess.run([sys.executable, *making], check=True)
        figures = play(Path(folder), arguments)
    del arguments.make
    show(figures, arguments)


def make(folder: Path, model: str) -> None:
    """Make the model in bfloat16, the type of published weights."""
    tokenizer = workload._tokenizer([workload.SYSTEM, *workload.draw("sapo-9", 500, 7)])
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(workload.END)
    torch.manual_seed(0)
    ends = {"eos_token_id": end, "pad_token_id": end, "bos_token_id": None}
    config = AutoConfig.for_model(**CONFIGURATIONS[model], **ends)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def play(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Play one round."""
    config = NodeConfig.model_validate(
        {
            "model": {
                "name": str(folder),
                "device": arguments.device,
                "lora": arguments.lora,
                "system_prompt": workload.SYSTEM,
                "threads": arguments.threads,
                "dtype": arguments.dtype,
            },
            "round": {"local": arguments.questions, "completions": arguments.completions},
            "generate": {"max_new_tokens": arguments.tokens, "engine": "own"},
            "train": {"optimizer": arguments.optimizer, "micro_batch_tokens": arguments.micro_batch},
        }
    )
    meter = Meter(arguments.device)
    # Drawn before memory is measured, because the draw imports ReasoningGYM.
    questions = workload.draw("sapo-9", arguments.questions, 0)
    begun, imported = meter.begin(), meter.peak_mib()
    policy = LanguagePolicy.open(config, 0, free=lambda _: int(arguments.memory * 1e9))
    rewards = tuple(float(i % 2) for i in range(arguments.completions))
    me, opened, after_answers = PeerId("me"), meter.now(), 0.0
    for n in range(arguments.rounds):
        loaded, began = meter.now(), time.perf_counter()
        answers = policy.generate(questions, arguments.completions)
        answered = meter.now()
        if n == 0:
            after_answers = meter.peak_mib()
        batch = [
            Scored(
                Rollout(TaskRef("made-up", i), answer.completions, me), question, rewards, 1, answer.tokens
            )
            for i, (question, answer) in enumerate(zip(questions, answers, strict=True))
        ]
        report = policy.update(batch)
        trained, wall = meter.now(), time.perf_counter() - began
    # Adam's moments exist after the first step, so the second update takes the most memory.
    policy.update(batch)
    plan = policy._loaded.plan
    return {
        "parameters": policy.description.parameters,
        "dtype": plan.dtype,
        "lora": plan.lora_rank,
        "optimizer": plan.optimizer,
        "checkpointing": plan.checkpointing,
        "micro_batch_tokens": plan.micro_batch_tokens,
        "kl": report.kl,
        "planned_GB": (plan.peak + WORKSPACE_BYTES) / 1e9,
        "taken_GB": (meter.peak_mib() - imported) * 2**20 / 1e9,
        "tokens": sum(len(ids) for answer in answers for ids in answer.tokens.ids),
        "trained": report.tokens,
        "seconds": {"load": opened - begun, "generate": answered - loaded, "train": trained - answered},
        "wall": wall,
        "threads": torch.get_num_threads(),
        "peak_GB": {"generate": after_answers * 2**20 / 1e9, "all": meter.peak_mib() * 2**20 / 1e9},
    }


def show(figures: dict[str, Any], arguments: argparse.Namespace) -> None:
    out = sys.stderr if arguments.json else sys.stdout
    seconds, peak = figures["seconds"], figures["peak_GB"]
    way = f"LoRA of rank {figures['lora']}" if figures["lora"] else "all weights"
    print(
        f"{figures['parameters']:,} parameters, {figures['dtype']}, {way}, {figures['optimizer']}, on"
        f" {arguments.device}",
        file=out,
    )
    print(
        f"{arguments.questions} questions × {arguments.completions} completions × {arguments.tokens} tokens",
        file=out,
    )
    for name, value in seconds.items():
        print(f"  {name:10} {value:9.1f} s", file=out)
    print(
        f"  {figures['threads']} threads; answers and update took {figures['wall']:.1f} s of wall time",
        file=out,
    )
    made, trained = figures["tokens"] / seconds["generate"], figures["trained"] / seconds["train"]
    print(f"  {made:.1f} tokens a second made, {trained:.1f} trained", file=out)
    planned, taken = figures["planned_GB"], figures["taken_GB"]
    print(
        f"  peak {peak['all']:.2f} GB ({peak['generate']:.2f} until the answers were there); {taken:.2f} GB"
        f" beyond the imports, planned {planned:.2f} GB, {planned / taken - 1:+.0%}",
        file=out,
    )
    if arguments.json:
        ours = seconds["generate"] + seconds["train"]
        print(
            json.dumps(
                {"schema": 1, "work": vars(arguments), "ours": ours, "peer": None, "ratio": None, **figures}
            )
        )


if __name__ == "__main__":
    main()
