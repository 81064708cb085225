"""The policy behaves the same on every device.

Learner and sampler agree, batches become smaller if memory is short, and the memory plan is not exceeded.
"""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen2Config

from swarmd.config.config import TrainConfig
from swarmd.policy import language_policy
from swarmd.policy.attention import adopt
from swarmd.policy.inference import recorded_step
from swarmd.policy.inference.decode import Sampling, decode, decode_rows
from swarmd.policy.inference.fused_decoder import blocks_of
from swarmd.policy.inference.prefix_cache import SharedPrefix
from swarmd.policy.inference.recorded_step import RecordedStep, records
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models import fit
from swarmd.policy.models.device import choose_device, release_cached, seeded
from swarmd.policy.models.lora import adapted
from swarmd.policy.parallel.weight_sync import WeightReader, WeightWriter
from swarmd.policy.training.learner import STEPS_TO_DOUBLE, Learner, Learning
from swarmd.policy.training.packing import Row
from swarmd.types import Scored, UpdateReport
from tests import ROOT
from tests.doubles import TIMEOUT_S
from tests.swarmd.policy.conftest import answered, config_of, flat, make_model
from tests.swarmd.policy.pretend_gpu import MixesDevices, pretending


def mps_computes() -> bool:
    """Return whether MPS can be used.

    GitHub's virtual Macs have an MPS device that rejects every allocation.
    """
    try:
        return torch.backends.mps.is_available() and bool(torch.ones(1, device="mps").item())
    except RuntimeError:
        return False


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])
MPS = pytest.param("mps", marks=pytest.mark.skipif(not mps_computes(), reason="needs MPS"))
# This device rejects the operations that a GPU rejects (pretend_gpu.py). It needs a separate process, because
# torch counts the devices of a process only once.
PRETENDED = pytest.param(
    "pretend",
    marks=pytest.mark.skipif(
        "PRETEND_GPU" not in os.environ,
        reason="started by test_the_device_tests_pass_if_mixing_devices_is_an_error",
    ),
)
DEVICES = ["cpu", CUDA, MPS, PRETENDED]


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the device's name in the settings. The pretended device takes the place of "mps"."""
    if request.param != "pretend":
        yield request.param
        return
    with pretending() as there:
        for module in (fit, language_policy):
            monkeypatch.setattr(
                module, "choose_device", lambda wanted: there if wanted == "mps" else choose_device(wanted)
            )
        yield "mps"


@pytest.mark.slow
def test_the_device_tests_pass_if_mixing_devices_is_an_error() -> None:
    """The pretended device is slow, so bfloat16 runs with one family only, and no run is repeated.

    The test of the tiny models' training runs in the same process, so that torch is imported only once.
    """
    wanted = "pretend and not same_run and not (bfloat16 and not qwen2) or training_never_asks"
    files = [__file__, str(ROOT / "tests" / "test_tiny_models.py")]
    run = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", wanted, *files]
    env = os.environ | {"PRETEND_GPU": "1"}
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0 and "17 passed" in done.stdout, done.stdout


@PRETENDED.marks[0]
def test_the_pretended_device_rejects_operations_that_a_gpu_rejects() -> None:
    with pretending() as there:
        ours, theirs = torch.arange(3.0), torch.arange(3.0, device=there)
        assert (theirs + theirs[torch.tensor([2, 0, 1])] * torch.tensor(2.0)).tolist() == [4.0, 1.0, 4.0]
        for mixed in (lambda: theirs + ours, lambda: torch.cat([ours, theirs]), lambda: theirs[0].add_(ours)):
            with pytest.raises(MixesDevices, match="next to one on the device"):
                mixed()


