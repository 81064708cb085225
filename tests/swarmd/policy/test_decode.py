"""Decoding gives exactly the model's distribution, whatever is shared, padded and left out on the way."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from swarmd.policy.attention import adopt, covers
from swarmd.policy.inference.decode import Sampling, decode, decode_rows
from swarmd.policy.models.device import seeded
from tests.swarmd.policy.conftest import chat_of, network_of, open_policy

CPU = torch.device("cpu")
QUESTIONS = ["1+1?", "a rather longer question about nothing at all", "x", "What is the capital?"]


def prompts_of(folder: Path) -> list[list[int]]:
    chat = chat_of(folder)
    return [chat.prompt(q) for q in QUESTIONS]


class Always:
    """Rows whose next token has the same logits, whatever came before."""

    compact_at = 0.98

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def first(self) -> torch.Tensor:
        return self.logits

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits

    def keep(self, rows: Sequence[int]) -> None:
        self.logits = self.logits[rows]


@pytest.mark.parametrize("vocabulary", [1, 3, 64, 200, 4097])
def test_draws_follow_the_probabilities_over_the_whole_vocabulary(vocabulary: int) -> None:
    rows, steps = 64, 600
    logits = 3 * torch.randn(vocabulary, generator=seeded(CPU, 1))
    logits[1::5] = float("-inf")
    sampling = Sampling(steps, 9999, frozenset(), 1.0)
    samples = decode_rows(Always(logits.expand(rows, -1)), [steps] * rows, sampling, seeded(CPU, 0))
    drawn = torch.tensor([s.ids for s in samples])
    assert drawn.shape == (rows, steps)
    p, seen = logits.softmax(-1), torch.bincount(drawn.flatten(), minlength=vocabulary) / drawn.numel()
    assert not seen[1::5].any()
    noise = (p * (1 - p) / drawn.numel()).sqrt()
    # No token is drawn more or less often than chance allows
    assert float(((seen - p).abs() - 5 * noise).max()) <= 4 / drawn.numel()
    expected = torch.log_softmax(logits, -1)[drawn]
    torch.testing.assert_close(torch.tensor([s.logprobs for s in samples]), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_weights_that_may_change_between_tokens_are_read_where_they_are(
    family: str, folders: dict[str, Path]
) -> None:
    prompts, sampling = prompts_of(folders[family]), Sampling(16, 128, frozenset({0}), 0.0)
    still, changed = network_of(folders[family]), network_of(folders[family])
    live, copied = (
        decode(still, prompts, 2, sampling, seeded(CPU, 0), 9999, hook) for hook in (lambda: 0, None)
    )
    for (a, *_), (b, *_) in zip(live, copied, strict=True):
        assert a.ids == b.ids and a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    passes = iter(range(99))

    def between() -> int:
        if (version := next(passes)) == 3:
            with torch.no_grad():
                for name, weight in changed.named_parameters():
                    # What a copy is made of
                    if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
                        weight.mul_(-1.5)
        return version

    before, after = (
        decode(n, prompts, 1, sampling, seeded(CPU, 0), 9999, hook)
        for n, hook in ((still, lambda: 0), (changed, between))
    )
    for (a,), (b,) in zip(before, after, strict=True):
        assert a.logprobs[:3] == pytest.approx(b.logprobs[:3], abs=1e-6)
        assert a.logprobs[3] != pytest.approx(b.logprobs[3], abs=1e-3)


def test_nothing_is_left_behind_where_answering_fails(folders: dict[str, Path]) -> None:
    policy = open_policy(folders["qwen3"], lora="on", lora_rank=4)
    network = policy._loaded.network
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(IndexError):
        decode(network, [[10_000]], 1, Sampling(24, 128, frozenset({0}), 1.0), seeded(CPU, 0), 9999)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_attention_in_chunks_is_not_ours() -> None:
    chunked = LlamaConfig(num_hidden_layers=1, layer_types=["chunked_attention"])
    assert [covers(c) for c in (LlamaConfig(), chunked)] == [True, False]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_adopted_network_still_takes_padded_batches(family: str, folders: dict[str, Path]) -> None:
    prompts = prompts_of(folders[family])
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    network = network_of(folders[family])
    position = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        expected = network(ids, **position).logits[:, -1]
        assert adopt(network)
        torch.testing.assert_close(network(ids, **position).logits[:, -1], expected)
