"""Decoding gives exactly the model's distribution, whatever is shared, padded and left out on the way."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from swarmd.policy.attention.attention import NAME, adopt, covers
from swarmd.policy.inference.decode import Sample, Sampling, decode, decode_rows
from swarmd.policy.models.chat import Chat
from swarmd.policy.models.device import seeded
from tests.policy.conftest import ALL_FAMILIES, external, make_model, open_policy

CPU = torch.device("cpu")
QUESTIONS = ["1+1?", "a rather longer question about nothing at all", "x", "What is the capital?"]


def network_of(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompts_of(folder: Path) -> list[list[int]]:
    chat = Chat(AutoTokenizer.from_pretrained(folder), "")
    return [chat.prompt(q) for q in QUESTIONS]


def plain_logprobs(network, prompt: list[int], sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = network(torch.tensor([prompt + list(sample.ids)])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1)[torch.arange(len(sample.ids)), list(sample.ids)]


def run(network, prompts, copies=1, temperature=1.0, limit=24, seed=0, cache_tokens=10_000, ends=frozenset({0}), context=128):
    sampling = Sampling(limit, context, ends, temperature)
    with torch.no_grad():
        return decode(network, prompts, copies, sampling, seeded(CPU, seed), cache_tokens)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_greedy_tokens_are_those_of_generate(family: str, folders: dict[str, Path]) -> None:
    network, plain, prompts = network_of(folders[family]), network_of(folders[family]), prompts_of(folders[family])
    ours = [samples[0].ids for samples in run(network, prompts, temperature=0.0)]
    theirs = []
    for p in prompts:
        out = plain.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), do_sample=False, max_new_tokens=24, pad_token_id=0)
        theirs.append(tuple(out[0, len(p) :].tolist()))
    assert ours == theirs
    assert len(set(ours)) > 1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_logprobs_are_those_of_a_plain_forward(family: str, temperature: float, folders: dict[str, Path]) -> None:
    network, plain, prompts = network_of(folders[family]), network_of(folders[family]), prompts_of(folders[family])
    ends = frozenset(range(40))  # many, so that rows leave the batch at different steps
    answers = run(network, prompts, copies=5, temperature=temperature, ends=ends)
    lengths = {len(s.ids) for samples in answers for s in samples}
    assert len(lengths) > 4
    for prompt, samples in zip(prompts, answers, strict=True):
        for s in samples:
            torch.testing.assert_close(torch.tensor(s.logprobs), plain_logprobs(plain, prompt, s, temperature), atol=1e-5, rtol=0)
            assert s.ended == (s.ids[-1] in ends)
            assert not set(s.ids[:-1]) & ends


def test_frequencies_are_the_probabilities(folders: dict[str, Path]) -> None:
    network, prompt = network_of(folders["qwen2"]), prompts_of(folders["qwen2"])[0]
    n = 40_000
    (samples,) = run(network, [prompt], copies=n, limit=1, temperature=1.0, cache_tokens=1)
    with torch.no_grad():
        p = torch.softmax(network(torch.tensor([prompt])).logits[0, -1], -1)
    seen = torch.bincount(torch.tensor([s.ids[0] for s in samples]), minlength=len(p)) / n
    assert float((seen - p).abs().max()) < 4 * 0.5 / n**0.5
    assert float((seen - p).abs().sum()) < 0.1


class Always:
    """Rows whose next token has the same logits, whatever came before."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def first(self) -> torch.Tensor:
        return self.logits

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits

    def keep(self, rows: torch.Tensor) -> None:
        self.logits = self.logits[rows]


@pytest.mark.parametrize("vocabulary", [1, 3, 64, 200, 4097])
def test_draws_follow_the_probabilities_over_the_whole_vocabulary(vocabulary: int) -> None:
    rows, steps = 64, 600
    logits = 3 * torch.randn(vocabulary, generator=seeded(CPU, 1))
    logits[1::5] = float("-inf")
    sampling = Sampling(steps, 9999, frozenset(), 1.0)
    samples = decode_rows(Always(logits.expand(rows, -1)), torch.full((rows,), steps), sampling, seeded(CPU, 0))
    drawn = torch.tensor([s.ids for s in samples])
    assert drawn.shape == (rows, steps)
    p, seen = logits.softmax(-1), torch.bincount(drawn.flatten(), minlength=vocabulary) / drawn.numel()
    assert not seen[1::5].any()
    noise = (p * (1 - p) / drawn.numel()).sqrt()
    assert float(((seen - p).abs() - 5 * noise).max()) <= 4 / drawn.numel()  # no token is drawn more or less often than chance allows
    expected = torch.log_softmax(logits, -1)[drawn]
    torch.testing.assert_close(torch.tensor([s.logprobs for s in samples]), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_weights_that_may_change_between_tokens_are_read_where_they_are(family: str, folders: dict[str, Path]) -> None:
    prompts, sampling = prompts_of(folders[family]), Sampling(16, 128, frozenset({0}), 0.0)
    still, changed = network_of(folders[family]), network_of(folders[family])
    live, copied = (decode(still, prompts, 2, sampling, seeded(CPU, 0), 9999, hook) for hook in (lambda: 0, None))
    assert live == _close(copied)
    passes = iter(range(99))

    def between() -> int:
        if (version := next(passes)) == 3:
            with torch.no_grad():
                for name, weight in changed.named_parameters():
                    if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):  # what a copy is made of
                        weight.mul_(-1.5)
        return version

    before, after = (decode(n, prompts, 1, sampling, seeded(CPU, 0), 9999, hook) for n, hook in ((still, lambda: 0), (changed, between)))
    for (a,), (b,) in zip(before, after, strict=True):
        assert a.logprobs[:3] == pytest.approx(b.logprobs[:3], abs=1e-6)
        assert a.logprobs[3] != pytest.approx(b.logprobs[3], abs=1e-3)


