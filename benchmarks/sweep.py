"""Answering and the update, each beside its reference, over completion lengths and model sizes.

    python -m benchmarks.sweep [--sizes 1.25m 2.4m 14m] [--tokens 16 32 64 128 256 512]
        [--lengths full|varied] [--questions trials|sapo-9] [--pairs 2] [--seconds 3600] [--plot FILE]
        [--device cpu|cuda] [--json]

Each cell is what `benchmarks.decode` and `benchmarks.update` measure. Cheap cells come first; once --seconds
have passed no further one begins. A reference update that would take more than half of the free memory is
left out. Both show as "-".
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import decode, update, workload
from benchmarks.pairs import Plan, material, parser_of, positive, result, tokens

# Size, tokens, and under "decode" and "update" ours, peer, ratio; None where it was not measured
Cell = dict[str, Any]
KINDS = ("decode", "update")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = options(argv)
    out = sys.stderr if arguments.json else sys.stdout
    begun, cells = time.monotonic(), []
    plans = [
        Plan(
            size,
            arguments.lengths,
            arguments.questions,
            length,
            pairs=arguments.pairs,
            device=arguments.device,
        )
        for size in arguments.sizes
        for length in arguments.tokens
    ]
    for plan in sorted(plans, key=cost):
        cell: Cell = {"size": plan.size, "tokens": plan.tokens, "decode": None, "update": None}
        if time.monotonic() - begun < arguments.seconds:
            cell = measure(plan)
        cells.append(cell)
        print(line(cell), file=out, flush=True)
    table(cells, arguments, out)
    if arguments.plot:
        plot(cells, arguments)
    if arguments.json:
        work = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if name != "json"
        }
        print(json.dumps({"schema": 1, "work": work, "cells": cells}), flush=True)


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("sweep", __doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(workload.SIZES), default=["1.25m", "2.4m", "14m"])
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=tokens,
        default=[16, 32, 64, 128, 256, 512],
        help="the longest completion of each cell",
    )
    parser.add_argument("--lengths", choices=["full", "varied"], default="varied")
    parser.add_argument("--questions", choices=workload.SETS, default="trials")
    parser.add_argument("--pairs", type=positive, default=2)
    parser.add_argument(
        "--seconds", type=positive, default=3600, help="wall seconds after which no cell begins (3600)"
    )
    parser.add_argument(
        "--plot", type=Path, help="write a figure here (needs matplotlib: pip install 'swarmd[research]')"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--json",
        action="store_true",
        help="the figures as one object on the last line; the table goes to stderr",
    )
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"this torch ({torch.__version__}) sees no CUDA device")
    return arguments


def cost(plan: Plan) -> float:
    """Estimate a cell's work, to order the cells."""
    shape = workload.SIZES[plan.size]
    return shape["hidden_size"] ** 2 * shape["num_hidden_layers"] * (256 + plan.tokens)


def measure(plan: Plan) -> Cell:
    cell: Cell = {"size": plan.size, "tokens": plan.tokens, "decode": None, "update": None}
    # A warm-up of a large cell costs as much as a pair and changes nothing that can be seen.
    cell["decode"] = result(decode.measure(plan, warm_up=1 if plan.tokens <= 64 else 0))
    with tempfile.TemporaryDirectory() as folder:
        workload.make(plan.work(), Path(folder))
        if padded_bytes(plan, Path(folder)) < free(plan.device) / 2:
            cell["update"] = result(update.measure(plan, Path(folder)))
    return cell


def padded_bytes(plan: Plan, folder: Path) -> int:
    """Return the bytes that a padded update keeps for its backward pass.

    They are activations, and three times the logits (fitted to what was measured at 2.4m).
    """
    shape, longest = workload.SIZES[plan.size], max(map(len, material(folder, plan)[1]))
    positions = workload.COUNT * plan.completions * (longest + plan.tokens)
    activations = shape["num_hidden_layers"] * (16 * shape["hidden_size"] + 4 * shape["intermediate_size"])
    return positions * (activations + 3 * workload.VOCABULARY) * plan.dtype.itemsize


def free(device: str) -> int:
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else int(psutil.virtual_memory().available)


def line(cell: Cell) -> str:
    return f"{cell['size']:>6} {cell['tokens']:>4} tokens   " + "   ".join(
        f"{kind} {_ratio(cell, kind)}" for kind in KINDS
    )


def table(cells: Sequence[Cell], arguments: argparse.Namespace, out: Any) -> None:
    found = {(cell["size"], cell["tokens"]): cell for cell in cells}
    print(
        f"\nreference / swarmd in seconds; median of {arguments.pairs} pairs, {arguments.lengths}", file=out
    )
    for kind in KINDS:
        print(
            f"{kind:10}" + "".join(f"{length:>8}" for length in arguments.tokens) + "   tokens at most",
            file=out,
        )
        for size in arguments.sizes:
            print(
                f"{size:10}"
                + "".join(f"{_ratio(found[size, length], kind):>8}" for length in arguments.tokens),
                file=out,
            )


def plot(cells: Sequence[Cell], arguments: argparse.Namespace) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit(
            "--plot needs matplotlib: pip install 'swarmd[research]'. The table above is complete."
        ) from None
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), KINDS, strict=True):
        for size in arguments.sizes:
            points = sorted((c["tokens"], c[kind]["ratio"]) for c in cells if c["size"] == size and c[kind])
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=size)
        axes.set(
            title={"decode": "answering", "update": "update"}[kind],
            xlabel="longest completion, tokens",
            xscale="log",
        )
        axes.set_xticks(arguments.tokens, [str(length) for length in arguments.tokens])
        if axes.lines:
            axes.legend(frameon=False)
    figure.axes[0].set_ylabel(f"times the reference's speed ({arguments.lengths})")
    figure.axes[0].set_ylim(bottom=0)
    figure.savefig(arguments.plot, dpi=120)


def _ratio(cell: Cell, kind: str) -> str:
    return f"{cell[kind]['ratio']:.1f}" if cell[kind] else "-"


if __name__ == "__main__":
    main()
