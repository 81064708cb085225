"""GGUF files: models are read unchanged, llama.cpp computes the same, and bad files give messages."""

import errno
import gc
import json
import math
import os
import re
import struct
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from swarmd.config.config import ModelConfig
from swarmd.errors import NoModel
from swarmd.policy.models import hub, preflight
from swarmd.policy.models.files import from_gguf
from swarmd.policy.models.files import gguf as gguf_files
from swarmd.policy.models.files.progress import Download, Progress
from swarmd.policy.models.files.to_gguf import write_gguf
from swarmd.policy.models.tiny import WEIGHTS as TINY
from tests.doubles import TIMEOUT_S
from tests.swarmd.policy.conftest import CHAT, SPECIALS, make_model, network_of, open_policy

gguf = pytest.importorskip("gguf", reason="needs pip install 'swarmd[gguf]'")

TEXTS = [
    "What is 12 + 30?",
    "a  b\n\n1. two 3,000\n\t",
    "<|user|>don't<answer>7</answer>",
    "Grüße, naïve 日本",
]
SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    **{
        name: pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        for name in ("qwen2", "llama-bpe")
    },
}


def tokenizer_of(splits: str) -> PreTrainedTokenizerFast:
    """Return a byte-pair tokenizer that splits text in this way; its merges make the splits visible."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = SPLITS[splits], decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(TEXTS * 3 + ["\n\n1 \n\n2  3  12 30 3000 don't I'm I've"] * 9, trainer)
    backend.add_tokens(["<answer>", "</answer>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=CHAT)


def model_of(folder: Path, family: str = "llama", splits: str = "gpt-2", **changes: Any) -> Path:
    """Make a model whose widths are multiples of GGUF's block sizes."""
    tokenizer = tokenizer_of(splits)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": len(tokenizer), "head_dim": 16}
    make_model(folder, family, **(sizes if family != "qwen2" else {**sizes, "head_dim": 16}) | changes)
    for path in folder.glob("*token*"):
        path.unlink()
    tokenizer.save_pretrained(folder)
    return folder


