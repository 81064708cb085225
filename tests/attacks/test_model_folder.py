"""Hostile model folders: resources are bounded, and each rejection has a message."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swarmd.config.config import ModelConfig
from swarmd.errors import NoModel
from swarmd.policy.models import preflight
from swarmd.policy.models.architecture import read_config, skeleton_of
from swarmd.policy.models.chat import ChatFrame, TemplateFails, frame_of, render, render_contained
from swarmd.policy.models.doctor import explain
from swarmd.policy.models.files import model_folder
from swarmd.policy.models.fit import chat_of, fit
from swarmd.policy.models.hub import Place
from swarmd.policy.models.load import load_model
from swarmd.policy.models.memory_plan import Workload
from swarmd.policy.models.tiny import WEIGHTS
from tests.swarmd.policy.conftest import (
    CHAT,
    NO_SYSTEM_ROLE,
    THINKING,
    edit_json,
    make_model,
    make_tokenizer,
)

QWEN = {
    "model_type": "qwen2", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def folder(path: Path, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps(QWEN | changes))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"_attn_implementation": "evil/repo"},
        {"attn_implementation": "evil/repo:attention", "_attn_implementation_internal": "evil/repo"},
        {"experts_implementation": "evil/repo", "use_kernels": True, "kernel_config": {"a": "evil/repo"}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 1e6, "attn_implementation": "evil/repo"}},
        {"num_labels": 10**12},  # a name for each label would fill the memory
    ],
)
def test_attention_named_by_a_folder_is_never_passed_to_transformers(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    architecture = read_config(Place("mine", folder(tmp_path, **changes)))
    assert "evil" not in json.dumps(architecture.to_dict())
    network: Any = skeleton_of(architecture, "mine")
    assert network.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**6},
        {"num_hidden_layers": 1e6},
        {"text_config": {"num_hidden_layers": 10**6}},
        {"model_type": "gpt2", "n_layer": 10**9},
        {"hidden_size": 10**12},
        {"num_attention_heads": 10**9},
        {"vocab_size": 10**10},
        {"num_hidden_layers": int("9" * 4000)},
    ],
)
def test_sizes_are_bounded_before_anything_is_built(changes: dict[str, Any], tmp_path: Path) -> None:
    begun = time.process_time()
    with pytest.raises(NoModel, match=r"more than [\d,]+ is not built"):
        preflight.check(ModelConfig(name=str(folder(tmp_path, **changes))))
    assert time.process_time() - begun < 1


def test_modules_are_counted_while_a_network_is_built(tmp_path: Path) -> None:
    """The configuration of this model family has another name for the number of layers."""
    place = Place(
        "mine",
        folder(tmp_path, model_type="opt", ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64),
    )
    architecture = read_config(place)
    architecture.num_hidden_layers = 10**6
    with pytest.raises(NoModel, match="over 300 modules"):
        skeleton_of(architecture, "mine", most=300)


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "null", "3", "[" * 100_000, '{"a":' * 100_000,
        '{"model_type": "qwen2", "vocab_size": ' + "9" * 5_000 + "}",
        " " * (model_folder.MAX_JSON_BYTES + 1),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_configuration_gives_a_message(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(NoModel, match=r"is not a JSON object|over .* bytes"):
        read_config(Place("mine", tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": {}}, {"hidden_size": 0}, {"num_attention_heads": 0}, {"num_hidden_layers": 0},
        {"num_hidden_layers": -1},
        {"hidden_size": None}, {"hidden_act": "no such thing"}, {"layer_types": [3, None]},
        {"rope_parameters": "x"}, {"model_type": ["a"]},
        {"model_type": {}}, {"dtype": "no such thing"}, {"quantization_config": {"quant_method": "evil"}},
        {"model_type": "clip"}, {"rope_parameters": {"rope_type": "longrope"}},
        {"model_type": "xglm", "num_key_value_heads": "x"},
    ],
)  # fmt: skip
def test_an_invalid_configuration_gives_a_message(changes: dict[str, Any], tmp_path: Path) -> None:
    """Loading gives a network or raises NoModel, but no exception of transformers."""
    try:
        fit(ModelConfig(name=str(folder(tmp_path, **changes)), device="cpu"), Workload())
    except NoModel as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("tokenizer.json", {"decoder": "x"}),  # tokenizers raises a plain Exception
        ("tokenizer.json", {"model": 0.5}),  # transformers raises AttributeError
        # The Rust code panics, which is not an Exception.
        ("tokenizer.json", {"model": {"type": "BPE", "continuing_subword_prefix": "long", "vocab": {"a": 0},
                                      "merges": [["a", "a"]]}}),
        ("tokenizer_config.json", {"model_max_length": "long"}),  # raises TypeError at the first text
        ("generation_config.json", {"max_new_tokens": "\x1b[2J"}),
        ("generation_config.json", {"pad_token_id": "x"}),
        ("generation_config.json", {"eos_token_id": [[]]}),
        ("adapter_config.json", {"base_model_name_or_path": "\x1b[2J"}),
        ("model.safetensors", {"\x1b[2J": {"dtype": "F32", "shape": [], "data_offsets": [9, 9]}}),
    ],
)  # fmt: skip
def test_a_malformed_companion_file_gives_a_message(name: str, spoil: dict[str, Any], tmp_path: Path) -> None:
    """Loading gives a network or raises NoModel without control characters, but no other exception."""
    made = Path(shutil.copytree(WEIGHTS["tiny"], tmp_path / "made"))
    if name == "adapter_config.json":
        (made / "config.json").unlink()
    text = json.dumps((json.loads((made / name).read_text()) if name.endswith("er.json") else {}) | spoil)
    header = len(text).to_bytes(8, "little") if name == "model.safetensors" else b""
    (made / name).write_bytes(header + text.encode())
    config = ModelConfig(name=str(made), device="cpu")
    try:
        loaded = load_model(config, 0, lambda _: 10**10)
        chat_of(config, loaded.source, loaded.tokenizer, loaded.network)
    except NoModel as error:
        assert str(error).isprintable()


@pytest.mark.parametrize(
    "template",
    [CHAT, THINKING, "{{ eos_token }}{% for m in messages %}<{{ m['content'] | trim }}>{% endfor %}"],
)
@pytest.mark.parametrize("question", ["1+1?", "  two\n\nlines \n", "<|user|> </answer> {{ x }}", ""])
@pytest.mark.parametrize("system", ["", "be good"])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_chat_frame_gives_the_same_prompt_as_its_template(
    template: str, question: str, system: str, thinking: bool
) -> None:
    tokenizer = make_tokenizer(template)
    chat = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]
    whole = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    found = frame_of(render(template, tokenizer.special_tokens_map, system, (), thinking))
    # The last template has no generation prompt; the frame takes the answer's opening text, "<", from
    # conversations.
    assert found.around(question) == whole + "<" * ("trim" in template)


def test_a_template_may_change_a_question_only_within_limits() -> None:
    assert frame_of(render("({{ messages[0]['content'] | trim }})", {}, "")) == ChatFrame(
        ("(", ")"), "strip", rendered=")"
    )
    for template, why in (
        ("hello", "leaves the question out"),
        ("{{ messages | tojson }}", "changes the question"),
    ):
        with pytest.raises(TemplateFails, match=why):
            frame_of(render(template, {}, ""))


@pytest.mark.net
@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "CPU time"),
        ("{{ 'x' * 10 ** 10 }}", "Memory"),
        ("{{ raise_exception('no') }}", "no"),
    ],
)
def test_a_template_has_limited_time_and_memory(template: str, why: str) -> None:
    with pytest.raises(TemplateFails, match=why):
        render_contained(template + CHAT, {}, "")


@pytest.mark.net
def test_a_contained_process_renders_a_template_as_this_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the working folder does not shadow an imported module."""
    monkeypatch.chdir(tmp_path)
    Path("json.py").write_text("raise ImportError")
    template = NO_SYSTEM_ROLE + "{{ strftime_now('%Y') }}{{ eos_token }}{{ enable_thinking }}"
    for thinking in (False, True):
        ours = render(template, {"eos_token": "<e>"}, "", (), thinking)
        assert str(thinking) in ours[0]
        assert render_contained(template, {"eos_token": "<e>"}, "", (), thinking) == ours


