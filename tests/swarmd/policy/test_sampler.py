"""Sampler and learner compute the same function, and an adapter has its full effect, even in 16 bits.

The tests compare these values of the log-probabilities of about two thousand sampled tokens:

    noise       root mean square of sampler minus learner before any update: in bfloat16, the same sums in
                two orders differ
    apart       the same value after updates
    missing     the share of the updates' effect that is missing: the least-squares slope of (float32 model −
                this model) on the effect in the float32 model; the float32 model has the same weights, so
                its values are free of that noise
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarmd.policy.language_policy import LanguagePolicy
from tests.swarmd.policy.conftest import external, flat, local, make_model, open_policy

QUESTIONS = ["What is 2 + 3?", "Which word is longer: no or yes?", "Spell the word banana backwards.", "x"]
BATCH = [
    external(q, [("the answer is two", True), ("7 or 8 or 9", True), ("nothing", True)], (1.0, 0.0, 0.0))
    for q in QUESTIONS[:2]
]
COPIES, TOKENS = 32, 16  # answers per question, and tokens per answer
# Limit of `missing`. After one small update, noise alone gives up to 0.13. Half or more was missing when 16
# bits lost the effect of a new adapter.
MOST_MISSING = 0.25
# Limit of apart/noise. A few tokens determine this ratio: it is 1.1 on CPUs with AVX2, up to 1.42 with AMX.
MOST_APART = 1.7
ADAPTER: dict[str, Any] = {"lora": "on", "lora_rank": 8, "train": {"learning_rate": 2e-4}}
WHOLE: dict[str, Any] = {"lora": "off", "train": {"learning_rate": 5e-5}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make wide models.

    In them, an adapter has an effect long before it changes the last digit of a bfloat16 weight.
    """
    made = {}
    for family, layers in {
        "qwen2": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
        "lfm2": {},
    }.items():
        made[family] = make_model(
            tmp_path_factory.mktemp(family),
            family,
            hidden_size=256,
            intermediate_size=512,
            initializer_range=0.05,
            **layers,
        )
        AutoModelForCausalLM.from_pretrained(made[family], dtype=torch.bfloat16).save_pretrained(made[family])
    return made


def opened(folder: Path, dtype: str = "bfloat16", **way: Any) -> LanguagePolicy:
    return open_policy(folder, dtype=dtype, new_tokens=TOKENS, **way)


@dataclass(frozen=True)
class Measured:
    apart: float
    missing: tuple[float, float]  # in the sampler and in the learner


def measure(policy: LanguagePolicy, folder: Path, **way: Any) -> Measured:
    answers = policy.generate(QUESTIONS, COPIES, seed=7)
    batch = [local(q, answer, (0.0,) * COPIES) for q, answer in zip(QUESTIONS, answers, strict=True)]
    exact = opened(folder, "float32", **way)
    before = flat(exact.logprobs(batch))
    exact.load_weights(bytes(dict(policy.files())["weights.safetensors"]))
    after = flat(exact.logprobs(batch))
    sampler, learner = flat([answer.tokens for answer in answers]), flat(policy.logprobs(batch))
    return Measured(
        rms(sampler - learner),
        (slope(after - sampler, after - before), slope(after - learner, after - before)),
    )


def check(policy: LanguagePolicy, noise: float, folder: Path, **way: Any) -> None:
    found = measure(policy, folder, **way)
    assert found.apart < MOST_APART * noise, found
    assert max(map(abs, found.missing)) < MOST_MISSING, found


@pytest.mark.parametrize(("family", "way"), [("qwen2", ADAPTER), ("lfm2", ADAPTER), ("qwen2", WHOLE)])
def test_sampler_and_learner_differ_only_by_bfloat16_rounding(
    models: dict[str, Path], family: str, way: dict[str, Any]
) -> None:
    """swarmd cannot pack lfm2, so transformers' own code decodes and trains it in padded batches."""
    folder = models[family]
    policy = opened(folder, **way)
    noise = measure(policy, folder, **way).apart
    assert 1e-4 < noise < 0.02
    for updates in (1, 30):
        while policy.version < updates:
            policy.update(BATCH)
        check(policy, noise, folder, **way)


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def slope(y: Tensor, x: Tensor) -> float:
    return float((x * y).sum() / (x * x).sum()) if x.any() else 0.0