QUESTIONS = ["1+1?", "a question that is a good deal longer than the other one", "x"]


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_5", "lfm2"])
@pytest.mark.parametrize(("dtype", "mean", "most"), [("float32", 1e-5, 1e-3), ("bfloat16", 0.05, 0.5)])
def test_learner_and_sampler_compute_the_same_log_probabilities(
    device: str, family: str, dtype: str, mean: float, most: float, tmp_path: Path
) -> None:
    """The values also agree after an update. In bfloat16, the two add, and so round, in different orders.

    On the pretended device one round is enough, because it executes all operations.
    """
    make_model(tmp_path, family)
    policy = LanguagePolicy.open(
        config_of(tmp_path, device=device, dtype=dtype, train={"learning_rate": 1e-3, "kl_every": 1}), 0
    )
    for _ in range(1 if "PRETEND_GPU" in os.environ else 2):
        batch = answered(policy, QUESTIONS)
        apart = (flat(s.tokens for s in batch) - flat(policy.logprobs(batch))).abs()
        assert float(apart.mean()) < mean and float(apart.max()) < most
        report = policy.update(batch)
        assert report.grad_norm > 0 and report.tokens == len(apart) and report.kl is not None
        assert report.clip_fraction < (0.2 if dtype == "bfloat16" else 1e-9)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_a_large_bias_of_all_keys_costs_no_precision(device: str, tmp_path: Path) -> None:
    """Qwen2.5's keys have biases in the hundreds, which would round away digits of bfloat16 scores."""
    make_model(tmp_path, initializer_range=0.1)
    policy = LanguagePolicy.open(config_of(tmp_path, device=device, dtype="bfloat16"), 0)
    for name, weight in policy.trained.items():
        if "k_proj.bias" in name:
            weight.data.view(2, 8)[:, 3::4] = 200.0
        elif "q_proj.bias" in name:
            weight.data.fill_(1.0)
    batch = answered(policy, QUESTIONS, (1.0, 0.0) * 8)
    apart = (flat(s.tokens for s in batch) - flat(policy.logprobs(batch))).abs()
    assert float(apart.mean()) < 0.01


def one_round(policy: LanguagePolicy) -> tuple[list[Scored], UpdateReport]:
    batch = answered(policy, QUESTIONS)
    return batch, policy.update(batch)


def opened(folder: Path, device: str, family: str = "qwen2") -> LanguagePolicy:
    make_model(folder, family)
    return LanguagePolicy.open(config_of(folder, device=device, train={"learning_rate": 1e-3}), 0)


@pytest.mark.parametrize("device", DEVICES[1:], indirect=True)
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_5", "lfm2"])
def test_a_device_computes_the_same_as_the_cpu(device: str, family: str, tmp_path: Path) -> None:
    """The values are compared in float32, before and after an update."""
    here, there = (opened(tmp_path, d, family) for d in ("cpu", device))
    batch, found = one_round(here)
    untrained = opened(tmp_path, "cpu", family)
    torch.testing.assert_close(
        flat(there.logprobs(batch)), flat(untrained.logprobs(batch)), atol=3e-4, rtol=0
    )
    report = there.update(batch)
    assert (report.loss, report.grad_norm) == pytest.approx((found.loss, found.grad_norm), rel=1e-3, abs=1e-6)
    torch.testing.assert_close(flat(there.logprobs(batch)), flat(here.logprobs(batch)), atol=1e-3, rtol=0)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_the_same_seed_on_the_same_device_gives_the_same_run(device: str, tmp_path: Path) -> None:
    """On CUDA, runs may differ by rounding: attention adds gradients in the order in which its blocks end."""
    runs, exact = [opened(tmp_path, device) for _ in range(2)], device != "cuda"
    for _ in range(3 if exact else 1):
        (first, report), (second, again) = map(one_round, runs)
        assert [s.tokens for s in first] == [s.tokens for s in second]
        assert report == again or (not exact and report.grad_norm == pytest.approx(again.grad_norm, rel=1e-3))
    for name, weight in runs[0].trained.items():
        torch.testing.assert_close(
            weight,
            runs[1].trained[name],
            atol=0 if exact else 1e-4,
            rtol=0,
            msg=lambda said, name=name: name + said,
        )


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_an_adapter_on_a_float16_base_is_trained_with_a_scaled_loss(device: str, tmp_path: Path) -> None:
    """The gradient equals float32's even if float16 alone would give 0. Too large a scale is reduced."""
    make_model(tmp_path)
    way: dict[str, Any] = {"device": device, "lora": "on", "lora_rank": 4, "train": {"max_grad_norm": 1e9}}
    exact, half = (
        LanguagePolicy.open(config_of(tmp_path, dtype=dtype, **way), 0) for dtype in ("float32", "float16")
    )
    generations = exact.generate(QUESTIONS, 4)
    rows = [
        Row((5, 6, 7), ids, advantage, None, 1e-7)
        for ids, advantage in zip(generations[0].tokens.ids, (1.0, 0.5, -0.25, -1.0), strict=True)
    ]
    wanted, found = (policy.learner.step(rows).grad_norm for policy in (exact, half))
    assert found == pytest.approx(wanted, rel=0.02) and wanted > 0
    half.learner._scale = 2.0**48
    scales = []
    while half.learner.step(rows).skipped:
        scales.append(half.learner._scale)
    assert len(scales) > 5 and half.version == 2
    half.learner._scale, half.learner.updates = 1.0, STEPS_TO_DOUBLE - 1
    assert half.learner.step(rows).grad_norm < 0.5 * wanted
    assert half.learner._scale == 2.0, "the scale grows again, however small it has become"
    half.learner._scale, half.learner.updates = 2.0, STEPS_TO_DOUBLE - 1
    half.learner.step(rows)
    next(iter(half.trained.values())).data.fill_(float("nan"))
    assert half.learner.step(rows) == UpdateReport(skipped=1)
    assert (half.learner._scale, half.learner.skipped) == (4.0, 1), (
        "the scale is not reduced if the loss is NaN"
    )


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("rows", [64, 1024])
def test_a_small_change_by_a_new_adapter_is_not_lost_to_rounding(device: str, rows: int) -> None:
    """A change of a hundredth of the last digit is kept on average, and so is its gradient."""
    place = fit.choose_device(device)

    def drawn(*shape: int, scale: float = 0.03) -> torch.Tensor:
        return (torch.randn(shape, generator=seeded(torch.device("cpu"), sum(shape))) * scale).bfloat16()

    x, weight = drawn(rows, 512, scale=1.0).to(place), drawn(1024, 512).to(place)
    down, up = drawn(16, 512).to(place), drawn(1024, 16, scale=2e-4).to(place)
    change = F.linear(F.linear(x, down), up).float()
    seen = adapted(x.requires_grad_(), weight, None, down, up)
    found = seen.detach().float() - x.detach().float() @ weight.float().T
    assert float((found * change).sum() / change.square().sum()) == pytest.approx(1, abs=0.1)
    seen.backward(seen.detach())
    expected = seen.detach().float() @ (weight.float() + up.float() @ down.float())
    assert float((x.grad - expected).norm() / expected.norm()) < 0.01  # type: ignore[operator]