def test_a_full_disk_is_not_blamed_on_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(NoModel, match="a temporary file cannot be written"):
        read_config(Place("mine", folder(tmp_path)))


def made(path: Path) -> Path:
    """Return a copy of the model tiny, to be changed."""
    return Path(shutil.copytree(WEIGHTS["tiny"], path / "made"))


def sharded(folder: Path, files: Any = None, **more: str) -> Path:
    """Spread the weights over two files, and write an index: `files`, or the right entries and `more`."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({k: v for k, v in tensors.items() if names[k] == file}, folder / file, {"format": "pt"})
    index = {"weight_map": names | more} if files is None else files
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def loaded(folder: Path) -> Any:
    check = ModelConfig(name=str(folder), device="cpu", lora="off")
    preflight.check(check)
    return load_model(check, 0, lambda _: 10**10)


NORM = "model.norm.weight"
SHARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle": (lambda at: sharded(at, **{NORM: "evil.bin"}), "names 'evil.bin'"),
    "pytorch": (lambda at: sharded(at, **{NORM: "pytorch_model.pt"}), r"names 'pytorch_model.pt'"),
    "above": (lambda at: sharded(at, **{NORM: "../other.safetensors"}), "names '../other.safetensors'"),
    "absolute": (lambda at: sharded(at, **{NORM: "/etc/x.safetensors"}), "names '/etc/x.safetensors'"),
    "deeper": (lambda at: sharded(at, **{NORM: "sub/x.safetensors"}), "names 'sub/x.safetensors'"),
    "pattern": (lambda at: sharded(at, **{NORM: "*.safetensors"}), "names"),
    "no-text": (lambda at: sharded(at, {"weight_map": {NORM: ["x"]}}), "names"),
    "absent": (
        lambda at: sharded(at, **{NORM: "x.safetensors"}),
        r"x\.safetensors of .* cannot be read: No such",
    ),
    "no-map": (lambda at: sharded(at, {"metadata": {}}), "no weight_map"),
    "list": (lambda at: sharded(at, []), "not a JSON object"),
    "empty": (lambda at: sharded(at, {"weight_map": {}}), "no weight_map"),
    "not-there": (
        lambda at: sharded(at, **{"no.such.tensor": "model-0.safetensors"}),
        "which lacks it",
    ),
    "elsewhere": (
        lambda at: sharded(at, **{NORM: "model-0.safetensors", "lm": "model-1.safetensors"}),
        "index has",
    ),
    "twice": (
        lambda at: shutil.copy(
            sharded(at, x="copy.safetensors") / "model-0.safetensors", at / "copy.safetensors"
        ),
        "is in both",
    ),
}


@pytest.mark.parametrize("kind", SHARDS)
def test_an_index_may_name_only_complete_files_of_its_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a pickle nor a file outside the folder is opened, even if it exists."""
    monkeypatch.setattr(torch, "load", never)
    folder = made(tmp_path)
    for name in ("evil.bin", "pytorch_model.bin", "pytorch_model.pt"):
        torch.save({NORM: torch.ones(1)}, folder / name)
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    spoil, message = SHARDS[kind]
    spoil(folder)
    with pytest.raises(NoModel, match=message):
        preflight.check(ModelConfig(name=str(folder)))
    with pytest.raises(NoModel, match=message):
        loaded(folder)