def test_same_seed_same_answers_another_seed_others(folders: dict[str, Path]) -> None:
    network, prompts = network_of(folders["qwen2"]), prompts_of(folders["qwen2"])
    assert run(network, prompts, 4, seed=3) == run(network, prompts, 4, seed=3) != run(network, prompts, 4, seed=4)


def test_small_cache_budget_splits_and_keeps_the_order(folders: dict[str, Path]) -> None:
    network, prompts = network_of(folders["qwen2"]), prompts_of(folders["qwen2"])
    assert run(network, prompts, 1, temperature=0.0, cache_tokens=1) == _close(run(network, prompts, 1, temperature=0.0))


def _close(answers: list[list[Sample]]) -> object:
    class Same:
        def __eq__(self, other: object) -> bool:
            pairs = [(a, b) for x, y in zip(answers, other, strict=True) for a, b in zip(x, y, strict=True)]
            return all(a.ids == b.ids and a.logprobs == pytest.approx(b.logprobs, abs=1e-5) for a, b in pairs)

    return Same()


def test_stops_at_the_end_of_the_context(folders: dict[str, Path]) -> None:
    network, prompts = network_of(folders["qwen2"]), prompts_of(folders["qwen2"])
    context = max(map(len, prompts))  # the longest prompt fills it
    answers = run(network, prompts, 2, context=context, limit=1000, ends=frozenset({-5}))
    assert [{len(s.ids) for s in samples} for samples in answers] == [{context - len(p)} for p in prompts]
    assert answers[1] == [Sample((), (), ended=False)] * 2


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "olmo2"])
def test_bfloat16(family: str, folders: dict[str, Path]) -> None:
    policy = open_policy(folders[family], dtype="bfloat16")
    network, prompts = policy._loaded.network, prompts_of(folders[family])
    assert policy.description["dtype"] == "bfloat16"
    for prompt, samples in zip(prompts, run(network, prompts, copies=5), strict=True):
        for s in samples:
            torch.testing.assert_close(torch.tensor(s.logprobs), plain_logprobs(network, prompt, s), atol=0.25, rtol=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_merged_while_answering_and_leaves_no_trace(dtype: str, folders: dict[str, Path]) -> None:
    policy = open_policy(folders["qwen3"], lora="on", lora_rank=4, dtype=dtype, train={"learning_rate": 1e-1})
    for _ in range(2):
        policy.update([external("1+1?", [("two", True), ("7", False)], (1.0, 0.0))])
    network, prompts = policy._loaded.network, prompts_of(folders["qwen3"])
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    products = []
    hooks = [m.register_forward_hook(lambda *_: products.append(1)) for n, m in network.named_modules() if n.endswith("lora_A.default")]
    answers = run(network, prompts, copies=3)
    assert hooks
    assert not products
    tolerance = {"atol": 1e-5, "rtol": 0} if dtype == "float32" else {"atol": 0.25, "rtol": 0.05}
    for prompt, samples in zip(prompts, answers, strict=True):
        for s in samples:
            torch.testing.assert_close(torch.tensor(s.logprobs), plain_logprobs(network, prompt, s), **tolerance)
    assert products
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_an_adapter_is_taken_out_also_where_answering_fails(folders: dict[str, Path]) -> None:
    policy = open_policy(folders["qwen3"], lora="on", lora_rank=4)
    network = policy._loaded.network
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(IndexError):
        run(network, [[10_000]])
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not any(getattr(m, "merged_adapters", None) for m in network.modules())


def test_what_is_not_covered_keeps_its_own_attention(folders: dict[str, Path]) -> None:
    ours, others = network_of(folders["llama"]), network_of(folders["olmo2"])
    assert adopt(ours)
    assert adopt(ours)
    assert not adopt(others)
    assert (ours.config._attn_implementation, others.config._attn_implementation) == (NAME, "sdpa")
    stretched = LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    chunked = LlamaConfig(num_hidden_layers=1, layer_types=["chunked_attention"])
    assert [covers(c) for c in (LlamaConfig(), stretched, chunked)] == [True, False, False]


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


def test_every_end_of_the_models_settings_ends_an_answer(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen2")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(250))}))
    (answer,) = open_policy(folder).generate(["1+1?"], 16)
    assert all(len(ids) <= 4 for ids in answer.tokens.ids)
    assert all(c.ended for c in answer.completions)