def written(path: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model in a folder as a GGUF file."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    write_gguf(path, network, AutoTokenizer.from_pretrained(folder), str(folder))
    return path


def rewritten(
    path: Path,
    kind: str | None = None,
    settings: dict[str, Any] | None = None,
    without: str = " ",
    architecture: str | None = None,
    more: dict[str, Any] | None = None,
) -> Path:
    """Rewrite a GGUF file with matrices in blocks of this kind, and with other settings and tensors."""
    reader = gguf.GGUFReader(path)
    target = path.with_suffix(".new")
    writer = gguf.GGUFWriter(target, architecture or reader.fields["general.architecture"].contents())
    fields = {name: (field.contents(), field.types) for name, field in reader.fields.items()}
    for name, (value, types) in fields.items():
        if not name.startswith(("GGUF.", "general.architecture")) and name not in (settings or {}):
            writer.add_key_value(name, value, types[0], types[-1] if len(types) > 1 else None)
    for name, value in (settings or {}).items():
        adders = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        adders[type(value)](name, value)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if without in tensor.name:
            continue
        if kind is None or values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            blocks = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(tensor.name, gguf.quantize(values, blocks), raw_dtype=blocks)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target.replace(path)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hub"))
    return tmp_path / "hub" / "swarmd-gguf"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the conversion run in this process, which has imported everything already."""
    monkeypatch.setattr(gguf_files, "_run", lambda _, *arguments: from_gguf.convert(*map(str, arguments)))


def converted(path: Path) -> Path:
    return hub.with_weights(hub.locate(str(path), None))


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return network_of(folder)(torch.tensor([ids])).logits[0].float()


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "family, splits, rope, changes",
    [
        ("llama", "llama-bpe", "llama3", {"tie_word_embeddings": True}),
        ("llama", "smollm", "default", {}),
        ("llama", "gpt-2", "linear", {"head_dim": 32}),
        ("qwen2", "qwen2", "yarn", {"tie_word_embeddings": False}),
        ("qwen3", "qwen2", "default", {"head_dim": 32}),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_model_is_read_unchanged_from_a_gguf_file(
    family: str, splits: str, rope: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = model_of(tmp_path / "a", family, splits, rope_parameters=ROPES[rope], **changes)
    back = converted(written(tmp_path / "a.gguf", folder))
    one, other = network_of(folder).state_dict(), network_of(back).state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    was, now = (AutoTokenizer.from_pretrained(each) for each in (folder, back))
    assert [was(text).input_ids for text in TEXTS] == [now(text).input_ids for text in TEXTS]
    assert (now.chat_template, now.eos_token) == (was.chat_template, was.eos_token)
    ids = was(TEXTS[0]).input_ids
    assert torch.allclose(logits_of(folder, ids), logits_of(back, ids), atol=1e-5)
    config = json.loads((back / "config.json").read_text())
    assert "quantization_config" not in config and config["tie_word_embeddings"] == (
        "lm_head.weight" not in network_of(folder).state_dict()
        or bool(changes.get("tie_word_embeddings", family == "qwen3"))
    )


@pytest.mark.parametrize(
    "kind, dtype, error",
    [
        ("F16", "F16", 1e-3),
        ("BF16", "BF16", 1e-2),
        ("Q8_0", "F16", 0.02),
        ("Q5_0", "F16", 0.2),
        ("Q4_1", "F16", 0.3),
    ],
)
@pytest.mark.usefixtures("here")
def test_quantised_blocks_are_dequantised(kind: str, dtype: str, error: float, tmp_path: Path) -> None:
    folder = model_of(tmp_path / "a")
    number = {"F16": 1, "BF16": 32}.get(kind, 2)
    path = rewritten(written(tmp_path / "a.gguf", folder), kind, {"general.file_type": number})
    reader = gguf.GGUFReader(path)
    kept = next(t for t in reader.tensors if t.name == "blk.0.ffn_up.weight")
    back = converted(path)
    weight = AutoModelForCausalLM.from_pretrained(back, dtype="auto").model.layers[0].mlp.up_proj.weight
    assert str(weight.dtype) == {"F16": "torch.float16", "BF16": "torch.bfloat16"}[dtype]
    assert torch.allclose(
        weight.float(), torch.tensor(gguf.dequantize(kept.data, kept.tensor_type)), rtol=1e-3
    )
    was = network_of(folder).model.layers[0].mlp.up_proj.weight
    assert (weight.float() - was).abs().max() < error * was.abs().max()


def ask(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def in_llama_cpp(path: Path, text: str) -> tuple[list[int], dict[int, float]]:
    """Return llama.cpp's tokens of a text, and the probabilities of the likeliest next tokens."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="needs pip install xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.cpuparams.n_threads = 256, 1, False, 1
    server = xllamacpp.Server(params)
    ids = ask(server.listening_address, "tokenize", content=text, parse_special=True)["tokens"]
    # The seed is fixed, because llama.cpp reports no probabilities if it samples the end token.
    asked = {"prompt": ids, "n_predict": 1, "n_probs": 100, "temperature": 1.0, "seed": 7}
    said = ask(server.listening_address, "completion", **asked)
    return ids, {
        each["id"]: math.exp(each["logprob"]) for each in said["completion_probabilities"][0]["top_logprobs"]
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, splits, rope, dtype",
    [
        ("llama", "smollm", "llama3", torch.float32),
        ("qwen2", "qwen2", "default", torch.bfloat16),
        ("tiny", "", "", torch.float32),
    ],
)
def test_llama_cpp_computes_the_same_probabilities_as_swarmd(
    family: str, splits: str, rope: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = TINY["tiny"]
    if family != "tiny":
        folder = model_of(tmp_path / "a", family, splits, rope_parameters=ROPES[rope], seed=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<|user|>What is 12 + 30?\n\n1 don't<|assistant|>"
    ids, found = in_llama_cpp(written(tmp_path / "a.gguf", folder, dtype), text)
    assert ids == tokenizer(text, add_special_tokens=False).input_ids
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).float()
    with torch.no_grad():
        expected = network(torch.tensor([ids])).logits[0, -1].softmax(-1)
    assert len(found) == 100
    # The tolerance is for llama.cpp's keys and values in float16.
    assert max(abs(expected[token].item() - share) for token, share in found.items()) < 5e-3


Bad = Callable[[Path], object]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def edited(**settings: Any) -> Bad:
    return lambda path: rewritten(
        path, None, {name.replace("__", "."): value for name, value in settings.items()}
    )


def header(version: int = 3, tensors: int = 0, settings: int = 1, rest: bytes = b"") -> Bad:
    return lambda path: path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, tensors, settings) + rest)


