"""A model folder made to harm whoever loads it: what its files ask for is bounded, and told in a message."""

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from swarmd.config.config import ModelConfig
from swarmd.errors import NoModel
from swarmd.policy.models import preflight
from swarmd.policy.models.architecture import read_config, skeleton_of
from swarmd.policy.models.chat import ChatFrame, TemplateFails, frame_of, render, render_contained
from swarmd.policy.models.fit import chat_of, fit
from swarmd.policy.models.hub import Place
from swarmd.policy.models.load import load_model
from swarmd.policy.models.memory_plan import Workload
from swarmd.policy.models.tiny import WEIGHTS
from tests.swarmd.policy.conftest import CHAT, NO_SYSTEM_ROLE, THINKING, make_tokenizer

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
        {"num_labels": 10**12},  # a name for each would fill the memory
    ],
)
def test_what_a_folder_names_as_its_attention_never_reaches_transformers(
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
    """A family that keeps its number of layers under another name."""
    place = Place(
        "mine",
        folder(tmp_path, model_type="opt", ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64),
    )
    architecture = read_config(place)
    architecture.num_hidden_layers = 10**6
    with pytest.raises(NoModel, match="more than 300 parts"):
        skeleton_of(architecture, "mine", most=300)


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "null", "3", "[" * 100_000, '{"a":' * 100_000,
        '{"model_type": "qwen2", "vocab_size": ' + "9" * 5_000 + "}",
        " " * (preflight.MAX_BYTES + 1),
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration_gives_a_message(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(NoModel, match=r"is not a JSON object|more than .* bytes"):
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
def test_a_senseless_configuration_gives_a_message(changes: dict[str, Any], tmp_path: Path) -> None:
    """NoModel, or a network: never a traceback of transformers."""
    try:
        fit(ModelConfig(name=str(folder(tmp_path, **changes)), device="cpu"), Workload())
    except NoModel as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("tokenizer.json", {"decoder": "x"}),  # tokenizers raises a plain Exception
        ("tokenizer.json", {"model": 0.5}),  # transformers: AttributeError
        # Rust panics, which is no Exception.
        ("tokenizer.json", {"model": {"type": "BPE", "continuing_subword_prefix": "long", "vocab": {"a": 0},
                                      "merges": [["a", "a"]]}}),
        ("tokenizer_config.json", {"model_max_length": "long"}),  # TypeError with the first text
        ("generation_config.json", {"max_new_tokens": "\x1b[2J"}),
        ("generation_config.json", {"pad_token_id": "x"}),
        ("generation_config.json", {"eos_token_id": [[]]}),
        ("adapter_config.json", {"base_model_name_or_path": "\x1b[2J"}),
        ("model.safetensors", {"\x1b[2J": {"dtype": "F32", "shape": [], "data_offsets": [9, 9]}}),
    ],
)  # fmt: skip
def test_a_senseless_file_beside_it_gives_a_message(name: str, spoil: dict[str, Any], tmp_path: Path) -> None:
    """NoModel, or a network: never a traceback of a library, nor what the terminal would obey."""
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
def test_a_frame_gives_the_same_prompt_as_the_template(
    template: str, question: str, system: str, thinking: bool
) -> None:
    tokenizer = make_tokenizer(template)
    chat = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]
    whole = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    assert (
        frame_of(*render(template, tokenizer.special_tokens_map, system, thinking)).around(question) == whole
    )


def test_what_a_template_may_do_to_a_question() -> None:
    assert frame_of(*render("({{ messages[0]['content'] | trim }})", {}, "")) == ChatFrame(
        ("(", ")"), "strip"
    )
    for template, why in (
        ("hello", "leaves the question out"),
        ("{{ messages | tojson }}", "changes the question"),
    ):
        with pytest.raises(TemplateFails, match=why):
            frame_of(*render(template, {}, ""))


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
def test_a_contained_template_is_rendered_like_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the working folder takes no module's place."""
    monkeypatch.chdir(tmp_path)
    Path("json.py").write_text("raise ImportError")
    template = NO_SYSTEM_ROLE + "{{ strftime_now('%Y') }}{{ eos_token }}{{ enable_thinking }}"
    for thinking in (False, True):
        ours = render(template, {"eos_token": "<e>"}, "", thinking)
        assert str(thinking) in ours[0]
        assert render_contained(template, {"eos_token": "<e>"}, "", thinking) == ours


def test_a_full_disk_is_not_the_models_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(NoModel, match="a temporary file cannot be written"):
        read_config(Place("mine", folder(tmp_path)))
