"""What must hold on each device.

The learner sees what the sampler saw, little memory makes smaller batches, the plan is not exceeded.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.device import release_cached
from swarmd.policy.training.learner import Learner, Learning
from swarmd.policy.training.packing import Row
from tests.swarmd.policy.conftest import config_of, local, make_model

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])
MPS = pytest.param("mps", marks=pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs MPS"))
QUESTIONS = ["1+1?", "a question that is a good deal longer than the other one", "x"]


@pytest.mark.parametrize("device", ["cpu", CUDA, MPS])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_5", "lfm2"])
@pytest.mark.parametrize(("dtype", "mean", "most"), [("float32", 1e-5, 1e-3), ("bfloat16", 0.05, 0.5)])
def test_the_learner_sees_what_the_sampler_saw(
    device: str, family: str, dtype: str, mean: float, most: float, tmp_path: Path
) -> None:
    """This holds after an update too. In bfloat16 the two sum, and so round, in another order."""
    make_model(tmp_path, family)
    policy = LanguagePolicy.open(
        config_of(tmp_path, device=device, dtype=dtype, train={"learning_rate": 1e-3, "kl_every": 1}), 0
    )
    for _ in range(2):
        generations = policy.generate(QUESTIONS, 4)
        batch = [local(q, g, (1.0, 0.0, 0.0, 1.0)) for q, g in zip(QUESTIONS, generations, strict=True)]
        drawn = torch.tensor([p for g in generations for each in g.tokens.logprobs for p in each])
        seen = torch.tensor(
            [p for tokens in policy.logprobs(batch) for each in tokens.logprobs for p in each]
        )
        assert float((drawn - seen).abs().mean()) < mean and float((drawn - seen).abs().max()) < most
        report = policy.update(batch)
        assert report.grad_norm > 0 and report.tokens == len(drawn) and report.kl is not None
        assert report.clip_fraction < (0.2 if dtype == "bfloat16" else 1e-9)


def large(device: str) -> Any:
    """Return a network whose activations are most of the memory of an update."""
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(device).eval()


@pytest.fixture
def whole_device() -> Iterator[torch.device]:
    """A CUDA device whose memory torch may take all of again afterwards."""
    device = torch.device("cuda", 0)
    release_cached(device)
    yield device
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    release_cached(device)


@NO_CUDA
@pytest.mark.gpu
def test_a_full_device_is_answered_by_smaller_batches(
    whole_device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """The allocator itself refuses, at six tenths of what the batch would take at once."""
    rows = [
        Row(tuple(range(q, q + 64)), tuple(range(i, i + 192)), 1.0, None, 1e-3)
        for q in range(4)
        for i in range(8)
    ]
    learning = Learning(0.0, 1e9, 1.0, 10**6)
    roomy = Learner(large("cuda"), learning, whole_device)
    expected = roomy.step(rows)
    held = torch.cuda.memory_allocated(whole_device)
    torch.cuda.reset_peak_memory_stats(whole_device)
    roomy.step(rows)
    needed = torch.cuda.max_memory_allocated(whole_device) - held
    release_cached(whole_device)
    total = torch.cuda.get_device_properties(whole_device).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(whole_device) + 0.6 * needed) / total, whole_device
    )
    tight = roomy.step(rows)
    assert "out of memory in the update" in caplog.text
    assert (tight.tokens, tight.loss) == (expected.tokens, pytest.approx(expected.loss, rel=1e-3))
    assert tight.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)


@NO_CUDA
@pytest.mark.gpu
@pytest.mark.parametrize("lora", ["on", "off"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_round_takes_no_more_than_its_plan(
    lora: str, dtype: str, whole_device: torch.device, tmp_path: Path
) -> None:
    """It does not take so much less that models would be refused that fit.

    The plan leaves room for libraries, which torch does not count.
    """
    make_model(
        tmp_path,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        vocab_size=32_000,
        max_position_embeddings=1024,
    )
    before = torch.cuda.memory_allocated(whole_device)
    torch.cuda.reset_peak_memory_stats(whole_device)
    policy = LanguagePolicy.open(
        config_of(tmp_path, device="cuda", dtype=dtype, lora=lora, new_tokens=128), 0
    )
    questions = [f"{i} " * 100 for i in range(4)]
    generations = policy.generate(questions, 8)
    batch = [local(q, g, (1.0, 0.0) * 4) for q, g in zip(questions, generations, strict=True)]
    for _ in range(2):  # Adam's moments are there from the first on
        policy.update(batch)
    taken = torch.cuda.max_memory_allocated(whole_device) - before
    assert 0.2 * policy._loaded.plan.peak < taken < policy._loaded.plan.peak
