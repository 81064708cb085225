"""One update alone, beside the padded way: same model, completions, advantages and loss, one torch thread, one process.

    python -m benchmarks.update [--size 1.25m|2.4m|14m] [--lengths full|varied] [--tokens 64] [--reference every|completion]
                                [--pairs 5] [--json]

8 questions of ReasoningGYM, 8 completions each. The reference is laid out as TRL does it: prompts padded on the left, completions on the
right, a prompt for every completion, one batch. Its head computes every position, as TRL 1.16 does where there is no Triton (CPU and MPS),
or with --reference completion the completions alone. Both sides compute log-probabilities, entropy, loss, gradient, its norm and Adam.

Peak memory is what the resident set of a process of its own grows by in one update, after a small one. Linux only.
"""

import argparse
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
from benchmarks.pairs import alternate, arguments_of, lengths_of, material, report
from swarmd.policy import losses
from swarmd.policy.packing import Row
from swarmd.policy.update import Learner, Learning

CPU = torch.device("cpu")
BUDGET = 16_384
RATE = 1e-6


def main() -> None:
    parser = arguments_of("update", __doc__)
    parser.add_argument("--reference", choices=["every", "completion"], default="every")
    parser.add_argument("--peak", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)  # a child of this program
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        side, folder = arguments.peak
        steps = sides(Path(folder), arguments)
        print(peak(steps[side], arguments))
        return
    work = workload.Work(arguments.size, "full", max_new_tokens=arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        workload.make(work, Path(folder))
        steps = sides(Path(folder), arguments)
        rows = rows_of(material(Path(folder))[1], arguments)
        check(steps, rows)
        pairs = alternate(lambda: steps["ours"](rows), lambda: steps["padded"](rows), arguments.pairs)
        command = [sys.executable, "-m", "benchmarks.update", *sys.argv[1:], "--peak"]
        ours, padded = (float(subprocess.check_output([*command, side, folder], text=True)) for side in ("ours", "padded"))
    del arguments.peak
    report(arguments, f"padded, {arguments.reference}", pairs, sum(len(r.completion) for r in rows), peak_MiB=(ours, padded))


Step = Callable[[Sequence[Row]], tuple[float, float]]  # -> loss, norm of the gradient


def sides(folder: Path, arguments: argparse.Namespace) -> dict[str, Step]:
    learner = Learner(material(folder)[0], Learning(RATE, 0.2, 0.28, 1.0, 1.0, BUDGET), CPU)

    def ours(rows: Sequence[Row]) -> tuple[float, float]:
        made = learner.step(rows)
        return made.loss, made.grad_norm

    return {"ours": ours, "padded": padded(material(folder)[0], every=arguments.reference == "every")}


def padded(network: Any, every: bool) -> Step:
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def step(rows: Sequence[Row]) -> tuple[float, float]:
        before, after = max(len(r.prompt) for r in rows), max(len(r.completion) for r in rows)
        ids = [[0] * (before - len(r.prompt)) + [*r.prompt, *r.completion] + [0] * (after - len(r.completion)) for r in rows]
        mask = [[0] * (before - len(r.prompt)) + [1] * len(r) + [0] * (after - len(r.completion)) for r in rows]
        given, seen = torch.tensor(ids), torch.tensor(mask)
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        keep = {} if every else {"logits_to_keep": after + 1}
        logits = network(given, attention_mask=seen, position_ids=positions, use_cache=False, **keep).logits[:, -after - 1 : -1]
        targets, counted = given[:, before:], seen[:, before:].bool()
        logprobs = logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)
        with torch.no_grad():
            entropy(logits)
        advantages = torch.tensor([r.advantage for r in rows])[:, None].expand_as(logprobs)
        each = losses.grpo(logprobs, logprobs.detach(), advantages, 0.2, 0.28)
        loss = (each * counted).sum() / counted.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item(), float(norm)

    return step


def entropy(logits: Tensor) -> Tensor:
    """Row by row, as TRL does: the whole would be another tensor as large as the logits."""
    return torch.stack([-(row.softmax(-1) * row.log_softmax(-1)).sum(-1) for row in logits])


def rows_of(prompts: Sequence[Sequence[int]], arguments: argparse.Namespace) -> list[Row]:
    rng = random.Random(0)
    work = workload.Work(arguments.size, "full")
    lengths = lengths_of(work.questions * work.completions, arguments.lengths, arguments.tokens)
    weight = 1 / sum(lengths)
    return [
        Row(tuple(prompts[i // work.completions]), tuple(rng.randrange(3, 4000) for _ in range(n)), rng.gauss(0, 1), None, weight)
        for i, n in enumerate(lengths)
    ]


def check(steps: dict[str, Step], rows: Sequence[Row]) -> None:
    """Both sides do the same, or the comparison is void."""
    (loss, norm), (other, other_norm) = steps["ours"](rows), steps["padded"](rows)
    if abs(loss - other) > 1e-4 * max(1, abs(other)) or abs(norm - other_norm) > 1e-3 * other_norm:
        raise SystemExit(f"the sides disagree: loss {loss} and {other}, norm of the gradient {norm} and {other_norm}")


def peak(step: Step, arguments: argparse.Namespace) -> float:
    """MiB that one update adds to this process. Called once, in a process of its own."""
    small = [Row((3, 4), (5,), 1.0, None, 0.5), Row((3, 4), (6,), -1.0, None, 0.5)]
    step(small)  # Adam's moments, kernels
    rows = rows_of(material(Path(arguments.peak[1]))[1], arguments)
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far, which a child inherits (proc(5))
    step(rows)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024 - before / 2**20


if __name__ == "__main__":
    main()
