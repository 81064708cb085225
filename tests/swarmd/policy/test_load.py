"""Every way a model can fail to load has a message with cause and remedy."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swarmd.config.config import ModelConfig, NodeConfig
from swarmd.errors import NoModel
from swarmd.policy.models.device import (
    choose_device,
    choose_dtype,
    free_memory,
    is_out_of_memory,
    threads_for,
)
from swarmd.policy.models.doctor import document, examine
from swarmd.policy.models.load import load_model
from swarmd.policy.models.memory_plan import WORKSPACE_BYTES
from tests.swarmd.policy.conftest import QWEN_05B, edit_json, make_model, network_of, open_policy

CPU = torch.device("cpu")


def load(name: Path | str, free: int | None = None, **changes):
    settings = {"device": "cpu", "dtype": "float32"} | changes
    return load_model(
        ModelConfig(name=str(name), **settings), seed=0, free=free_memory if free is None else lambda _: free
    )


def test_the_description_names_the_loaded_model(folders: dict[str, Path]) -> None:
    policy = open_policy(folders["llama"])
    assert policy.description == {
        "model": str(folders["llama"].resolve()),
        "revision": None,
        "device": "cpu",
        "dtype": "float32",
        "parameters": load(folders["llama"]).parameters,
        "lora": None,
        "keeps_first": True,
    }
    json.dumps(dict(policy.description))


def test_small_models_are_trained_whole_and_in_float32(folders: dict[str, Path]) -> None:
    loaded = load(folders["qwen2"], dtype="auto", device="auto")
    assert (loaded.lora_rank, loaded.dtype, loaded.network.training) == (None, torch.float32, False)
    assert all(p.requires_grad for p in loaded.network.parameters())


def test_checkpoint_precision_is_not_taken_over(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    edit_json(tmp_path / "config.json", dtype="bfloat16")
    assert next(load(tmp_path).network.parameters()).dtype == torch.float32
    assert next(load(tmp_path, dtype="bfloat16").network.parameters()).dtype == torch.bfloat16


NO_FOLDER = r"there is no folder.*Use one of tiny, tiny-latent, qwen2\.5-0\.5b"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nowhere", NO_FOLDER),
        ("~/no-such-model-here", NO_FOLDER),
        ("~nobody-here/model", NO_FOLDER),
        ("/" + "x" * 300, NO_FOLDER),
        ("a/b/c", "is no model's name"),
        ("a/b--c", "is no model's name"),
    ],
)
def test_a_name_of_no_model_is_refused(name: str, said: str) -> None:
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
        (edited(num_hidden_layers=3, layer_types=["full_attention"] * 3), "not all there"),
        (remove("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    ],
)
def test_damaged_model_folders_are_refused(
    spoil: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    spoil(make_model(tmp_path))
    with pytest.raises(NoModel, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"chat_template": None}, r"no chat template.*instruct model"),
        ({"eos": None}, r"no end-of-sequence.*eos_token"),
        ({"vocab_size": 100}, "do not belong together"),
    ],
)
def test_incomplete_tokenizers_are_refused(made: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(NoModel, match=message):
        load(make_model(tmp_path, "llama", **made))
    if "vocab_size" not in made:
        found = examine(NodeConfig(model=ModelConfig(name=str(tmp_path), device="cpu")))
        assert re.search(message, str(document(found)["message"]))
        with pytest.raises(NoModel, match=message):
            found.require()


OWN_CODE = {
    "model_type": "own",
    "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
}
OWN_TOKENIZER = {"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": ["code.Tok", None]}}


@pytest.mark.parametrize(
    ("file", "changes"), [("config.json", OWN_CODE), ("tokenizer_config.json", OWN_TOKENIZER)]
)
def test_code_in_the_repository_is_never_run(file: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A model of its own is refused; a tokenizer of its own may do without its code."""
    mark = make_model(tmp_path, "llama") / "ran"
    (tmp_path / "code.py").write_text(
        f"open({str(mark)!r}, 'w')\nclass Config: ...\nclass Model: ...\nclass Tok: ...\n"
    )
    edit_json(tmp_path / file, **changes)
    with pytest.raises(NoModel, match="never run") if file == "config.json" else contextlib.suppress(NoModel):
        load(tmp_path)
    assert not mark.exists()


