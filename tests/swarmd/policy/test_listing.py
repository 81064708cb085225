"""`swarmd models`: the listed models, and the agreement of its estimates with measurements."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from swarmd.config.config import ModelConfig, NodeConfig
from swarmd.policy.models import doctor
from swarmd.policy.models.architecture import read_config, shape_of, skeleton_of
from swarmd.policy.models.doctor import DeviceSpeed, estimate, lines, list_models, measure_speed
from swarmd.policy.models.fit import NAMED, work_of
from swarmd.policy.models.hub import locate
from swarmd.policy.models.memory_plan import Workload, make_plan
from tests.swarmd.conftest import Run
from tests.swarmd.policy.conftest import QWEN_05B, external, open_policy

GB = 10**9
SPEED = DeviceSpeed(60e9, 8e9)  # of one core of the machine in docs/performance.md


def listed(free: int) -> dict[str, object]:
    config = NodeConfig.model_validate({"model": {"device": "cpu", "dtype": "float32"}})
    where, models = list_models(config, lambda _: free, lambda *_: SPEED)
    assert where == "cpu" and len(lines(where, models)) == len(models) + 4
    return {model.fit.source: model for model in models}


def test_models_are_listed_smallest_first_with_the_plans_figures() -> None:
    models = listed(6 * GB)
    assert list(models) == list(NAMED)[::-1]
    sizes = [model.fit.shape.parameters for model in models.values()]  # type: ignore[attr-defined]
    assert sizes == sorted(sizes)
    fitting = [name for name, model in models.items() if model.fit.plan.fits]  # type: ignore[attr-defined]
    assert fitting == ["tiny", "smollm2-135m", "smollm2-360m", "qwen2.5-0.5b", "qwen3-0.6b", "qwen3.5-0.8b"]
    assert not any(model.fit.plan.fits for model in listed(10**6).values())  # type: ignore[attr-defined]


def test_the_listed_disk_space_includes_a_checkpoint(folders: dict[str, Path], tmp_path: Path) -> None:
    for dtype, each in (("float32", 12), ("bfloat16", 14)):
        settings = {"model": {"device": "cpu", "dtype": dtype, "lora": "off"}}
        _, models = list_models(NodeConfig.model_validate(settings), lambda _: 64 * GB, lambda *_: SPEED)
        assert models[0].checkpoints == 2 * each * NAMED["tiny"].parameters
        policy = open_policy(folders["qwen2"], dtype=dtype)
        policy.update([external("1+1?", [("two", True), ("7", False)], (1.0, 0.0))])
        policy.save(tmp_path)
        written = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert written == pytest.approx(each * policy.parameters, rel=0.3)


def test_slow_models_are_marked_and_memory_grows_with_size() -> None:
    config = NodeConfig.model_validate({"model": {"device": "cpu", "dtype": "float32"}})
    where, models = list_models(config, lambda _: 64 * GB, lambda *_: SPEED)
    _, tiny, half, *_ = lines(where, models)
    assert re.search(r"~0.2 s +yes$", tiny) and "slow: " in half and half.endswith(" an hour, LoRA")
    assert max(map(len, lines(where, models)[: len(models) + 1])) <= 80
    least = [model.fit.plan.least for model in models]
    assert least == sorted(least)
    assert models[1].document()["rounds_an_hour"] == pytest.approx(3600 / models[1].seconds, rel=0.06)


TIED = QWEN_05B | {"tie_word_embeddings": True}
QWEN3 = TIED | {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
}
QWEN35 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
}
DEEP = {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4}
SMOL = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
NAMED_CONFIGS = {
    "smollm2-135m": SMOL
    | {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
    | {"num_key_value_heads": 3},
    "smollm2-360m": SMOL
    | {"num_hidden_layers": 32, "hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 15}
    | {"num_key_value_heads": 5},
    "qwen2.5-0.5b": TIED,
    "qwen2.5-1.5b": TIED
    | {"num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12},
    "qwen3-0.6b": QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144},
    "qwen3-4b": QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-8b": QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": False},
    "qwen3.5-0.8b": QWEN35 | {"hidden_size": 1024, "intermediate_size": 3584},
    "qwen3.5-2b": QWEN35 | {"hidden_size": 2048, "intermediate_size": 6144},
    "qwen3.5-4b": QWEN35
    | DEEP
    | {"hidden_size": 2560, "intermediate_size": 9216, "linear_num_value_heads": 32},
}
# The largest model for a GPU with so many GiB, if other programs use a tenth of it.
CARDS = {8: "qwen3.5-2b", 12: "qwen3-4b", 16: "qwen3.5-4b", 24: "qwen3-8b"}


@pytest.mark.parametrize("size", CARDS)
def test_the_largest_model_for_a_gpu_is_found(size: int) -> None:
    work = replace(work_of(NodeConfig(model=ModelConfig(name="a/b"))), start_copy=False)
    fitting = (
        name
        for name, shape in NAMED.items()
        if make_plan(shape, "bfloat16", 16, size * 2**30 * 9 // 10, work).fits
    )
    assert next(fitting) == CARDS[size]


def test_the_listed_shapes_match_the_models() -> None:
    tiny = read_config(locate("tiny", None))
    configs = {name: AutoConfig.for_model(**settings) for name, settings in NAMED_CONFIGS.items()} | {
        "tiny": tiny
    }
    assert {name: shape_of(skeleton_of(config, name), name) for name, config in configs.items()} == NAMED


def test_only_missing_weights_count_as_a_download() -> None:
    models = listed(6 * GB)
    assert models["tiny"].download == 0 and models["qwen2.5-0.5b"].download in (0, 2 * 494_032_768)  # type: ignore[attr-defined]


def test_the_estimate_is_near_the_measured_memory_of_half_a_billion_weights() -> None:
    """docs/performance.md: 97 CPU seconds for answers, 234 for an update, questions of 60 tokens."""
    shape = shape_of(skeleton_of(AutoConfig.for_model(**QWEN_05B), "0.5b"))
    work = Workload(questions=8, completions=8, new_tokens=64, prompt_tokens=60, mean_prompt_tokens=60)
    plan = make_plan(shape, "float32", 16, 16 * GB, work)
    assert 331 / 2 < estimate(shape, plan, work, SPEED) < 331 * 2
    slower = replace(SPEED, flops=SPEED.flops / 10)
    assert estimate(shape, plan, work, slower) == pytest.approx(10 * estimate(shape, plan, work, SPEED))


def test_the_speed_of_this_machine_is_measured() -> None:
    speed = measure_speed(torch.device("cpu"), torch.float32)
    assert speed.flops > 1e6 and speed.bandwidth > 1e6


def test_memory_that_a_device_allocates_at_first_use_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, runs = [0.0], list[float]()
    monkeypatch.setattr(doctor, "Timer", partial(doctor.Timer, timer=lambda: now[0]))

    def work() -> torch.Tensor:
        runs.append(0.01 if runs else 0.3)
        now[0] += runs[-1]
        return torch.ones(1)

    assert doctor._seconds(work) == pytest.approx(0.01) and len(runs) > 5


def test_the_command_models_lists_the_models(run: Run) -> None:
    said = run("models", "--device", "cpu", "--json")
    document = json.loads(said.out)
    assert (said.code, document["schema"], document["device"]) == (0, 1, "cpu")
    assert document["models"][0]["name"] == "tiny" and document["models"][0]["fits"]
