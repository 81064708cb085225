"""Each engine samples from the model's distribution with the latest weights, or gives a clear error."""

import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import LlamaConfig

from swarmd.config.config import GenerateConfig, ReplayConfig, TrainConfig
from swarmd.errors import NoModel
from swarmd.policy.attention import covers
from swarmd.policy.inference import prefix_cache
from swarmd.policy.inference.decode import Sample, Sampling, decode, decode_rows, groups
from swarmd.policy.inference.engine import (
    GROUP,
    EngineFailed,
    EngineOptions,
    NoEngine,
    checked,
    draw_seed,
    open_plugin,
)
from swarmd.policy.inference.engine_driver import EngineDriver, NetworkWeights
from swarmd.policy.inference.own_engine import OwnEngine
from swarmd.policy.inference.select import importance_cap, open_engine
from swarmd.policy.models.device import seeded
from swarmd.policy.models.load import load_model
from swarmd.policy.models.lora import lora_layers
from tests.swarmd.policy.conftest import (
    ALL_FAMILIES,
    config_of,
    external,
    make_model,
    network_of,
    open_policy,
    plain_logprobs,
)

CPU = torch.device("cpu")
PROMPTS = [[20, 30, 40, 50] * 4, [60, 70], [80, 90, 100] * 9, [110]]
MANY = 100_000  # cached tokens
ASKED = EngineOptions(Path("/nowhere"), "cpu", "float32", None, 128)


def sampling(
    temperature: float = 1.0, limit: int = 20, ends: frozenset[int] = frozenset({0}), context: int = 128
) -> Sampling:
    return Sampling(limit, context, ends, temperature)


def moved(folder: Path, **changes: Any) -> Any:
    """Return a policy after some updates."""
    policy = open_policy(folder, train={"learning_rate": 0.05}, **changes)
    for _ in range(3):
        policy.update([external("1+1?", [("two", True), ("7", False)], (1.0, 0.0))])
    return policy


# The contract of the built-in engine, on the trainer's network.


def exact(family: str = "") -> dict[str, float]:
    """Return the tolerance; a delta rule rounds differently if it is computed by tokens or by chunks."""
    return {"atol": 1e-5 if family != "qwen3_5" else 1e-4, "rtol": 0}


def check_logprobs(
    network: Any, answers: list[list[Sample]], temperature: float = 1.0, **tolerance: float
) -> None:
    """Check the answers' log-probabilities against a plain forward pass."""
    for prompt, samples in zip(PROMPTS, answers, strict=True):
        for s in samples:
            torch.testing.assert_close(
                torch.tensor(s.logprobs), plain_logprobs(network, prompt, s.ids, temperature), **tolerance
            )


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_greedy_tokens_equal_the_tokens_of_transformers_generate(
    family: str, folders: dict[str, Path]
) -> None:
    network, plain = network_of(folders[family]), network_of(folders[family])
    answers = OwnEngine(network, MANY).generate(PROMPTS, 2, sampling(0.0), seeded(CPU, 0))
    for prompt, samples in zip(PROMPTS, answers, strict=True):
        asked = {
            "attention_mask": torch.ones(1, len(prompt)),
            "do_sample": False,
            "max_new_tokens": 20,
            "pad_token_id": 0,
        }
        out = plain.generate(torch.tensor([prompt]), **asked)
        assert [s.ids for s in samples] == [tuple(out[0, len(prompt) :].tolist())] * 2
    assert len({samples[0].ids for samples in answers}) > 1
    check_logprobs(plain, answers, **exact(family))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_logprobs_equal_a_plain_forward_pass(
    family: str, temperature: float, folders: dict[str, Path]
) -> None:
    ends = frozenset(range(40))  # many end tokens, so that rows end at different steps
    answers = OwnEngine(network_of(folders[family]), MANY).generate(
        PROMPTS, 5, sampling(temperature, ends=ends), seeded(CPU, 3)
    )
    assert [len(samples) for samples in answers] == [5] * 4
    assert (
        len({len(s.ids) for samples in answers for s in samples}) > 3 and len({s.ids for s in answers[0]}) > 1
    )
    check_logprobs(network_of(folders[family]), answers, temperature, **exact(family))
    for s in (s for samples in answers for s in samples):
        assert s.ended == (s.ids[-1] in ends) and not set(s.ids[:-1]) & ends
        assert s.ended or len(s.ids) == 20


