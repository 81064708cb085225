"""With a 4-bit base and an adapter, sampler, learner and export use the same weights.

These take a quarter of the memory."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmd.errors import NoModel
from swarmd.policy.export import export
from swarmd.policy.inference.engine import NoEngine
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.fit import NAMED
from swarmd.policy.models.lora import FourBitLinear, folded, lora_layers
from swarmd.policy.models.memory_plan import Workload, make_plan
from tests.swarmd.policy.conftest import (
    BITSANDBYTES,
    answered,
    config_of,
    files_of,
    flat,
    make_model,
    open_policy,
)
from tests.swarmd.policy.test_on_device import QUESTIONS

NF4: dict[str, Any] = {"dtype": "nf4", "lora": "on", "lora_rank": 4, "train": {"learning_rate": 0.01}}


def trained(folder: Path, updates: int) -> LanguagePolicy:
    policy = open_policy(folder, **NF4)
    for _ in range(updates):
        policy.update(answered(policy, QUESTIONS))
    return policy


def packed(policy: LanguagePolicy) -> list[FourBitLinear]:
    return [module for module in policy.network.modules() if isinstance(module, FourBitLinear)]


@BITSANDBYTES
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_5", "lfm2"])
def test_learner_and_sampler_compute_the_same_log_probabilities(family: str, tmp_path: Path) -> None:
    """The values are equal up to bfloat16's noise, before and after updates; the base does not change."""
    policy = trained(make_model(tmp_path, family), 0)
    base = [layer.weight for layer in packed(policy)]
    assert base
    for _ in range(3):
        batch = answered(policy, QUESTIONS)
        apart = flat(s.tokens for s in batch) - flat(policy.logprobs(batch))
        assert float(apart.abs().mean()) < 0.05 and policy.update(batch).grad_norm > 0
    assert all(torch.equal(a, layer.weight) for a, layer in zip(base, packed(policy), strict=True))


@BITSANDBYTES
def test_a_four_bit_base_uses_the_planned_memory(tmp_path: Path) -> None:
    policy = trained(make_model(tmp_path, hidden_size=512, intermediate_size=2048), 0)
    planned = next(item for item in policy._loaded.plan.items if item.name == "weights in 4 bits")
    held = [
        tensor.nbytes
        for layer in packed(policy)
        for tensor in (layer._packed, layer._state.absmax, layer._state.state2.absmax)
    ]
    assert planned.bytes == pytest.approx(sum(held), rel=0.01)


@BITSANDBYTES
def test_the_export_has_the_trained_weights(tmp_path: Path) -> None:
    """The exported weights are W + s B A with the 4-bit base W, rounded to bfloat16."""
    policy = trained(make_model(tmp_path / "model"), 2)
    folder = export(files_of(policy), [], "sapo-9", tmp_path / "out").folder
    found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    layers = lora_layers(policy.network)
    assert len(layers) == 14
    for name, layer in layers:
        assert torch.equal(found[f"{name}.weight"], folded(layer).bfloat16()), name


@BITSANDBYTES
def test_other_engines_reject_a_four_bit_base(tmp_path: Path) -> None:
    config = config_of(make_model(tmp_path), **NF4)
    foreign = config.model_copy(update={"generate": config.generate.model_copy(update={"engine": "vllm"})})
    with pytest.raises(NoEngine, match=r"vllm. cannot answer with weights in 4 bits .* model\.dtype"):
        LanguagePolicy.open(foreign, 0)


def test_layers_are_dequantised_one_at_a_time_in_updates_too() -> None:
    """Without checkpointing, the backward pass would hold all layers dequantised."""
    shape, work = NAMED["qwen3-0.6b"], Workload(questions=1, completions=2, new_tokens=8)
    assert not make_plan(shape, "bfloat16", 16, 10**12, work).checkpointing
    for asked in (work, replace(work, micro_batch_tokens=64)):
        assert make_plan(shape, "nf4", 16, 10**12, asked).checkpointing


def test_unavailable_four_bit_weights_are_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path)
    with pytest.raises(NoModel, match=r"'nf4' works only if an adapter is trained\. Set model\.lora to 'on'"):
        open_policy(tmp_path, dtype="nf4", lora="off")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NoModel, match=r"bitsandbytes.*pip install 'swarmd\[bitsandbytes\]'.*model\.dtype"):
        open_policy(tmp_path, **NF4)
