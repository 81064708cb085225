"""Every failure to load a model gives the user a message with the cause and a remedy.

Tokenizer files that cannot work are reported as well, and no text is lost.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from p2p.types import PeerId
from swarmd.cli.app import main
from swarmd.config.config import ModelConfig, NodeConfig
from swarmd.errors import NoModel
from swarmd.policy import language_policy
from swarmd.policy.export import export
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.chat import Chat
from swarmd.policy.models.device import (
    _cuda_fault,
    cgroup_rooms,
    choose_device,
    choose_dtype,
    environment,
    free_memory,
    is_out_of_memory,
    limit_memory,
    quick_at_bf16,
    threads_for,
    unused_gpu,
)
from swarmd.policy.models.doctor import document, examine, explain
from swarmd.policy.models.hub import locate
from swarmd.policy.models.load import load_model
from swarmd.policy.models.memory_plan import WORKSPACE_BYTES
from swarmd.policy.models.preflight import cgroup_cores
from swarmd.policy.models.tiny import WEIGHTS
from swarmd.policy.models.tokenizer import PROBES, load_tokenizer
from swarmd.state.status import ModelDescription
from swarmd.types import Completion, Rollout, Scored, TaskRef
from tests.doubles import TIMEOUT_S
from tests.swarmd.policy.conftest import (
    CHAT,
    SPECIALS,
    config_of,
    edit_json,
    external,
    files_of,
    local,
    make_model,
    network_of,
    open_policy,
)

CPU = torch.device("cpu")


def load(name: Path | str, free: int | None = None, **changes):
    settings = {"device": "cpu", "dtype": "float32"} | changes
    return load_model(
        ModelConfig(name=str(name), **settings), seed=0, free=free_memory if free is None else lambda _: free
    )


def test_the_description_names_the_loaded_model(folders: dict[str, Path]) -> None:
    policy = open_policy(folders["llama"])
    assert policy.description == ModelDescription(
        model=str(folders["llama"].resolve()),
        device="cpu",
        dtype="float32",
        parameters=load(folders["llama"]).shape.parameters,
        new_tokens=12,
        context=128,
        keeps_first=True,
    )


def test_all_weights_of_a_small_model_are_trained_in_float32(folders: dict[str, Path]) -> None:
    loaded = load(folders["qwen2"], dtype="auto", device="auto")
    assert (loaded.plan.lora_rank, loaded.dtype, loaded.network.training) == (None, torch.float32, False)
    assert all(p.requires_grad for p in loaded.network.parameters())


def test_the_dtype_in_the_models_configuration_is_ignored(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    edit_json(tmp_path / "config.json", dtype="bfloat16")
    assert next(load(tmp_path).network.parameters()).dtype == torch.float32
    assert next(load(tmp_path, dtype="bfloat16").network.parameters()).dtype == torch.bfloat16


NO_FOLDER = r"there is no folder.*Use one of tiny, tiny-latent, smollm2-135m"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nowhere", NO_FOLDER),
        ("~/no-such-model-here", NO_FOLDER),
        ("~nobody-here/model", NO_FOLDER),
        ("/" + "x" * 300, NO_FOLDER),
        ("a/b/c", "there is no model called"),
        ("a/b--c", "is no model's name"),
    ],
)
def test_an_invalid_model_name_is_rejected(name: str, said: str) -> None:
    with pytest.raises(NoModel, match=said):
        load(name)


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def cut_weights(part: float) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: int(part * len(whole))])

    return spoil


def remove(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def edited(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "config.json", **changes)


WRONG_KIND: list[dict[str, Any]] = [
    {"max_position_embeddings": None},
    {"num_hidden_layers": "two"},
    {"hidden_size": -1},
]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove("config.json"), r"no config\.json.*save_pretrained"),
        *(
            (write("config.json", text), "Download the model again")
            for text in (b"{", b"\xff\xfe", b"[]", b"null", b"3")
        ),
        (write("config.json", b'{"model_type": "perpetuum-mobile"}'), "upgrade it"),
        (write("config.json", b'{"model_type": "vit"}'), "no causal language model"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            r"no weights in safetensors format.*never loaded",
        ),
        *((cut_weights(part), r"weights of .* cannot be loaded.*again") for part in (0.01, 0.5, 0)),
        (edited(hidden_size=64), "weights of"),
        *((edited(**wrong), r"cannot read the configuration|cannot be built") for wrong in WRONG_KIND),
        (edited(num_hidden_layers=3, layer_types=["full_attention"] * 3), "are missing"),
        (remove("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    ],
)
def test_damaged_model_folders_are_rejected(
    spoil: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    spoil(make_model(tmp_path))
    with pytest.raises(NoModel, match=message):
        load(tmp_path)


def test_a_tokenizer_with_more_tokens_than_the_network_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(NoModel, match=r"has number 1\d\d for '.+', and its network has only 100"):
        load(make_model(tmp_path, "llama", vocab_size=100))


@pytest.mark.parametrize("special", [True, False])
def test_an_added_token_without_an_embedding_row_is_encoded_as_ordinary_text(
    special: bool, tmp_path: Path
) -> None:
    """Gemma 3 1B has 262,145 tokens but only 262,144 embedding rows, so no text may use the last token."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(make_model(tmp_path, "llama"))
    tokenizer.add_tokens(["<image>"], special_tokens=special)
    tokenizer.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    rows = loaded.network.get_input_embeddings().num_embeddings
    assert len(tokenizer) == rows + 1 and len(loaded.tokenizer) == rows
    chat = Chat(loaded.tokenizer, "", ours=True)
    text = "see <image> and <answer>"
    for ids in (chat.prompt(text), chat.encode(Completion(text, ended=True), 99)):
        assert max(ids) < rows and text in loaded.tokenizer.decode(ids)