def setting(kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<I", kind) + value


LLAMA = setting(8, struct.pack("<Q", 5) + b"llama")
HUGE = struct.pack("<Q", 1) + b"a" + struct.pack("<I2QIQ", 2, 2**30, 2**30, 0, 0)
# Messages that come before a process is started, or from the process.
AT_ONCE: dict[str, tuple[Bad, str]] = {
    "empty": (lambda path: path.write_bytes(b""), "empty or damaged. Download it again"),
    "pointer": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1"), "git lfs pull"),
    "other": (lambda path: path.write_bytes(b"PK" + bytes(99)), "empty or damaged"),
    "locked": (lambda path: path.chmod(0), "cannot be read"),
}
BAD: dict[str, tuple[Bad, str]] = {
    "cut": (cut, "is cut off: it has .* bytes. Download it again"),
    "cut-blocks": (lambda path: (rewritten(path, "Q5_0"), cut(path)), "cannot be converted"),
    "cut-header": (lambda path: os.truncate(path, 999), "is damaged, or of an unknown version"),
    "magic-alone": (lambda path: path.write_bytes(b"GGUF"), "damaged"),
    "version": (header(version=1), "unknown version .*GGUF v1"),
    "big-endian": (header(version=3 << 24), "unknown version"),
    "many-settings": (header(settings=2**60), "damaged"),
    "many-tensors": (header(tensors=2**60, rest=LLAMA), "damaged"),
    "long-name": (header(rest=struct.pack("<Q", 2**62)), "damaged"),
    "long-list": (header(rest=setting(9, struct.pack("<IQ", 0, 2**62))), "damaged"),
    "long-list-of-lists": (header(rest=setting(9, struct.pack("<IQ", 9, 2**62))), "damaged"),
    "odd-architecture": (header(rest=setting(4, struct.pack("<I", 7))), "cannot be converted"),
    "dimensions": (
        header(tensors=1, rest=LLAMA + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 2**31)),
        "damaged",
    ),
    "huge-tensor": (header(tensors=1, rest=LLAMA + HUGE), "is cut off"),
    "no-tensors": (header(rest=LLAMA), "cannot be converted"),
    "architecture": (lambda path: rewritten(path, architecture="rwkv9"), "rwkv9 is not supported"),
    "bert": (lambda path: rewritten(path, architecture="bert"), "bert is not supported"),
    "adapter": (edited(general__type="adapter"), "is a LoRA adapter. Give the model"),
    "mmproj": (edited(general__type="mmproj"), "sees or hears. Give the file of its language model"),
    "vision": (lambda path: rewritten(path, architecture="clip"), "sees or hears"),
    "embeddings": (edited(llama__pooling_type=3), "writes no text"),
    "looks-ahead": (edited(llama__attention__causal=False), "writes no text"),
    "part": (edited(split__count=3), "llama-gguf-split --merge"),
    "experts": (edited(llama__expert_count=8), "'expert_count', which transformers does not read"),
    "scale": (edited(llama__attention__scale=0.3), "'attention.scale', which"),
    "more-tensors": (
        lambda path: rewritten(path, more={"blk.0.attn_q.bias": numpy.zeros(64, "f4")}),
        "attn_q.bias",
    ),
    "longrope": (edited(llama__rope__scaling__type="longrope"), "rope.scaling.type = .*longrope"),
    "angles": (
        lambda path: rewritten(path, more={"rope_freqs.weight": numpy.ones(8, "f4") * 3}),
        "differ from Llama 3",
    ),
    "splits": (edited(tokenizer__ggml__pre="my-own"), "unknown pre-tokenizer, .*my-own"),
    "layers": (edited(llama__block_count=2**31), "over 20,000 modules"),
    "heads": (edited(llama__attention__head_count=0), "cannot be converted"),
}


