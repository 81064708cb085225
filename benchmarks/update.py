"""Compares one update with the padded reference: same model, completions, advantages and loss.

One torch thread, one process.

    python -m benchmarks.update [--size 1.25m|2.4m|14m|360m] [--lengths full|varied] [--tokens 64]
        [--reference every|completion] [--pairs 5] [--json]

8 questions of ReasoningGYM, 8 completions each. The reference is laid out as TRL does it: prompts padded on
the left, completions on the right, a prompt for every completion, one batch. Its head computes every
position, as TRL 1.16 does where there is no Triton (CPU and MPS), or with --reference completion the
completions alone. Both sides compute log-probabilities, entropy, loss, gradient, its norm and Adam.

Peak memory is what the resident set of a process of its own grows by in one update, after a small one (Linux
only); on CUDA, the most that torch holds there.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks import workload
from benchmarks.meter import Meter
from benchmarks.pairs import (
    Pairs,
    Plan,
    add_options,
    alternate,
    lengths_of,
    material,
    parser_of,
    plan_of,
    report,
    result,
)
from swarmd.config.config import TrainConfig
from swarmd.policy.training import losses
from swarmd.policy.training.learner import Learner, Learning
from swarmd.policy.training.packing import Row

BUDGET = 16_384
RATE = 1e-6
ROOT = Path(__file__).parents[1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("update", __doc__)
    add_options(parser)
    parser.add_argument(
        "--reference",
        choices=["every", "completion"],
        default="every",
        help="positions whose logits the reference computes (every)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="the figures as one object on the last line; the table goes to stderr",
    )
    # A child of this program
    parser.add_argument("--peak", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    plan, every = plan_of(arguments), arguments.reference == "every"
    if arguments.peak:
        side, folder = arguments.peak
        print(peak(side, Path(folder), plan, every))
        return
    del arguments.peak
    with tempfile.TemporaryDirectory() as folder:
        workload.make(plan.work(), Path(folder))
        pairs = measure(plan, Path(folder), every)
        command = [
            sys.executable,
            "-m",
            "benchmarks.update",
            *(sys.argv[1:] if argv is None else argv),
            "--peak",
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ours, padded = (
            float(subprocess.check_output([*command, side, folder], text=True, cwd=ROOT, env=environment))
            for side in ("ours", "padded")
        )
    total, found = sum(lengths_of(plan)), result(pairs)
    more = {"tokens_per_second": (total / found["ours"], total / found["peer"]), "peak_MiB": (ours, padded)}
    report(arguments, plan, f"padded, {arguments.reference}", pairs, more)


def measure(plan: Plan, folder: Path, every: bool = True) -> Pairs:
    """Measure both sides. folder: the work, made."""
    torch.set_num_threads(1)
    ours, reference = side_of("ours", folder, plan, every), side_of("padded", folder, plan, every)
    rows = rows_of(material(folder, plan)[1], plan)
    check(ours, reference, rows, plan)  # and the warm-up
    return alternate(lambda: ours(rows), lambda: reference(rows), plan.pairs, Meter(plan.device), warm_up=0)


Step = Callable[[Sequence[Row]], tuple[float, float]]  # -> loss, norm of the gradient


def side_of(name: str, folder: Path, plan: Plan, every: bool) -> Step:
    network = material(folder, plan)[0]
    if name == "padded":
        return padded(network, every)
    train = TrainConfig(learning_rate=RATE, kl_every=0)
    learner = Learner(network, Learning(train, 1.0, BUDGET), torch.device(plan.device))

    def ours(rows: Sequence[Row]) -> tuple[float, float]:
        made = learner.step(rows)
        return made.loss, made.grad_norm

    return ours


def padded(network: Any, every: bool) -> Step:
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    device = network.device

    def step(rows: Sequence[Row]) -> tuple[float, float]:
        before, after = max(len(r.prompt) for r in rows), max(len(r.completion) for r in rows)
        ids = [
            [0] * (before - len(r.prompt)) + [*r.prompt, *r.completion] + [0] * (after - len(r.completion))
            for r in rows
        ]
        mask = [
            [0] * (before - len(r.prompt)) + [1] * len(r) + [0] * (after - len(r.completion)) for r in rows
        ]
        given, seen = torch.tensor(ids, device=device), torch.tensor(mask, device=device)
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        keep = {} if every else {"logits_to_keep": after + 1}
        logits = network(given, attention_mask=seen, position_ids=positions, use_cache=False, **keep).logits[
            :, -after - 1 : -1
        ]
        targets, counted = given[:, before:], seen[:, before:].bool()
        logprobs = logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)
        with torch.no_grad():
            entropy(logits)
        advantages = torch.tensor([r.advantage for r in rows], device=device)[:, None].expand_as(logprobs)
        each = losses.surrogate(logprobs, logprobs.detach(), advantages, 0.2, 0.28)
        loss = (each * counted).sum() / counted.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item(), float(norm)

    return step


def entropy(logits: Tensor) -> Tensor:
    """Compute the entropy row by row, as TRL does, to spare a second tensor as large as the logits."""
    return torch.stack([-(row.softmax(-1) * row.log_softmax(-1)).sum(-1) for row in logits])


def rows_of(prompts: Sequence[Sequence[int]], plan: Plan) -> list[Row]:
    rng, copies, lengths = random.Random(0), plan.completions, lengths_of(plan)
    weight = 1 / sum(lengths)
    return [
        Row(
            tuple(prompts[i // copies]),
            tuple(rng.randrange(3, 4000) for _ in range(n)),
            rng.gauss(0, 1),
            None,
            weight,
        )
        for i, n in enumerate(lengths)
    ]


def check(ours: Step, reference: Step, rows: Sequence[Row], plan: Plan) -> None:
    """Check that both sides do the same, or the comparison is void."""
    (loss, norm), (other, other_norm) = ours(rows), reference(rows)
    digits = 1.0 if plan.dtype == torch.float32 else 100.0  # bfloat16 has fewer
    if (
        abs(loss - other) > 1e-4 * digits * max(1, abs(other))
        or abs(norm - other_norm) > 1e-3 * digits * other_norm
    ):
        raise SystemExit(
            f"The sides disagree: loss {loss} and {other}, norm of the gradient {norm} and {other_norm}."
        )


def peak(side: str, folder: Path, plan: Plan, every: bool) -> float:
    """Return the MiB that one update adds to this process. Called once, in a process of its own."""
    torch.set_num_threads(1)
    step = side_of(side, folder, plan, every)
    step([Row((3, 4), (5,), 1.0, None, 0.5), Row((3, 4), (6,), -1.0, None, 0.5)])  # Adam's moments, kernels
    rows = rows_of(material(folder, plan)[1], plan)
    if plan.device == "cuda":
        meter = Meter(plan.device)
        meter.begin()
        step(rows)
        return meter.peak_mib()
    before = psutil.Process().memory_info().rss
    # Forget the highest so far, which a child inherits (proc(5))
    Path("/proc/self/clear_refs").write_text("5")
    step(rows)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024 - float(before) / 2**20


if __name__ == "__main__":
    main()
