"""Comparisons of two sides that do the same work in turn: common options, ratios and the report."""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.round import workload

Pairs = Sequence[tuple[float, float]]  # seconds of swarmd and of the peer
LONGEST = 1024  # most tokens of a completion, so that it fits the models with the longest prompt


@dataclass(frozen=True)
class Plan:
    """The options that all comparisons have."""

    size: str = "2.4m"
    lengths: str = "varied"
    questions: str = "trials"
    tokens: int = 64
    completions: int = 8
    pairs: int = 5
    device: str = "cpu"

    def work(self) -> workload.Work:
        return workload.Work(
            self.size, self.lengths, self.questions, self.tokens, self.device, self.completions
        )


def add_options(parser: Any) -> None:
    """Add the options of a Plan, which `plan_of` reads. parser: a parser or a group of one."""
    parser.add_argument(
        "--size", choices=list(workload.SIZES), help="number of the model's parameters (2.4m)"
    )
    parser.add_argument(
        "--lengths",
        choices=["full", "varied"],
        help="lengths of completions: full is --tokens, varied a third of it on average (varied)",
    )
    parser.add_argument(
        "--questions",
        choices=workload.SETS,
        help="set of eight questions, see benchmarks/round/workload.py (trials)",
    )
    parser.add_argument("--tokens", type=tokens, help="most tokens of a completion (64)")
    parser.add_argument("--completions", type=positive, help="completions of each question (8)")
    parser.add_argument("--pairs", type=positive, help="pairs of rounds, after a warm-up (5)")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="cuda measures wall seconds in bfloat16 (cpu)"
    )


def plan_of(arguments: argparse.Namespace) -> Plan:
    given = {
        name: value
        for name in Plan.__dataclass_fields__
        if (value := getattr(arguments, name, None)) is not None
    }
    plan = Plan(**given)
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"--device cuda: this torch ({torch.__version__}) sees no CUDA device.")
    return plan


def parser_of(program: str, text: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the module's whole docstring as its help."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.round.{program}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def tokens(text: str) -> int:
    if positive(text) > LONGEST:
        raise argparse.ArgumentTypeError(
            f"at most {LONGEST}: the models read {workload.POSITIONS} tokens, the question included"
        )
    return int(text)


def result(pairs: Pairs) -> dict[str, float]:
    """Return each side's median seconds, and the median over the pairs of the ratio, peer over swarmd."""
    ours, peer = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    return {"ours": ours, "peer": peer, "ratio": statistics.median(theirs / us for us, theirs in pairs)}


def report(
    arguments: argparse.Namespace,
    plan: Plan,
    peer: str,
    pairs: Pairs,
    more: Mapping[str, tuple[float, float]] | None = None,
) -> None:
    """Print a table, and with --json one JSON object as the last line.

    more: further figures, (swarmd's, peer's) by name.
    """
    found, ratios = result(pairs), sorted(theirs / ours for ours, theirs in pairs)
    out = sys.stderr if arguments.json else sys.stdout
    clock = "CPU seconds" if plan.device == "cpu" else "wall seconds"
    what = (
        f"{plan.size}, {plan.lengths}, at most {plan.tokens} tokens, questions {plan.questions},"
        f" {plan.device}"
    )
    print(f"median of {len(pairs)} pairs; {what}", file=out)
    print(f"{'':20} {'swarmd':>10} {peer:>20} {'ratio':>7}", file=out)
    print(
        f"{clock:20} {found['ours']:10.3f} {found['peer']:20.3f} {found['ratio']:7.2f}   {ratios[0]:.2f} to"
        f" {ratios[-1]:.2f}",
        file=out,
    )
    figures = {
        name: {"ours": a, "peer": b, "ratio": b / a if a else None} for name, (a, b) in (more or {}).items()
    }
    for name, row in figures.items():
        ratio = "" if row["ratio"] is None else f"{row['ratio']:7.2f}"
        print(f"{name.replace('_', ' '):20} {row['ours']:10.2f} {row['peer']:20.2f} {ratio}", file=out)
    if arguments.json:
        print(
            json.dumps({"schema": 1, "work": work_of(arguments, plan), **found, "ratios": ratios, **figures}),
            flush=True,
        )


def work_of(arguments: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Describe the work for the last line: all options, defaults included."""
    options = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
        if name != "json"
    }
    return options | {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
