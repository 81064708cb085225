"""Measures a real model: a round against TRL, answers against llama.cpp, the memory plan against the peak.

    python -m benchmarks.round.real --model FOLDER [--gguf FILE] [--questions 4] [--completions 8]
        [--tokens 64] [--dtype bfloat16|float32] [--pairs 3] [--skip trl|llama …] [--json]

FOLDER holds the model as transformers reads it, FILE the same model for llama.cpp. Each side is a separate
process with one torch thread. The sides play in turn; the first round of each does not count. Times are CPU
seconds; a ratio is the median over the pairs.

    round       --questions × --completions completions of at most --tokens tokens, and one update of a LoRA
                adapter of rank 16 on all of them. TRL trains question by question, without checkpointing.
    answering   tokens a CPU second, for --questions questions, then for twice as many. Both sides write all
                --tokens of each answer. llama.cpp has a slot for each row, and gets the same token ids.
    memory      the largest resident set of swarmd, divided by the sum of the imports and the plan.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.round import workload
from benchmarks.round.compare import WARM_UP, Side
from benchmarks.round.pairs import parser_of, positive
from testbed.environments import default_environment, environment_of


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("real", __doc__)
    parser.add_argument(
        "--model", type=Path, required=True, help="the model's folder, with safetensors weights"
    )
    parser.add_argument(
        "--gguf", type=Path, help="the same model for llama.cpp; without it llama.cpp is left out"
    )
    parser.add_argument("--questions", type=positive, default=4)
    parser.add_argument("--completions", type=positive, default=8, help="completions of each question")
    parser.add_argument("--tokens", type=positive, default=64, help="most tokens of each completion")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--pairs", type=positive, default=3)
    parser.add_argument("--skip", nargs="*", choices=["trl", "llama"], default=[])
    parser.add_argument(
        "--json", action="store_true", help="print the figures as a JSON object on the last line"
    )
    arguments = parser.parse_args(argv)
    out = sys.stderr if arguments.json else sys.stdout
    figures: dict[str, Any] = {}

    def note(name: str, found: dict[str, Any]) -> None:
        figures[name] = found
        print(f"{name}: {json.dumps(found)}", file=out, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        for times in (1, 2) if arguments.gguf and "llama" not in arguments.skip else ():
            rows = times * arguments.questions * arguments.completions
            note(f"answering {rows} rows", answer(arguments, Path(scratch), times))
        if "trl" not in arguments.skip:
            note("round", play_round(arguments, Path(scratch)))
    if arguments.json:
        work = {name: str(value) for name, value in vars(arguments).items() if name != "json"}
        print(json.dumps({"schema": 1, "work": work, **figures}), flush=True)


def play_round(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    rounds = alternate(arguments, scratch, 1, "trl")
    last, peer = rounds[-1]
    found = compared([(ours["seconds"], theirs["seconds"]) for ours, theirs in rounds])
    return found | {
        "generate": [statistics.median(pair[side]["generate"] for pair in rounds) for side in (0, 1)],
        "tokens": [last["tokens"], peer["tokens"]],
        "peak_MiB": [last["peak_mib"], peer["peak_mib"]],
        "planned_MiB": last["planned_mib"],
        "plan_over_peak": last["planned_mib"] / last["peak_mib"] - 1,
    }


def answer(arguments: argparse.Namespace, scratch: Path, times: int) -> dict[str, Any]:
    """Compare the speeds; the ratio is swarmd's tokens a CPU second over llama.cpp's."""
    rounds = alternate(arguments, scratch, times, "llama", "--answer")
    found = compared(
        [(ours["generate"] / ours["tokens"], theirs["seconds"] / theirs["tokens"]) for ours, theirs in rounds]
    )
    return found | {name: 1 / found[name] for name in ("ours", "peer")}


def compared(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    ours, peer = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratios = sorted(theirs / us for us, theirs in pairs)
    return {"ours": ours, "peer": peer, "ratio": statistics.median(ratios), "ratios": ratios}


def alternate(
    arguments: argparse.Namespace, scratch: Path, times: int, peer: str, *more: str
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Play swarmd and a peer in turn; return each pair's figures. times: multiplies --questions."""
    folder, python = scratch / f"{peer}{times}", environment_of(peer, default_environment(peer))
    work = workload.Work(
        "", "varied", max_new_tokens=arguments.tokens, completions=arguments.completions,
        lora=True, dtype=arguments.dtype,
    )  # fmt: skip
    workload.lay(work, folder, arguments.model, times * arguments.questions)
    theirs = {
        "trl": ["benchmarks/peers/trl.py", str(folder)],
        "llama": ["benchmarks/peers/llama_cpp.py", str(folder), str(arguments.gguf)],
    }[peer]
    sides: list[Side] = []
    try:
        command = [sys.executable, "-m", "benchmarks.peers.ours", str(folder), *more]
        sides.append(Side("swarmd", command, scratch, "cpu"))
        sides.append(Side(peer, [str(python), *theirs], scratch, "cpu"))
        rounds = [(sides[0].play(), sides[1].play()) for _ in range(WARM_UP + arguments.pairs)]
    finally:
        for side in sides:
            side.close()
    return rounds[WARM_UP:]


if __name__ == "__main__":
    main()