def never(*_: object, **__: object) -> None:
    raise AssertionError("torch.load was called, which must never happen")


def test_a_sharded_model_has_the_weights_of_a_single_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = loaded(WEIGHTS["tiny"]).fingerprint
    assert loaded(sharded(made(tmp_path))).fingerprint == whole
    # Pickles, a file of another precision and a second index in the folder change nothing.
    monkeypatch.setattr(torch, "load", never)
    again = made(tmp_path / "again")
    for name in ("pytorch_model.bin", "model.fp16.safetensors", "training_args.bin", "vocab.pkl"):
        (again / name).write_bytes(b"\x80\x04.")
    (again / "model.safetensors.index.json").write_text('{"weight_map": {"a": "evil.bin"}}')
    (again / ".metadata").write_bytes(b"\x80\x04.")
    assert loaded(again).fingerprint == whole


def header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a model's weights, and keep the tensors' bytes."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:end])
    change(tensors)
    written = json.dumps(tensors).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + content[end:])


EMBEDDING = "model.embed_tokens.weight"
HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "shape": lambda tensors: tensors[NORM].update(shape=[2, 2]),
    "negative": lambda tensors: tensors[NORM].update(shape=[-1, -5]),
    "huge": lambda tensors: tensors[EMBEDDING].update(shape=[10**12, 10**12]),
    "type": lambda tensors: tensors[NORM].update(dtype="F99"),
    "overlap": lambda tensors: tensors[NORM].update(data_offsets=tensors[EMBEDDING]["data_offsets"]),
    "before": lambda tensors: tensors[NORM].update(data_offsets=[-4, tensors[NORM]["data_offsets"][1]]),
    "head": lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING]}),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_with_false_tensors_is_reported_as_a_fault_of_the_weights(kind: str, tmp_path: Path) -> None:
    """The daemon only reads shapes and the file's size; the library checks the rest before loading."""
    folder = made(tmp_path)
    header(folder, HEADERS[kind])
    with pytest.raises(NoModel, match=r"^the weights of .* cannot be loaded"):
        loaded(folder)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "lfs": (
        lambda at: (at / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid"),
        "git lfs pull",
    ),
    "lfs-tokenizer": (
        lambda at: (at / "tokenizer.json").write_text("version https://git-lfs.git"),
        "git lfs",
    ),
    "lfs-config": (
        lambda at: (at / "config.json").write_text("version https://git-lfs.github"),
        "git lfs pull",
    ),
    "gguf": (
        lambda at: (at / "model.safetensors").write_bytes(b"GGUF" + bytes(99)),
        "a GGUF file is given by its own path",
    ),
    "only-gguf": (
        lambda at: (at / "model.safetensors").rename(at / "tiny-Q4_1.gguf"),
        "empty or damaged. Download it again",
    ),
    "variant": (
        lambda at: (at / "model.safetensors").rename(at / "model.fp16.safetensors"),
        r"called model\.fp16\.safet",
    ),
    "adapter-alone": (
        lambda at: [
            (at / "model.safetensors").rename(at / "adapter_model.safetensors"),
            (at / "adapter_config.json").write_text('{"base_model_name_or_path": "a/base"}'),
        ],
        "holds an adapter, not a model.*--model a/base",
    ),
    "pipe": (lambda at: [(at / "config.json").unlink(), os.mkfifo(at / "config.json")], "not a plain file"),
    "pipe-weights": (
        lambda at: [(at / "model.safetensors").unlink(), os.mkfifo(at / "model.safetensors")],
        "not a plain file",
    ),
    "pipe-template": (
        lambda at: [(at / "chat_template.jinja").unlink(), os.mkfifo(at / "chat_template.jinja")],
        "not a plain file",
    ),
    "device": (
        lambda at: [(at / "tokenizer.json").unlink(), (at / "tokenizer.json").symlink_to("/dev/zero")],
        "not a plain file",
    ),
    "link": (
        lambda at: [
            (at / "model.safetensors").rename(at.parent / "x"),
            (at / "model.safetensors").symlink_to("../x"),
        ],
        "outside the model's folder",
    ),
    "link-small": (
        lambda at: [
            (at / "chat_template.jinja").unlink(),
            (at / "chat_template.jinja").symlink_to("/etc/passwd"),
        ],
        "outside the model's folder",
    ),
    "loop": (
        lambda at: [(at / "config.json").unlink(), (at / "config.json").symlink_to("config.json")],
        "config",
    ),
    "huge-header": (
        lambda at: (at / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}"),
        "its header is longer",
    ),
    "cut": (
        lambda at: os.truncate(at / "model.safetensors", (at / "model.safetensors").stat().st_size - 1),
        "not a whole safetensors file",
    ),
    "no-tensors": (lambda at: header(at, lambda tensors: tensors.clear()), "not a whole safetensors file"),
    "no-shapes": (lambda at: header(at, lambda tensors: tensors.update(x=1)), "not a whole safetensors file"),
    "huge-file": (lambda at: os.truncate(at / "tokenizer.json", 2**28), "too large"),
    "own-folder": (
        lambda at: [(at / "tokenizer.json").unlink(), (at / "tokenizer.json").mkdir()],
        "not a plain file",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_without_valid_content_is_named_in_the_message(kind: str, tmp_path: Path) -> None:
    folder = made(tmp_path)
    spoil, message = FILES[kind]
    spoil(folder)
    with pytest.raises(NoModel, match=message) as refused:
        preflight.check(ModelConfig(name=str(folder)))
    assert str(refused.value).isprintable()


def test_a_path_to_an_unsupported_file_gives_advice(tmp_path: Path) -> None:
    folder = made(tmp_path)
    for name, message in (
        (str(folder / "none.gguf"), "hf download OWNER/NAME"),
        ("owner/name/file-Q4_K_M.gguf", "or give the safetensors model that it was made from"),
        (str(folder / "model.safetensors"), "is a file. Give a GGUF file, or the folder"),
    ):
        with pytest.raises(NoModel, match=message):
            preflight.check(ModelConfig(name=name))


def test_an_adapter_in_the_models_folder_is_ignored_with_a_message(tmp_path: Path) -> None:
    folder = made(tmp_path)
    network = AutoModelForCausalLM.from_pretrained(folder)
    adapted = get_peft_model(network, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(folder)
    assert (folder / "adapter_config.json").exists() and (folder / "adapter_model.safetensors").exists()
    found = loaded(folder)
    assert found.fingerprint == loaded(WEIGHTS["tiny"]).fingerprint
    assert not [name for name, _ in found.network.named_parameters() if "lora" in name]
    assert "an adapter, which is left out" in "\n".join(explain(found, 1.0))


def test_links_of_the_hubs_cache_are_followed_within_one_repository(tmp_path: Path) -> None:
    """The files are links to blobs of the same repository; a link to another repository is rejected."""
    cached = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    blobs = tmp_path / "models--a--b" / "blobs"
    cached.mkdir(parents=True)
    blobs.mkdir()
    for path in WEIGHTS["tiny"].iterdir():
        shutil.copyfile(path, blobs / path.name)
        (cached / path.name).symlink_to(f"../../blobs/{path.name}")
    assert loaded(cached).fingerprint == loaded(WEIGHTS["tiny"]).fingerprint
    (tmp_path / "models--x--y").mkdir()
    (blobs / "model.safetensors").rename(tmp_path / "models--x--y" / "z")
    (cached / "model.safetensors").unlink()
    (cached / "model.safetensors").symlink_to(tmp_path / "models--x--y" / "z")
    with pytest.raises(NoModel, match="outside the model's folder"):
        loaded(cached)


@pytest.mark.parametrize(
    "changes",
    [
        {"transformers_weights": "evil.safetensors"},
        {"transformers_weights": "../x.safetensors", "distributed_config": {"tp_size": 2}},
        {"fusion_config": {"a": "b"}, "custom_pipelines": {"x": {"impl": "evil.py"}}},
        {"_name_or_path": "evil/repo", "base_model_name_or_path": "evil/repo"},
        {"auto_map": {"AutoModelForCausalLM": "evil/repo--code.Model"}, "trust_remote_code": True},
    ],
)
def test_a_configuration_cannot_load_another_file(changes: dict[str, Any], tmp_path: Path) -> None:
    """The weights come from model.safetensors, even if config.json names another file."""
    folder = made(tmp_path)
    (folder / "evil.safetensors").write_bytes(b"evil")
    edit_json(folder / "config.json", **changes)
    assert loaded(folder).fingerprint == loaded(WEIGHTS["tiny"]).fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_file": "/etc/passwd", "tokenizer_file": "/etc/passwd", "merges_file": "/etc/passwd"},
        {
            "gguf_file": "/etc/passwd",
            "special_tokens_map_file": "/etc/passwd",
            "init_inputs": ["/etc/passwd"],
        },
        {"fast_tokenizer_files": ["../../etc/passwd"], "chat_template_file": "/etc/passwd"},
        {"auto_map": {"AutoTokenizer": ["evil/repo--code.Tok", None]}, "tokenizer_class": "Evil"},
    ],
)
def test_a_tokenizer_cannot_open_another_file(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path)
    edit_json(folder / "tokenizer_config.json", **changes)
    seen: list[str] = []
    real = open

    def watched(file: Any, *more: Any, **named: Any) -> Any:
        seen.append(str(file))
        return real(file, *more, **named)

    monkeypatch.setattr("builtins.open", watched)
    found = loaded(folder).tokenizer
    assert found.encode("1 + 1 = 2") == loaded(WEIGHTS["tiny"]).tokenizer.encode("1 + 1 = 2")
    assert seen and not any("passwd" in name for name in seen)


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("stored", ["none", "same", "other"])
def test_a_head_is_separate_only_if_the_weights_differ(says: bool, stored: str, tmp_path: Path) -> None:
    """A head that differs from the embedding is trained and counted separately."""
    make_model(tmp_path, "qwen2")  # its head is tied to the embedding
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    if stored != "none":
        tensors["lm_head.weight"] = embedding.clone() if stored == "same" else embedding + 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    edit_json(tmp_path / "config.json", tie_word_embeddings=says)
    found = loaded(tmp_path)
    apart = stored == "other" or (stored == "same" and not says)
    assert found.shape.parameters == sum(p.numel() for p in found.network.parameters())
    assert (found.network.lm_head.weight is not found.network.model.embed_tokens.weight) == apart
    expected = tensors["lm_head.weight"] if apart else embedding
    assert torch.equal(found.network.lm_head.weight, expected)