@pytest.mark.parametrize("device", DEVICES[1:], indirect=True)
def test_a_checkpoint_moves_to_another_device_and_back(device: str, tmp_path: Path) -> None:
    model, place = tmp_path / "model", "there"
    policies = [opened(model, d) for d in (device, "cpu", device)]
    batch, _ = one_round(policies[0])
    for before, after in pairwise(policies):
        folder = tmp_path / place
        folder.mkdir()
        before.save(folder)
        after.restore(folder)
        assert after.version == before.version
        torch.testing.assert_close(
            flat(after.logprobs(batch)), flat(before.logprobs(batch)), atol=1e-4, rtol=0
        )
        one_round(after)  # with Adam's moments from the checkpoint
        place = "back"


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_a_generator_takes_over_the_trainers_weights_between_two_tokens(device: str, tmp_path: Path) -> None:
    trainer, writer = opened(tmp_path / "model", device), WeightWriter(tmp_path)
    other = make_model(tmp_path / "other", seed=1)
    config = config_of(other, device=device)
    between: list[Callable[[], int]] = []
    generator = LanguagePolicy.open(config, 0, between=lambda: between[0]())
    reader = WeightReader(tmp_path, generator.trained)
    passes = iter(range(99))

    def third() -> int:
        if next(passes) == 3:
            writer.publish(7, trainer.trained)
        return reader()

    between.append(third)
    (generation,) = generator.generate(["1+1?"], 4)
    assert generation.tokens.versions[0][:4] == (-1, -1, -1, 7)
    for name, weight in trainer.trained.items():
        assert torch.equal(weight, generator.trained[name]), name
    assert generator.greedy(QUESTIONS) == trainer.greedy(QUESTIONS)