def test_a_full_context_ends_answers_and_little_memory_does_not_change_them(folders: dict[str, Path]) -> None:
    network, longest = network_of(folders["qwen2"]), max(map(len, PROMPTS))
    asked = sampling(0.0, limit=1000, ends=frozenset({-5}), context=longest)
    roomy, small = (
        OwnEngine(network, tokens).generate(PROMPTS, 2, asked, seeded(CPU, 0)) for tokens in (MANY, 1)
    )
    assert [[s.ids for s in samples] for samples in roomy] == [[s.ids for s in samples] for samples in small]
    assert [{len(s.ids) for s in samples} for samples in small] == [{longest - len(p)} for p in PROMPTS]
    assert small[2] == [Sample((), (), ended=False)] * 2
    check_logprobs(network_of(folders["qwen2"]), small, **exact())
    uneven = [[7] * 90, [8]]
    roomy, small = (
        OwnEngine(network, tokens).generate(uneven, 2, sampling(0.0, limit=30), seeded(CPU, 0))
        for tokens in (MANY, 1)
    )
    assert [[s.ids for s in samples] for samples in roomy] == [[s.ids for s in samples] for samples in small]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", "float32"),
        ("qwen3", "bfloat16"),
        ("qwen3_5", "float32"),  # has recurrent layers
    ],
)
def test_an_adapter_is_applied_in_answers_without_changing_any_weight(
    family: str, dtype: str, folders: dict[str, Path]
) -> None:
    network = moved(folders[family], lora="on", lora_rank=4, dtype=dtype).network
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    answers = OwnEngine(network, MANY).generate(PROMPTS, 3, sampling(), seeded(CPU, 0))
    check_logprobs(
        network, answers, **(exact(family) if dtype == "float32" else {"atol": 0.25, "rtol": 0.05})
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize(
    ("family", "lora"), [("qwen2", "off"), ("qwen2", "on"), ("qwen3", "on"), ("qwen3_5", "off")]
)
def test_many_prompts_are_computed_in_blocks(
    family: str, lora: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "PREFILL_TOKENS", 20)
    network = moved(folders[family], lora=lora, lora_rank=4).network
    for name, weight in network.named_parameters():
        if name.endswith("bias"):  # otherwise zero with an adapter
            weight.data.copy_(torch.linspace(-1, 1, len(weight)))
    answers = OwnEngine(network, MANY).generate(PROMPTS, 3, sampling(), seeded(CPU, 0))
    check_logprobs(network, answers, **exact(family))


def test_a_model_that_overflows_float16_is_rejected_at_its_first_answer(tmp_path: Path) -> None:
    """Otherwise all its answers would be equal, and there would never be an update that fails."""
    folder = make_model(tmp_path)
    network = network_of(folder)
    network.model.layers[0].mlp.down_proj.weight.data.fill_(6e4)
    network.save_pretrained(folder)
    assert open_policy(folder).generate(["1+1?"], 2)
    with pytest.raises(NoModel, match=r"are NaN in float16\. Set model\.dtype to 'float32'"):
        open_policy(folder, dtype="float16", lora="on").generate(["1+1?"], 2)


def test_answers_depend_only_on_the_given_generator(folders: dict[str, Path]) -> None:
    asked = OwnEngine(network_of(folders["llama"]), MANY)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, second, untouched = (seeded(CPU, 5) for _ in range(3))
    answers = asked.generate(PROMPTS, 3, sampling(), first)
    assert torch.equal(torch.rand(3), expected)
    assert (
        answers
        == asked.generate(PROMPTS, 3, sampling(), second)
        != asked.generate(PROMPTS, 3, sampling(), second)
    )
    asked.generate(PROMPTS, 3, sampling(0.0), untouched)
    assert draw_seed(untouched) == draw_seed(seeded(CPU, 5))


# The weights in the form that other engines read.


def test_an_adapter_is_written_in_peft_format(folders: dict[str, Path], tmp_path: Path) -> None:
    network = moved(folders["qwen3"], lora="on", lora_rank=4).network
    NetworkWeights(network, 3, 4, str(folders["qwen3"])).write_adapter(tmp_path)
    # peft would accept other names, but vLLM (lora/utils.py) does not.
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert all(
        re.fullmatch(r"base_model\.model\.model\.layers\.\d\.\w+\.\w+\.lora_[AB]\.weight", name)
        for name in names
    )
    assert len(names) == 2 * 7 * 2  # A and B of seven layers in two blocks
    loaded = PeftModel.from_pretrained(network_of(folders["qwen3"]), tmp_path).eval()
    own, base = (
        OwnEngine(n, MANY).generate(PROMPTS, 1, sampling(0.0), seeded(CPU, 0))
        for n in (network, network_of(folders["qwen3"]))
    )
    assert [s[0].ids for s in own] != [s[0].ids for s in base]
    check_logprobs(loaded, own, **exact())


@pytest.mark.parametrize(
    ("family", "lora"),
    [("qwen2", "off"), ("llama", "off"), ("gemma2", "off"), ("qwen2", "on"), ("llama", "on")],
)
def test_a_model_is_written_in_transformers_format(
    family: str, lora: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The heads are tied or untied; the model is trained whole or has a merged adapter."""
    network = moved(folders[family], lora=lora, lora_rank=4).network
    NetworkWeights(network, 3, 4 if lora == "on" else None, str(folders[family])).write_model(tmp_path)
    own = OwnEngine(network, MANY).generate(PROMPTS, 1, sampling(0.0), seeded(CPU, 0))
    check_logprobs(network_of(tmp_path), own, **exact())


def test_an_adapter_is_not_merged_into_a_16_bit_base(folders: dict[str, Path], tmp_path: Path) -> None:
    network = moved(folders["qwen3"], lora="on", lora_rank=4, dtype="bfloat16").network
    NetworkWeights(network, 3, 4, str(folders["qwen3"])).write_model(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    for name, layer in lora_layers(network):
        delta = written[f"{name}.weight"] - layer.get_base_layer().weight.float()
        torch.testing.assert_close(delta, layer.get_delta_weight("default"), atol=1e-6, rtol=0)
    assert written["model.norm.weight"].dtype == torch.bfloat16


# The policy's use of an engine.


@dataclasses.dataclass
class Recording:
    """A plug-in engine on the trainer's network that records its calls."""

    network: Any
    answers: Callable[[list[list[Sample]]], list[list[Sample]]] = lambda answers: answers

    def __post_init__(self) -> None:
        self.asked: list[str] = []

    def generate(
        self, prompts: Any, copies: int, sampling: Sampling, generator: torch.Generator
    ) -> list[list[Sample]]:
        self.asked.append("generate")
        return self.answers(OwnEngine(self.network, MANY).generate(prompts, copies, sampling, generator))

    def sync(self, weights: Any) -> None:
        self.asked.append(f"sync {weights.version}")

    def sleep(self) -> None:
        self.asked.append("sleep")

    def wake(self) -> None:
        self.asked.append("wake")

    def close(self) -> None:
        self.asked.append("close")


def policy_with(
    folder: Path, between: Callable[[], int] | None = None, **changes: Any
) -> tuple[Any, Recording]:
    policy = open_policy(folder, between=between)
    engine = Recording(policy.network, **changes)
    policy._driver = EngineDriver(engine, policy._loaded, between=between)
    return policy, engine


def test_an_engine_gets_new_weights_before_answers_and_sleeps_during_updates(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    policy, engine = policy_with(folders["qwen2"])
    policy.generate(["a"], 2)
    policy.answer("b")
    assert engine.asked == ["sync 0", "generate", "generate"]
    engine.asked.clear()
    policy.save(tmp_path)
    for _ in range(2):
        policy.update([external("1+1?", [("two", True), ("7", False)], (1.0, 0.0))])
    policy.answer("b")
    policy.answer("b")
    assert engine.asked == ["sleep", "wake", "sync 2", "generate", "generate"]
    engine.asked.clear()
    for _ in range(2):  # the second time, the weights may differ although the version is the same
        policy.restore(tmp_path)
        policy.answer("b")
    assert engine.asked == ["sync 0", "generate", "sync 0", "generate"]
    policy.close()
    assert engine.asked[-1] == "close"


def test_tokens_have_the_version_of_weights_that_another_process_changed(
    folders: dict[str, Path],
) -> None:
    versions = iter([4, 4, 7])
    policy, engine = policy_with(folders["qwen2"], lambda: next(versions))
    seen = [policy.generate(["a"], 2)[0].tokens for _ in range(3)]
    assert engine.asked == ["sync 4", "generate", "generate", "sync 7", "generate"]
    assert [set(t.versions[0]) for t in seen] == [{4}, {4}, {7}]
    assert [len(v) for v in seen[0].versions] == [len(i) for i in seen[0].ids]


def _first(change: Callable[[Sample], Sample]) -> Callable[[list[list[Sample]]], list[list[Sample]]]:
    return lambda answers: [[change(answers[0][0]), *answers[0][1:]], *answers[1:]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda answers: answers[:-1], "not 2 answers to each of 1 prompts"),
        (lambda answers: [samples[:1] for samples in answers], "not 2 answers to each of 1 prompts"),
        (
            _first(lambda s: dataclasses.replace(s, logprobs=s.logprobs[1:])),
            "different numbers of tokens and log-probabilities",
        ),
        (
            _first(lambda s: dataclasses.replace(s, ids=(10**6, *s.ids[1:]))),
            "tokens that the model does not have",
        ),
        (
            _first(lambda s: dataclasses.replace(s, logprobs=(float("nan"), *s.logprobs[1:]))),
            "invalid log-probabilities",
        ),
        (
            _first(lambda s: dataclasses.replace(s, logprobs=(0.7, *s.logprobs[1:]))),
            "invalid log-probabilities",
        ),
        (
            _first(lambda s: dataclasses.replace(s, ended=not s.ended)),
            "a sample whose `ended` does not match",
        ),
        (_first(lambda s: Sample((0, 5), (-1.0, -1.0), False)), "tokens after the end of an answer"),
        (_first(lambda s: Sample((5,) * 13, (-1.0,) * 13, False)), "more than 12 tokens"),
    ],
)
def test_answers_of_a_plug_in_engine_are_checked(change: Any, said: str, folders: dict[str, Path]) -> None:
    policy, _ = policy_with(folders["qwen2"], answers=change)
    with pytest.raises(EngineFailed, match=f"the engine returned {said}.*generate.engine to"):
        policy.generate(["a"], 2)


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (Sample((7, 99, 0), (-1.0, 0.0005, -1.0), True), ""),
        (Sample((7, 99), (-1.0, -1.0), False), ""),
        (Sample((), (), False), ""),
        (Sample((), (), True), "a sample whose `ended` does not match"),
        (Sample((7,) * 4, (-1.0,) * 4, False), "more than 3 tokens"),
        (Sample((7, 0, 7), (-1.0,) * 3, False), "tokens after the end"),
        (Sample((100,), (-1.0,), False), "tokens that the model does not have"),
        (Sample((-1,), (-1.0,), False), "tokens that the model does not have"),
        (Sample((7,), (float("-inf"),), False), "invalid log-probabilities"),
    ],
)
def test_answers_are_checked_to_the_end_of_the_context_and_of_the_vocabulary(
    sample: Sample, said: str
) -> None:
    def found(prompt: int) -> object:
        return checked([[sample]], [[1] * prompt], 1, sampling(limit=12, context=128), 100)

    if said:
        with pytest.raises(EngineFailed, match=said):
            found(125)
    else:
        assert found(125) == [[sample]]
    if sample.ids:
        with pytest.raises(EngineFailed, match="more than 0 tokens"):
            found(200)