def test_a_folder_without_a_tokenizer_gives_an_error_that_says_so(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(NoModel, match="holds no tokenizer"):
        load(tmp_path)


OWN_CODE = {
    "model_type": "own",
    "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
}
OWN_TOKENIZER = {"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": ["code.Tok", None]}}


@pytest.mark.parametrize(
    ("file", "changes"), [("config.json", OWN_CODE), ("tokenizer_config.json", OWN_TOKENIZER)]
)
def test_code_in_the_repository_is_never_run(file: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A model with its own code is rejected; a tokenizer with its own code may load without that code."""
    mark = make_model(tmp_path, "llama") / "ran"
    (tmp_path / "code.py").write_text(
        f"open({str(mark)!r}, 'w')\nclass Config: ...\nclass Model: ...\nclass Tok: ...\n"
    )
    edit_json(tmp_path / file, **changes)
    with pytest.raises(NoModel, match="never run") if file == "config.json" else contextlib.suppress(NoModel):
        load(tmp_path)
    assert not mark.exists()


def test_pickled_weights_next_to_safetensors_are_never_opened(tmp_path: Path) -> None:
    make_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(NoModel, match=r"its weights are called other\.safetensors"):
        load(tmp_path)


def test_memory_is_checked_before_the_weights_are_read(tmp_path: Path) -> None:
    make_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NoModel, match=r"not enough memory.*at least \d+\.\d MB.*0\.0 MB free"):
        load(tmp_path, free=1000)


def test_the_loaded_model_matches_its_memory_plan(folders: dict[str, Path]) -> None:
    whole = load(folders["llama"])
    assert load(folders["llama"], free=(whole.plan.least + WORKSPACE_BYTES) * 10 // 9 + 2).plan.fits
    with pytest.raises(NoModel, match="not enough memory"):
        load(folders["llama"], free=(whole.plan.least + WORKSPACE_BYTES) * 10 // 9 - 2)
    adapted = load(folders["llama"], lora="on", lora_rank=4)
    assert (adapted.plan.lora_rank, adapted.plan.dtype) == (4, "float32")
    assert adapted.plan.trained == sum(p.numel() for p in adapted.network.parameters() if p.requires_grad)


def test_a_new_adapter_changes_no_output_and_depends_on_its_seed(folders: dict[str, Path]) -> None:
    ids = torch.tensor([[5, 6, 7]])
    base = load(folders["qwen3"])
    state = torch.random.get_rng_state()
    # dtype is fixed because a timed measurement would choose it otherwise.
    config = ModelConfig(name=str(folders["qwen3"]), device="cpu", dtype="float32", lora="on")
    one, same, other = (load_model(config, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.allclose(one.network(ids).logits, base.network(ids).logits, atol=1e-6)
    first = [next(p for n, p in x.network.named_parameters() if "lora_A" in n) for x in (one, same, other)]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])
    assert one.fingerprint == base.fingerprint


def test_the_fingerprint_depends_on_the_weights_and_not_on_the_dtype(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Most models have bfloat16 weights, and float16 cannot represent the smallest of these."""
    network = network_of(folders["qwen2"]).to(torch.bfloat16)
    network.model.norm.weight.data.mul_(3.3e-6)
    shutil.copytree(folders["qwen2"], tmp_path / "model")
    network.save_pretrained(tmp_path / "model")
    found = {
        dtype: load(tmp_path / "model", dtype=dtype, lora="on").fingerprint
        for dtype in ("float32", "bfloat16", "float16")
    }
    assert len(set(found.values())) == 1
    assert load(make_model(tmp_path / "other", "qwen2", seed=1)).fingerprint not in found.values()


def test_an_absent_device_is_rejected() -> None:
    for device, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())):
        refused = pytest.raises(NoModel, match=rf"'{device}' was asked for.*--device auto")
        with contextlib.nullcontext() if there else refused:
            choose_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA computes here")