@NO_CUDA
@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_5"])
def test_the_cpu_waits_for_the_gpu_once_per_token(family: str, tmp_path: Path) -> None:
    """CUDA's debug mode counts waits that test_architectures.py cannot see on a CPU."""
    policy, counts = opened(tmp_path, "cuda", family), list[int]()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            decode(
                policy.network,
                [list(range(5, 9 + 3 * i)) for i in range(3)],
                4,
                Sampling(12, 64, frozenset(range(0, 250, 8)), 1.0),
                seeded(policy.device, 0),
                9999,
                rest=lambda: counts.append(sum("synchroniz" in str(w.message) for w in found)),
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert {after - before for before, after in pairwise(counts[1:])} == {1}


@NO_CUDA
@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_5"])
def test_an_update_waits_for_the_gpu_only_for_its_metrics_and_its_gradient_norm(
    family: str, tmp_path: Path
) -> None:
    policy = opened(tmp_path, "cuda", family)
    batch, _ = one_round(policy)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            policy.update(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("synchroniz" in str(w.message) for w in found) == 2


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2", "qwen3_5"])
def test_decoding_with_fixed_shapes_gives_the_same_as_with_growing_shapes(
    device: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The read cache takes two sizes; rows and whole questions end early. On CUDA, steps are recorded."""
    network, place = opened(tmp_path, device, family).network, choose_device(device)
    prompts = [list(range(5, 9 + 12 * i)) for i in range(4)]
    room = [80, 80, 9, 80, 80, 80, 4, 4, 4, 70, 2, 80]
    assert adopt(network)
    samples = []
    for fixed in (False, True):
        with torch.inference_mode():
            rows = SharedPrefix(network, prompts, 3, 80, place, blocks=blocks_of(network), fixed=fixed)
            samples.append(decode_rows(rows, room, Sampling(80, 999, frozenset(), 0.0), seeded(place, 0)))
    assert "without CUDA graphs" not in caplog.text
    for growing, same in zip(*samples, strict=True):
        assert growing.ids == same.ids
        assert growing.logprobs == pytest.approx(same.logprobs, abs=1e-4 if device == "cpu" else 1e-3)


def test_a_failed_cuda_graph_recording_frees_its_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise torch would count all later allocations as part of the recording and free no memory."""
    done: list[Any] = []

    class Failing:
        def capture_begin(self, pool: Any, **_: Any) -> None:
            done.append(("begin", pool))

        def capture_end(self) -> None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def step(tokens: Any) -> Any:
        if done == [("begin", (0, 7))]:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
        return tokens

    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name, value in {
        "CUDAGraph": Failing, "current_stream": lambda: stream, "graph_pool_handle": lambda: (0, 7),
        "stream": lambda _: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(recorded_step, "_stream", lambda _: stream)
    monkeypatch.setattr(recorded_step, "_failed", [])
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: done.append((name, *args)))
    tokens = SimpleNamespace(device=torch.device("cuda", 0), clone=lambda: None)
    for recorded in (RecordedStep(), RecordedStep()):
        for _ in range(3):
            assert recorded(step, tokens) is tokens  # type: ignore[arg-type]
    assert done == [
        ("begin", (0, 7)),
        ("_cuda_endAllocateToPool", 0, (0, 7)),
        ("_cuda_releasePool", 0, (0, 7)),
    ]
    (said,) = caplog.messages
    assert said.endswith("more slowly: CUDA error: operation not permitted when stream is capturing")


def test_no_step_is_recorded_on_amd_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls AMD GPUs "cuda" too; on them, a recording that fails ends the process."""
    for hip, recorded in ((None, ["cuda"]), ("7.2", [])):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert [name for name in ("cuda", "mps", "cpu") if records(torch.device(name))] == recorded


def large(device: str) -> Any:
    """Return a network whose activations take most of the memory of an update."""
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
    """Return a CUDA device; after the test, torch may use all of its memory again."""
    device = torch.device("cuda", 0)
    release_cached(device)
    yield device
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    release_cached(device)


@NO_CUDA
@pytest.mark.gpu
def test_batches_become_smaller_if_the_device_is_full(
    whole_device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """The real allocator fails: it is limited to six tenths of the memory that the whole batch needs."""
    rows = [
        Row(tuple(range(q, q + 64)), tuple(range(i, i + 192)), 1.0, None, 1e-3)
        for q in range(4)
        for i in range(8)
    ]
    learning = Learning(TrainConfig(max_grad_norm=1e9, kl_every=0), 1.0, 10**6)
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
def test_a_round_takes_no_more_memory_than_planned(
    lora: str, dtype: str, whole_device: torch.device, tmp_path: Path
) -> None:
    """The round takes at least a fifth of the plan; otherwise, models that fit would be rejected.

    The plan leaves room for libraries, whose memory torch does not count.
    """
    make_model(
        tmp_path,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        layer_types=["full_attention"] * 8,
        vocab_size=32_000,
        max_position_embeddings=1024,
    )
    before = torch.cuda.memory_allocated(whole_device)
    torch.cuda.reset_peak_memory_stats(whole_device)
    policy = LanguagePolicy.open(
        config_of(tmp_path, device="cuda", dtype=dtype, lora=lora, new_tokens=128), 0
    )
    batch = answered(policy, [f"{i} " * 100 for i in range(4)], (1.0, 0.0) * 4)
    for _ in range(2):  # the first update creates Adam's moments
        policy.update(batch)
    taken = torch.cuda.max_memory_allocated(whole_device) - before
    assert 0.2 * policy._loaded.plan.peak < taken < policy._loaded.plan.peak