# Finding an engine by its name.


def plugin(folder: Path, target: str, monkeypatch: pytest.MonkeyPatch, **modules: str) -> None:
    """Install a distribution with an entry point, as pip does."""
    info = folder / "other_engine-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-engine\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nother = {target}\n")
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(
    ("asked", "name", "text", "said"),
    [
        (
            "vlm",
            "nothing",
            "",
            r"is 'vlm', and no such engine is installed. There are: own, .*other",
        ),
        (
            "other",
            "engine_not_whole",
            "import no_such_module_anywhere",
            r"ModuleNotFoundError: No module named 'no_such_module",
        ),
        (
            "other",
            "engine_odd",
            "def build(asked): raise TypeError('odd')",
            r"cannot be loaded \(TypeError: odd\). Install",
        ),
        (
            "other",
            "engine_with_words_of_its_own",
            "from swarmd.policy.inference.engine import NoEngine\ndef build(asked): raise NoEngine('buy')",
            r"^buy$",
        ),
        (
            "other",
            "engine_empty",
            "",
            (
                r"'other' of other-engine 1.2 .*\(AttributeError: module 'engine_empty' has no attribute"
                r" 'build'\)"
            ),
        ),
    ],
)
def test_an_object_that_is_not_an_engine_is_rejected_with_the_reason(
    asked: str, name: str, text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(tmp_path, f"{name}:build", monkeypatch, **{name: text})
    with pytest.raises(NoEngine, match=said):
        open_plugin(asked, ASKED)


def test_the_missing_parts_of_a_plug_in_are_named(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = "SimpleNamespace(generate=asked, sync=1, sleep=1, wake=1, close=1)"
    text = f"from types import SimpleNamespace\ndef build(asked):\n    return {made}"
    plugin(tmp_path, "telling:build", monkeypatch, telling=text)
    config = config_of(folders["qwen2"], lora="on", lora_rank=4)
    generate = GenerateConfig(
        engine="other", engine_url="http://127.0.0.1:1", engine_args=("--x",), engine_memory=0.2
    )
    config = config.model_copy(update={"generate": generate})
    engine: Any = open_engine(config, load_model(config.model, 0), sampling())
    model = engine.generate.model
    assert (model / "model.safetensors").resolve() == (folders["qwen2"] / "model.safetensors").resolve()
    assert engine.generate == EngineOptions(
        model, "cpu", "float32", 4, 128, "http://127.0.0.1:1", "", 0.2, 600.0, ("--x",)
    )
    sys.modules.pop("telling")


def test_importance_weights_are_on_if_another_policy_answered_unless_disabled(
    folders: dict[str, Path],
) -> None:
    def cap(engine: str, replay: str = "off", **train: Any) -> float:
        parts = {"generate": GenerateConfig(engine=engine), "train": TrainConfig(**train)}
        config = config_of(folders["qwen2"]).model_copy(update=parts)
        return importance_cap(
            config.model_copy(update={"replay": ReplayConfig.model_validate({"mode": replay})})
        )

    assert [cap(engine) for engine in ("own", "vllm")] == [0.0, 2.0]
    assert cap("vllm", importance_cap=0.0) == 0.0 and cap("own", importance_cap=1.5) == 1.5
    # With replay, an older policy sampled the answers.
    assert cap("own", replay="on") == cap("vllm", replay="on") == 2.0
    assert cap("vllm", loss="asymre") == cap("own", replay="on", loss="asymre") == 0.0


def short_of_memory(
    times: int, said: str = "DefaultCPUAllocator: not enough memory: you tried to allocate"
) -> Callable[[], int]:
    """Return a function that raises an allocator's error for its first `times` calls."""
    refusals = iter(range(times))

    def between() -> int:
        if next(refusals, None) is not None:
            raise RuntimeError(said)
        return 0

    return between


def test_the_built_in_engine_holds_less_if_memory_is_short(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    network = network_of(folders["qwen2"])
    roomy, short = (
        OwnEngine(network, MANY, between=short_of_memory(times)).generate(
            PROMPTS, 2, sampling(0.0), seeded(CPU, 0)
        )
        for times in (0, 2)
    )
    assert [[s.ids for s in a] for a in short] == [[s.ids for s in a] for a in roomy]
    largest = 2 * (max(map(len, PROMPTS)) + 20)
    said = "out of memory while answering: at most %d tokens of keys and values from now on"
    assert [r.getMessage() for r in caplog.records] == [said % (4 * largest // 2), said % (4 * largest // 4)]


def test_long_questions_are_answered_in_parts_before_memory_counts_as_too_small(
    folders: dict[str, Path],
) -> None:
    """A prompt is held once for all its answers, so several prompts need less than one with copies."""
    long = [[*p, *[7] * (60 - len(p))] for p in PROMPTS]
    answers = OwnEngine(network_of(folders["qwen2"]), MANY, between=short_of_memory(4)).generate(
        long, 8, sampling(0.0, limit=2), seeded(CPU, 0)
    )
    assert [len(a) for a in answers] == [8] * len(long)


def test_a_prompt_that_does_not_fit_memory_is_reported(folders: dict[str, Path]) -> None:
    engine = OwnEngine(network_of(folders["qwen2"]), MANY, between=short_of_memory(99))
    with pytest.raises(
        NoModel,
        match=r"memory on cpu to answer one question 2 times\. Close other programs, lower generate",
    ):
        engine.generate(PROMPTS, 2, sampling(0.0), seeded(CPU, 0))
    once = OwnEngine(network_of(folders["qwen2"]), MANY, between=short_of_memory(1))
    assert once.generate(PROMPTS[:1], 2, sampling(0.0), seeded(CPU, 0)), (
        "a later call did not try again, although memory may be free"
    )
    broken = OwnEngine(network_of(folders["qwen2"]), MANY, between=short_of_memory(1, "no memory of it"))
    with pytest.raises(RuntimeError, match="no memory of it"):
        broken.generate(PROMPTS, 2, sampling(0.0), seeded(CPU, 0))


# The contract of decoding, whatever is shared, padded or left out.


class Always:
    """Rows whose next token always has the same logits, whatever the text."""

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
def test_samples_follow_the_probabilities_over_the_whole_vocabulary(vocabulary: int) -> None:
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
    # No token is sampled more or less often than chance allows.
    assert float(((seen - p).abs() - 5 * noise).max()) <= 4 / drawn.numel()
    expected = torch.log_softmax(logits, -1)[drawn]
    torch.testing.assert_close(torch.tensor([s.logprobs for s in samples]), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("shared", [True, False])
def test_prompts_decoded_together_keep_to_the_memory(shared: bool) -> None:
    prompts = [[1] * length for length in (40, 5, 30, 5, 128, 12)]
    found = list(groups(prompts, 2, sampling(limit=10), 200, shared))
    assert sorted(i for group in found for i in group) == [0, 1, 2, 3, 5], (
        "a prompt that fills the context needs a separate group"
    )
    for group in found:
        longest = max(len(prompts[i]) for i in group)
        assert len(group) * (longest + 20 if shared else 2 * (longest + 10)) <= 200
    assert len(found) == 2


def test_failing_answers_leave_no_state_behind(folders: dict[str, Path]) -> None:
    policy = open_policy(folders["qwen3"], lora="on", lora_rank=4)
    network = policy._loaded.network
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(IndexError):
        decode(network, [[10_000]], 1, Sampling(24, 128, frozenset({0}), 1.0), seeded(CPU, 0), 9999)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_attention_in_chunks_is_refused() -> None:
    chunked = LlamaConfig(num_hidden_layers=1, layer_types=["chunked_attention"])
    assert [covers(c) for c in (LlamaConfig(), chunked)] == [True, False]
