"""Weights that change while answers are being decoded."""

from pathlib import Path

import pytest
import torch

from swarmd.policy.inference import decode
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.parallel.weight_sync import WeightReader, WeightWriter
from tests.swarmd.policy.conftest import open_policy

QUESTIONS = ["What is 2 + 3?", "Which word is longer: no or yes?"]


def switching(folder: Path, at: int) -> LanguagePolicy:
    """Before step `at` (0 up), and from there on, the weights are others: version 1."""
    calls = 0

    def between() -> int:
        nonlocal calls
        if calls == at:
            for weight in policy.trained.values():
                weight.mul_(1.5)
        calls += 1
        return int(calls > at)

    policy = open_policy(folder, seed=3, between=between)
    return policy


@pytest.mark.parametrize("family", ["qwen2", "lfm2"])
def test_each_token_tells_its_version_and_earlier_ones_stay_as_they_were(
    folders: dict[str, Path], family: str
) -> None:
    plain = open_policy(folders[family], seed=3).generate(QUESTIONS, 4)
    mixed = switching(folders[family], 5).generate(QUESTIONS, 4)
    for before, after in zip(plain, mixed, strict=True):
        assert before.tokens.versions == ()
        for ids, versions in zip(after.tokens.ids, after.tokens.versions, strict=True):
            assert versions == tuple(int(step >= 5) for step in range(len(ids)))
        assert [ids[:5] for ids in after.tokens.ids] == [ids[:5] for ids in before.tokens.ids]
        assert [p[:5] for p in after.tokens.logprobs] == [p[:5] for p in before.tokens.logprobs]
    assert [g.tokens.logprobs for g in plain] != [g.tokens.logprobs for g in mixed]


@pytest.mark.parametrize("at", [0, 5])
def test_newer_weights_reach_every_layer_whichever_way_keys_and_values_are_kept(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Prompts shared and rows padded have nothing in common but the network.

    What one kept of the old weights, the other would not.
    """
    ways = []
    for padded in (False, True):
        policy = switching(folders["qwen2"], at)
        if padded:
            monkeypatch.setattr(decode, "adopt", lambda _: False)
        ways.append(policy.generate(QUESTIONS, 4))
    for shared, row in zip(*ways, strict=True):
        assert shared.tokens.ids == row.tokens.ids and shared.tokens.versions == row.tokens.versions
        for ours, theirs in zip(shared.tokens.logprobs, row.tokens.logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
    if at == 0:
        changed = open_policy(folders["qwen2"], seed=3)
        with torch.no_grad():
            for weight in changed.trained.values():
                weight.mul_(1.5)
        assert [g.tokens.ids for g in changed.generate(QUESTIONS, 4)] == [g.tokens.ids for g in ways[0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_handed_over_adapter_answers_the_same(folders: dict[str, Path], tmp_path: Path, dtype: str) -> None:
    trainer = open_policy(folders["qwen2"], seed=1, lora="on", lora_rank=4, dtype=dtype)
    generator = open_policy(folders["qwen2"], seed=1, lora="on", lora_rank=4, dtype=dtype)
    handover, pickup = WeightWriter(tmp_path), WeightReader(tmp_path, generator.trained)
    assert all("lora" in name for name in trainer.trained), "nothing else is handed over"
    for version in (1, 2):
        with torch.no_grad():
            for weight in trainer.trained.values():
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(version)) * 0.3)
        handover.publish(version, trainer.trained)
        with torch.inference_mode():
            assert pickup() == version
        pairs = zip(trainer.network.parameters(), generator.network.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    question = QUESTIONS[:1]
    assert generator.generate(question, 3) == trainer.generate(question, 3)