@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_gpu_that_torch_has_no_kernels_for_is_rejected(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reports such a GPU as available nevertheless, for example a GTX 1080 Ti with CUDA 13."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(NoModel, match=r"cannot compute on it: Torch not .*UV_TORCH_BACKEND=cu126.*--device"):
        choose_device(wanted)


def test_a_gpu_is_rejected_if_another_gpu_of_the_machine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch queries all GPUs before it uses one of them (pytorch/pytorch#107300)."""

    def ones(*_: object, **__: object) -> None:
        raise torch.cuda.DeferredCudaCallError("device < num_gpus\n\nCUDA call was originally invoked at:")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr("swarmd.policy.models.device._cuda_fault", _cuda_fault.__wrapped__)
    with pytest.raises(NoModel, match=r"compute on it: device < num_gpus\. .* in CUDA_VISIBLE_DEVICES"):
        choose_device("auto")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA computes here")
def test_a_note_tells_that_a_gpu_is_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may be too old for torch's CUDA, or torch may be the build for CPUs."""
    monkeypatch.setattr("swarmd.policy.models.device.driver_there", lambda: True)
    (note,) = unused_gpu("auto", CPU)
    assert "a GPU driver is installed, and this torch" in note and "(Torch not compiled with CUDA" in note
    assert not unused_gpu("cpu", CPU)
    monkeypatch.setattr("swarmd.policy.models.device.driver_there", lambda: False)
    assert not unused_gpu("auto", CPU)


@pytest.mark.parametrize(
    ("hip", "visible", "child"),
    [
        (None, {}, {"CUDA_VISIBLE_DEVICES": "1"}),
        (None, {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
        ("7.2", {}, {"HIP_VISIBLE_DEVICES": "1"}),
        ("7.2", {"CUDA_VISIBLE_DEVICES": "2,3"}, {"HIP_VISIBLE_DEVICES": "3"}),
        ("7.2", {"HIP_VISIBLE_DEVICES": "4,5"}, {"HIP_VISIBLE_DEVICES": "5"}),
    ],
)
def test_each_child_process_sees_only_its_own_gpu(
    hip: str | None, visible: dict[str, str], child: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in visible.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("swarmd.policy.models.device.choose_device", torch.device)
    assert environment(ModelConfig(device="cuda"), 3) == child


@pytest.mark.parametrize(("available", "free"), [(3 * 10**9, 3 * 10**9), (14 * 10**9, 9 * 10**9)])
def test_memory_that_other_programs_use_is_not_free_on_mps(
    available: int, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 11 * 10**9)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2 * 10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    assert free_memory(torch.device("mps")) == free


@pytest.mark.parametrize(
    ("integrated", "hip", "free"), [(0, None, 3 * 10**9), (1, None, 7 * 10**9), (1, "7.2", 3 * 10**9)]
)
def test_the_page_cache_counts_as_free_if_a_gpu_shares_the_main_memory(
    integrated: int, hip: str | None, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DGX Spark and Jetson share main memory. An integrated AMD GPU has reserved memory instead."""
    about = SimpleNamespace(total_memory=16 * 10**9, is_integrated=integrated)
    monkeypatch.setattr(torch.version, "hip", hip)
    for name, value in {
        "get_device_properties": about, "get_per_process_memory_fraction": 1.0,
        "mem_get_info": (6 * 10**9, 16 * 10**9), "memory_reserved": 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=14 * 10**9))
    assert free_memory(torch.device("cuda", 0), processes=2) == free
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 14 * 10**9)
    assert free_memory(torch.device("cuda", 0), processes=2) == 2 * 10**9, (
        "torch's reserved memory is not subtracted"
    )


def test_a_containers_limits_apply_to_memory_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psutil reports the machine's memory, but the kernel kills a container that exceeds its own limit."""
    own, inner = tmp_path / "own", tmp_path / "groups" / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder, most, used, cached in ((inner.parent, "9000", 5000, 1000), (inner, "max", 200, 0)):
        (folder / "memory.max").write_text(most + "\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\nactive_file 3\n")
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("250000 100000\n")
    own.write_text("0::/outer/inner\n")
    assert list(cgroup_rooms(own, tmp_path / "groups")) == [5000]
    assert list(cgroup_cores(own, tmp_path / "groups")) == [2.5]
    # The same limit, read inside a container.
    own.write_text("1:name=systemd:/x\n0::/\n")
    assert list(cgroup_rooms(own, inner.parent)) == [5000]
    assert not list(cgroup_rooms(tmp_path / "nothing", tmp_path))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8000))
    for rooms, free in (([], 8000), ([5000, 6000], 5000), ([-1], 0)):
        monkeypatch.setattr("swarmd.policy.models.device.cgroup_rooms", lambda rooms=rooms: rooms)
        assert free_memory(CPU) == free
    monkeypatch.setattr(psutil, "cpu_count", lambda *, logical: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    for cores, threads in (([], 64), ([2.5, 40], 2), ([0.5], 1)):
        monkeypatch.setattr("swarmd.policy.models.preflight.cgroup_cores", lambda cores=cores: cores)
        assert threads_for(NodeConfig(), 10**9) == threads


def test_an_allocation_on_mps_fails_before_the_machine_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", shares.append)
    limit_memory(NodeConfig(), torch.device("mps"))
    assert shares == [1.0]


def test_a_worker_with_its_own_gpu_gets_all_the_memory_that_the_limit_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker sees only its own GPU, so it cannot count the other workers that use this GPU."""
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = NodeConfig.model_validate(
        {"workers": {"generators": 3, "trainers": 1}, "limits": {"gpu_memory": "60 %"}}
    )
    for sharing in (1, 2):
        limit_memory(config, torch.device("cuda", 0), sharing)
    assert shares == [0.6, 0.3]
    told: list[int] = []
    monkeypatch.setattr(language_policy, "limit_memory", lambda _config, _device, count: told.append(count))
    make_model(tmp_path)
    LanguagePolicy.open(config_of(tmp_path), 0, 2)
    assert told == [2]


WHOLE, ADAPTER, NEITHER = {"trained_whole": True}, {"adapter": True}, {}


@pytest.mark.parametrize(
    ("asked", "device", "way", "quick", "dtype"),
    [
        ("bfloat16", "cpu", WHOLE, False, torch.bfloat16),
        ("float32", "cpu", NEITHER, True, torch.float32),
        ("float16", "cpu", ADAPTER, True, torch.float16),
        ("auto", "cpu", NEITHER, True, torch.bfloat16),
        ("auto", "cpu", NEITHER, False, torch.float32),
        ("auto", "cpu", WHOLE, True, torch.float32),
        ("auto", "cuda", ADAPTER, True, torch.bfloat16),
        ("auto", "cuda", ADAPTER, False, torch.float16),
        ("nf4", "cuda", ADAPTER, True, torch.bfloat16),
        ("nf4", "cuda", ADAPTER, False, torch.float16),
        ("nf4", "cpu", ADAPTER, False, torch.bfloat16),
    ],
)
def test_the_dtype_is_the_configured_one_or_with_auto_the_faster_one(
    asked: str, device: str, way: dict[str, bool], quick: bool, dtype: torch.dtype
) -> None:
    way = {"trained_whole": False} | way
    assert choose_dtype(asked, torch.device(device), **way, probe=lambda _: quick) == dtype


def test_the_speed_of_bfloat16_on_this_machine_is_measured() -> None:
    assert quick_at_bf16(CPU) in (True, False)


def test_other_programs_do_not_change_the_measured_speed_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bfloat16 product waits for a core and the float32 product computes; only CPU time may count."""

    class Product:
        def __init__(self, *_: int, dtype: torch.dtype) -> None:
            self.waits = dtype == torch.bfloat16

        def __matmul__(self, _: object) -> None:
            if self.waits:
                time.sleep(0.005)
            begun = time.thread_time()
            while time.thread_time() < begun + 0.001 * (not self.waits):
                pass

    monkeypatch.setattr(torch, "ones", Product)
    assert quick_at_bf16(CPU)


def test_float16_without_an_adapter_is_rejected() -> None:
    with pytest.raises(
        NoModel, match=r"'float16' works only if an adapter is trained\. Set model\.lora to 'on'"
    ):
        choose_dtype("float16", CPU, trained_whole=False)


@pytest.mark.parametrize(
    ("changes", "parameters", "threads"),
    [
        ({}, 14_000_000, 1),
        ({}, 500_000_000, 8),
        ({"limits": {"cpu": "25 %"}}, 500_000_000, 2),
        ({"limits": {"cpu": "4 %"}}, 500_000_000, 1),
        ({"workers": {"generators": 3, "trainers": 1}}, 500_000_000, 2),
        ({"model": {"threads": 3}}, 14_000_000, 3),
        ({"model": {"threads": 3}, "limits": {"cpu": "4 %"}}, 500_000_000, 3),
    ],
)
def test_a_large_model_uses_the_cores_that_the_limits_allow(
    changes: dict[str, Any], parameters: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 16 if logical else 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert threads_for(NodeConfig.model_validate(changes), parameters) == threads


# Error messages that torch raises or that users quote (pytorch/pytorch, ComfyUI, QwenLM/Qwen3 on GitHub), and
# similar messages with another cause.
SAID = {
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call": (
        True
    ),
    "CUDA driver error: out of memory": True,
    "HIP error: out of memory\nSearch for `hipErrorOutOfMemory' in the documentation": True,
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": True,
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED": True,
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`": True,
    "MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 GB, max allowed: 6.80 GB).": (
        True
    ),
    "Invalid buffer size: 9.75 GB": True,
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 8 bytes.": True,
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: "
    "you tried to allocate 8 bytes.": True,
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":995, please '
    "report a bug to PyTorch.": True,
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)": False,
    "CUDA error: an illegal memory access was encountered": False,
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": False,
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input.": False,
}


@pytest.mark.parametrize("said", SAID)
def test_every_known_out_of_memory_message_is_recognized(said: str) -> None:
    assert is_out_of_memory(RuntimeError(said)) is SAID[said]


def test_out_of_memory_errors_of_this_machine_are_recognized() -> None:
    for allocate in (lambda: torch.empty(2**60, dtype=torch.uint8), lambda: bytearray(2**60)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"))
    assert not is_out_of_memory(ValueError("out of memory"))


def rewrite_tokenizer(folder: Path, backend: Tokenizer, **settings: str) -> None:
    """Replace the model's tokenizer by the one that `save_pretrained` writes for this backend."""
    for old in ("tokenizer.json", "tokenizer_config.json"):
        (folder / old).unlink()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIALS[0], chat_template=CHAT, **settings
    ).save_pretrained(folder)


def without_digits(folder: Path) -> None:
    """Make a vocabulary of single letters and signs, in which a digit becomes the unknown token."""
    signs = sorted({c for text in PROBES for c in text if not c.isdigit()})
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, "<unk>", *signs])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([*SPECIALS, "<unk>"])
    rewrite_tokenizer(folder, backend, unk_token="<unk>")


def in_lower_case(folder: Path) -> None:
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.Lowercase()
    rewrite_tokenizer(folder, backend)


def answer_tags_are_control_tokens(folder: Path) -> None:
    """Make a tokenizer that drops the answer tag from ordinary text."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.Replace("<answer>", "")
    rewrite_tokenizer(folder, backend)


LOSES = r"cannot represent ordinary questions and answers: .*{}.*Choose another model"


@pytest.mark.parametrize(
    ("made", "spoil", "message"),
    [
        ({"chat_template": None}, Path, r"no chat template.*instruct model"),
        ({"eos": None, "eos_token_id": None}, Path, r"no end-of-sequence.*eos_token"),
        ({}, without_digits, LOSES.format(r"no token for '.*0123456789")),
        ({}, in_lower_case, LOSES.format("no token for 'TWY'")),
        ({}, answer_tags_are_control_tokens, LOSES.format("comes back as")),
    ],
)
def test_tokenizers_that_are_incomplete_or_lose_text_are_rejected(
    made: dict[str, Any], spoil: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    spoil(make_model(tmp_path, "llama", **made))
    with pytest.raises(NoModel, match=message):
        load(tmp_path)
    found = examine(NodeConfig(model=ModelConfig(name=str(tmp_path), device="cpu")))
    assert re.search(message, str(document(found, 1.0)["message"]))
    with pytest.raises(NoModel, match=message):
        found.require()


def test_the_doctor_names_the_end_tokens_and_the_template(tmp_path: Path) -> None:
    """Only the template has the token that ends a turn, and the template does not open an answer."""
    turns = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|system|>' }}{% endfor %}"
    found = examine(config_of(make_model(tmp_path, "llama", chat_template=turns)))
    told = document(found, 1.0)
    assert told["ends"] == ["<|endoftext|>", "<|system|>"] and len(told["notes"]) == 2
    text = "\n".join(explain(found, 1.0))
    assert "answers end at          <|endoftext|> <|system|>" in text and "does not open an answer" in text
    with contextlib.closing(open_policy(tmp_path)) as policy:
        assert [*policy.notes] == told["notes"]


def digits_in_pairs(folder: Path) -> None:
    """Make a tokenizer file that joins two digits.

    For this model type, transformers would build another tokenizer, which separates digits.
    """
    document = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["12"] = len(vocabulary)
    document["model"]["merges"] = [["1", "2"]]
    (folder / "tokenizer.json").write_text(json.dumps(document))


def test_the_tokenizer_file_is_used_even_if_transformers_would_ignore_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(tmp_path, "qwen2", vocab_size=300)
    digits_in_pairs(tmp_path)
    text = "<answer>12</answer>"
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert AutoTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=False)["input_ids"] != file, (
        "transformers already follows the file, so this test shows nothing"
    )
    policy = open_policy(tmp_path)
    assert (
        policy._chat.encode(external("?", [(text, False)] * 2, (0.0, 1.0)).rollout.completions[0], 99) == file
    )
    assert (
        "as a Qwen2Tokenizer, which splits text differently than the file says: the file is used"
        in caplog.text
    )
    assert policy.generate(["12+12?"], 2)[0].completions[0] is not None
    made = export(files_of(policy), [], "sapo-9", tmp_path / "out").folder
    written = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert written.encode(text, add_special_tokens=False).ids == file


def test_tokenizers_of_the_included_models_match_their_files(caplog: pytest.LogCaptureFixture) -> None:
    network = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(num_embeddings=10**6))
    for name in WEIGHTS:
        load_tokenizer(locate(name, None), network)  # type: ignore[arg-type]
    assert "the file is used" not in caplog.text


def test_a_system_prompt_that_fills_the_context_is_rejected(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    with pytest.raises(
        NoModel,
        match=r"context of 128 tokens, and the prompt takes \d{3} even .*: .*shorter model\.system_prompt",
    ):
        open_policy(tmp_path, system_prompt="x" * 130)


def test_too_long_answers_and_questions_do_not_stop_a_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers are truncated and questions left out, both with a message; the rest is trained on."""
    policy = open_policy(make_model(tmp_path, "llama"), new_tokens=500)
    assert (
        "answers of" in caplog.text
        and "end before the 500 tokens of generate.max_new_tokens: its context is 128 tokens" in caplog.text
    )
    short, full = policy.generate(["1+1?", "x" * 200], 4)
    assert "1 of 2 questions fill the model's context of 128 tokens" in caplog.text
    assert [c.text for c in full.completions] == [""] * 4 and full.tokens.ids == ((),) * 4
    assert all(0 < len(ids) <= 126 for ids in short.tokens.ids)
    report = policy.update(
        [
            local("x" * 200, full, (1.0, 0.0, 0.0, 1.0)),
            local("1+1?", short, (1.0, 0.0, 0.0, 1.0)),
            external("2+2?", [("y" * 1000, True), ("z", True)], (1.0, 0.0)),
        ]
    )
    assert report.tokens > 0 and report.skipped == 0
    assert "Answers end with the model's context of 128 tokens" in "\n".join(
        explain(examine(NodeConfig(model=ModelConfig(name=str(tmp_path), device="cpu"))), 1.0)
    )


def test_a_folder_with_an_adapter_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct"})
    )
    with pytest.raises(
        NoModel, match=r"holds an adapter, not a model.*--model Qwen/Qwen2\.5-0\.5B-Instruct,.*merge_and"
    ):
        open_policy(tmp_path)
    for content in ("{", "[]", "{}"):
        (tmp_path / "adapter_config.json").write_text(content)
        with pytest.raises(NoModel, match=r"adapter|no config\.json"):
            open_policy(tmp_path)


@pytest.mark.net
@pytest.mark.slow
def test_join_and_doctor_report_a_bad_model_with_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model", "llama")
    without_digits(model)
    environment = os.environ | {"SWARMD_SWARM_ENGINE": "none"}
    common = ["--model", str(model), "--device", "cpu"]
    command = [
        sys.executable,
        "-m",
        "swarmd",
        "join",
        *common,
        "--state-dir",
        str(tmp_path / "state"),
        "--rounds",
        "1",
    ]
    joined = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False
    )
    for status, said in (
        (joined.returncode, joined.stderr),
        (main(["doctor", "model", *common]), capsys.readouterr().err),
    ):
        assert status == 3, said
        assert "cannot represent ordinary questions and answers" in said and "Traceback" not in said


def test_answering_and_training_report_their_progress(folders: dict[str, Path]) -> None:
    told = list[tuple[int, int, float]]()
    with contextlib.closing(open_policy(folders["llama"], new_tokens=6)) as policy:
        policy.watch(lambda *done: told.append(done))
        answers = policy.generate(["1+1?", "2+2?"], 4)
        shares = [share for _, _, share in told]
        assert shares == sorted(shares) and told[-1][1:] == (8, 1.0) and {of for _, of, _ in told} == {8}
        told.clear()
        texts = tuple(answer for generation in answers for answer in generation.completions)
        rollout = Rollout(TaskRef("sums", 1), texts, PeerId("me"))
        policy.update([Scored(rollout, "1+1?", (1.0, *[0.0] * 7), 1)])
        assert told and told[-1][0] == told[-1][1] and told[-1][2] == 1.0
