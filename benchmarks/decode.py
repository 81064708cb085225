"""Compares generation with transformers' generate.

Same model, prompts, number and lengths of completions, one torch thread, one process.

    python -m benchmarks.decode [--size 1.25m|2.4m|14m|360m] [--lengths full|varied] [--tokens 64] [--pairs 5]
        [--json]

8 questions of ReasoningGYM, 8 completions each. "varied" imposes a length on each row by the stopping rule,
the same on both sides; random numbers differ. generate gets a batch padded on the left, in which each prompt
stands once for every completion: the way it is used.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

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
from swarmd.policy.attention import adopt
from swarmd.policy.inference.decode import Sampling, decode_rows
from swarmd.policy.inference.fused_decoder import blocks_of
from swarmd.policy.inference.prefix_cache import SharedPrefix
from swarmd.policy.models.device import seeded


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("decode", __doc__)
    add_options(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="the figures as one object on the last line; the table goes to stderr",
    )
    arguments = parser.parse_args(argv)
    plan = plan_of(arguments)
    pairs = measure(plan)
    total, found = sum(lengths_of(plan)), result(pairs)
    report(
        arguments,
        plan,
        "generate",
        pairs,
        {"tokens_per_second": (total / found["ours"], total / found["peer"])},
    )


def measure(plan: Plan, warm_up: int = 1) -> Pairs:
    torch.set_num_threads(1)
    work = replace(plan.work(), lengths="full")  # our own stopping rule says when
    with tempfile.TemporaryDirectory() as folder:
        workload.make(work, Path(folder))
        network, prompts = material(Path(folder), plan)
        other, _ = material(Path(folder), plan)
    lengths, device = lengths_of(plan), torch.device(plan.device)
    return alternate(
        lambda: ours(network, prompts, plan.completions, lengths, device),
        lambda: generate(other, prompts, lengths, device),
        plan.pairs, Meter(plan.device), warm_up,
    )  # fmt: skip


@torch.inference_mode()
def ours(
    network: Any, prompts: Sequence[Sequence[int]], copies: int, lengths: Sequence[int], device: torch.device
) -> None:
    assert adopt(network)
    rows = SharedPrefix(network, prompts, copies, max(lengths), device, blocks=blocks_of(network))
    sampling = Sampling(max(lengths), workload.POSITIONS, frozenset(), 1.0)
    samples = decode_rows(rows, lengths, sampling, seeded(device, 0))
    assert [len(s.ids) for s in samples] == list(lengths)


@torch.inference_mode()
def generate(
    network: Any, prompts: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device
) -> None:
    each = [p for p in prompts for _ in range(len(lengths) // len(prompts))]
    width = max(map(len, each))
    targets = torch.tensor(lengths, device=device)

    class Enough(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return targets <= input_ids.shape[1] - width

    network.generation_config.eos_token_id = None
    out = network.generate(
        torch.tensor([[0] * (width - len(p)) + list(p) for p in each], device=device),
        attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in each], device=device),
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(lengths), pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([Enough()]),
    )  # fmt: skip
    assert out.shape[1] == width + max(lengths)


if __name__ == "__main__":
    main()