@pytest.mark.parametrize("kind", AT_ONCE | BAD)
def test_a_file_that_is_not_a_model_gives_a_one_sentence_message(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cache: Path,
) -> None:
    path = written(tmp_path / "a.gguf", model_of(tmp_path / "a"))
    spoil, message = (AT_ONCE | BAD)[kind]
    spoil(path)
    if kind in AT_ONCE:
        if kind != "locked" or os.geteuid():
            with pytest.raises(NoModel, match=message) as refused:
                preflight.check(ModelConfig(name=str(path)))
            assert str(refused.value).isprintable()
        return
    preflight.check(ModelConfig(name=str(path)))
    monkeypatch.setattr(from_gguf, "set_limits", lambda _: None)
    monkeypatch.setattr(
        "sys.argv", ["", str(path), str(tmp_path / "to"), "config.json", str(tmp_path / "none")]
    )
    began = time.process_time()
    with pytest.raises(SystemExit) as ended:
        from_gguf.main()
    gc.enable()
    told = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1 and re.search(message, told), told
    assert told.isprintable() and told.count("\n") == 0 and len(told) < 1000
    assert time.process_time() - began < 20


@pytest.mark.usefixtures("here")
def test_nodes_that_start_together_convert_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    path, runs, run = written(tmp_path / "a.gguf", model_of(tmp_path / "a")), list[str](), gguf_files._run

    def counted(progress: Progress, *arguments: Path | str) -> None:
        runs.append(str(arguments[2]))
        run(progress, *arguments)

    monkeypatch.setattr(gguf_files, "_run", counted)
    with ThreadPoolExecutor() as both:
        one, other = both.map(converted, [path, path])
    assert one == other and runs == ["config.json", "model.safetensors"]
    assert sorted(each.name for each in cache.iterdir()) == [one.name, f"{one.name}.lock"]
    # The file is recognised under another name of its folder, but counts as a new file once it has changed.
    (tmp_path / "link").symlink_to(tmp_path)
    assert converted(tmp_path / "link" / "a.gguf") == one and len(runs) == 2
    os.utime(path, (1, 1))
    assert converted(path) != one and len(runs) == 4


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("wanted", ["config.json", "model.safetensors"])
def test_a_partial_conversion_is_never_used(
    wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    path, run, full = written(tmp_path / "a.gguf", model_of(tmp_path / "a")), gguf_files._run, [wanted]

    def stopped(progress: Progress, *arguments: Path | str) -> None:
        run(progress, *arguments)
        if arguments[2] in full:
            full.clear()
            os.truncate(Path(arguments[1]) / wanted, 10)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_files, "_run", stopped)
    with pytest.raises(NoModel, match=r"No space left on device.*Free some space"):
        converted(path)
    assert not [*cache.glob(f"*/{wanted}"), *cache.glob(".*")]
    assert (converted(path) / wanted).stat().st_size > 10


def test_small_files_and_weights_are_read_by_a_separate_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = tmp_path / "models" / f"sha256-{64 * 'a'}"  # a name in the style of ollama's files
    blob.parent.mkdir()
    (blob.parent / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}'
    )
    written(tmp_path / "a.gguf", model_of(tmp_path / "a")).replace(blob)
    told: list[Download] = []
    place = hub.find_local(str(blob))
    assert place is not None and place.source == str(blob) and hub.is_folder(str(blob))
    preflight.check(ModelConfig(name=str(blob)))
    policy = open_policy(blob, report=told.append)
    assert told[0].words.startswith("converting sha256-")
    assert (told[-1].done, told[-1].seconds_left) == (blob.stat().st_size, 0)
    assert policy.description.model == str(blob)
    monkeypatch.setattr(gguf_files, "_run", None)  # the process must not run again
    assert open_policy(blob).generate(["1 + 1?"], 1)[0].completions
    monkeypatch.undo()
    cut(blob)
    with pytest.raises(NoModel, match="is cut off"):
        open_policy(blob)
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(NoModel, match="take more memory or time"):
        open_policy(blob)


def test_a_folder_with_one_gguf_file_is_accepted_for_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model.GGUF", "mmproj-model.gguf", "README.md"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert gguf_files.file_of(tmp_path) == tmp_path / "model.GGUF"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        NoModel, match=r"package that reads it is missing\. Run `pip install 'swarmd\[gguf\]'`"
    ):
        preflight.check(ModelConfig(name=str(tmp_path)))
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(NoModel, match=r"2 GGUF files. Give the path of one: 'model.GGUF', 'other.gguf'"):
        preflight.check(ModelConfig(name=str(tmp_path)))
    (tmp_path / "other.gguf").rename(tmp_path / "a-00001-of-00002.gguf")
    with pytest.raises(NoModel, match="one of several parts"):
        preflight.check(ModelConfig(name=str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert gguf_files.file_of(tmp_path) is None