def test_pickled_weights_beside_other_safetensors_are_never_opened(tmp_path: Path) -> None:
    make_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(NoModel, match="cannot be loaded"):
        load(tmp_path)


def test_memory_is_checked_before_weights_are_looked_at(tmp_path: Path) -> None:
    make_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NoModel, match=r"not enough memory.*at least \d+\.\d\d MB.*0\.00 MB free"):
        load(tmp_path, free=1000)


def test_what_is_loaded_is_what_was_planned(folders: dict[str, Path]) -> None:
    whole = load(folders["llama"])
    assert load(folders["llama"], free=(whole.plan.least + WORKSPACE_BYTES) * 10 // 9 + 2).plan.fits
    with pytest.raises(NoModel, match="not enough memory"):
        load(folders["llama"], free=(whole.plan.least + WORKSPACE_BYTES) * 10 // 9 - 2)
    adapted = load(folders["llama"], lora="on", lora_rank=4)
    assert (adapted.plan.lora_rank, adapted.plan.dtype) == (4, "float32")
    assert adapted.plan.trained == sum(p.numel() for p in adapted.network.parameters() if p.requires_grad)


def test_adapter_starts_at_nothing_and_by_its_seed(folders: dict[str, Path]) -> None:
    ids = torch.tensor([[5, 6, 7]])
    base = load(folders["qwen3"])
    state = torch.random.get_rng_state()
    # Else a timed probe chooses
    config = ModelConfig(name=str(folders["qwen3"]), device="cpu", dtype="float32", lora="on")
    one, same, other = (load_model(config, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.allclose(one.network(ids).logits, base.network(ids).logits, atol=1e-6)
    first = [next(p for n, p in x.network.named_parameters() if "lora_A" in n) for x in (one, same, other)]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])
    assert one.fingerprint == base.fingerprint


def test_fingerprint_tells_weights_apart_and_not_precisions(folders: dict[str, Path], tmp_path: Path) -> None:
    """Weights of today's models are bfloat16. float16 has no such small ones."""
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


def test_an_absent_device_is_refused() -> None:
    for device, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())):
        refused = pytest.raises(NoModel, match=rf"'{device}' was asked for.*--device auto")
        with contextlib.nullcontext() if there else refused:
            choose_device(device)


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
    ],
)
def test_the_dtype_is_as_configured_or_the_quicker_one(
    asked: str, device: str, way: dict[str, bool], quick: bool, dtype: torch.dtype
) -> None:
    way = {"trained_whole": False} | way
    assert choose_dtype(asked, torch.device(device), **way, probe=lambda _: quick) == dtype


def test_float16_without_an_adapter_is_refused() -> None:
    with pytest.raises(NoModel, match=r"'float16' is for a model under an adapter\. Set model\.lora to 'on'"):
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
def test_a_large_model_takes_the_cores_that_limits_leave_it(
    changes: dict[str, Any], parameters: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 16 if logical else 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert threads_for(NodeConfig.model_validate(changes), parameters) == threads


# Errors as torch raises them or users quote them (pytorch/pytorch, ComfyUI, QwenLM/Qwen3 on GitHub), and what
# only looks like them.
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
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)": False,
    "CUDA error: an illegal memory access was encountered": False,
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": False,
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input.": False,
}


@pytest.mark.parametrize("said", SAID)
def test_every_wording_of_out_of_memory_is_known(said: str) -> None:
    assert is_out_of_memory(RuntimeError(said)) is SAID[said]


def test_out_of_memory_as_this_machine_says_it() -> None:
    for allocate in (lambda: torch.empty(2**60, dtype=torch.uint8), lambda: bytearray(2**60)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_large_models_get_an_adapter(tmp_path: Path) -> None:
    """Qwen2.5-0.5B's configuration: 494 million weights and an adapter of 8.8 million, told before anything
    is fetched.
    """
    (tmp_path / "config.json").write_text(json.dumps(QWEN_05B))
    with pytest.raises(NoModel, match=r"rank 16 in float32 takes at least .*, and cpu has 2\.00 GB free"):
        load(tmp_path, free=2_000_000_000)
    with pytest.raises(
        NoModel, match=r"all weights in float32 takes at least 8\..*largest that would fit: --model tiny"
    ):
        load(tmp_path, free=1_500_000_000, lora="off")
