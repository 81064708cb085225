"""Answering alone, beside transformers' generate: same model, prompts, number and lengths of completions, one torch thread, one process.

    python -m benchmarks.decode [--size 1.25m|2.4m|14m] [--lengths full|varied] [--tokens 64] [--pairs 5] [--json]

8 questions of ReasoningGYM, 8 completions each. "varied" imposes a length on each row by the stopping rule, the same on both sides; random
numbers differ. generate gets a batch padded on the left, in which each prompt stands once for every completion: the way it is used.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from benchmarks import workload
from benchmarks.pairs import alternate, arguments_of, lengths_of, material, report
from swarmd.policy.attention import adopt
from swarmd.policy.decode import Sampling, decode_rows
from swarmd.policy.device import seeded
from swarmd.policy.prefix import SharedPrefix

CPU = torch.device("cpu")


def main() -> None:
    arguments = arguments_of("decode", __doc__).parse_args()
    torch.set_num_threads(1)
    work = workload.Work(arguments.size, "full", max_new_tokens=arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        workload.make(work, Path(folder))
        network, prompts = material(Path(folder))
        other, _ = material(Path(folder))
    lengths = lengths_of(work.questions * work.completions, arguments.lengths, arguments.tokens)
    pairs = alternate(lambda: ours(network, prompts, work.completions, lengths), lambda: generate(other, prompts, lengths), arguments.pairs)
    report(arguments, "generate", pairs, sum(lengths))


@torch.inference_mode()
def ours(network: Any, prompts: Sequence[Sequence[int]], copies: int, lengths: Sequence[int]) -> None:
    assert adopt(network)
    rows = SharedPrefix(network, prompts, copies, max(lengths), CPU)
    sampling = Sampling(max(lengths), 2048, frozenset(), 1.0)
    samples = decode_rows(rows, torch.tensor(lengths), sampling, seeded(CPU, 0))
    assert [len(s.ids) for s in samples] == list(lengths)


@torch.inference_mode()
def generate(network: Any, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
    each = [p for p in prompts for _ in range(len(lengths) // len(prompts))]
    width = max(map(len, each))
    targets = torch.tensor(lengths)

    class Enough(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return targets <= input_ids.shape[1] - width

    network.generation_config.eos_token_id = None
    out = network.generate(
        torch.tensor([[0] * (width - len(p)) + list(p) for p in each]),
        attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in each]),
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(lengths), pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([Enough()]),
    )  # fmt: skip
    assert out.shape[1] == width + max(lengths)


if __name__ == "__main__":
    main()
