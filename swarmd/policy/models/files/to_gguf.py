"""Write a network and its tokenizer as a GGUF file, for llama.cpp and ollama.

Weights keep their number type, except vectors, which llama.cpp needs in float32. The supported architectures
are those that llama.cpp computes as transformers does, after Llama's query and key rows are reordered.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from swarmd.errors import ConfigError, command_for
from swarmd.policy.models.architecture import HEAD

# transformers' model types and llama.cpp's architectures.
_ARCHITECTURES: Final = MappingProxyType(
    {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
)
# llama.cpp's names of pre-tokenizers by their steps. If several names have the same steps, the first name
# wins.
_SPLITS: Final[Mapping[tuple[str, ...], str]] = MappingProxyType(
    {(split, "ByteLevel"): name for name, split in reversed(GGUF_PRE_TOKENIZER_SPLITS.items())}
    | {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
)
_FILE_TYPES: Final = MappingProxyType({torch.float32: 0, torch.float16: 1, torch.bfloat16: 32})
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


def write_gguf(path: Path, network: Any, tokenizer: Any, source: str) -> None:
    """Write the file. Raises ConfigError if llama.cpp would compute something different."""
    try:
        import gguf
    except ImportError:
        raise ConfigError(f"GGUF files need a package. Run `{command_for('gguf')}`.") from None
    config, rope = network.config, network.config.rope_parameters
    architecture, scaling = _ARCHITECTURES.get(config.model_type, ""), rope.get("rope_type", "default")
    if (
        not architecture
        or config.hidden_act != "silu"
        or any("sliding" in kind for kind in getattr(config, "layer_types", None) or ())
        or scaling not in ("default", "linear", "yarn", *["llama3"] * (architecture == "llama"))
    ):
        raise _unknown(source, f"its architecture, {config.model_type}, with these settings")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_name(Path(source).stem)
    writer.add_file_type(_FILE_TYPES[network.dtype])
    values = config.to_dict() | rope
    head = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    settings = {key: values.get(name) for key, name in GGUF_CONFIG_MAPPING[architecture].items()}
    settings |= dict.fromkeys(
        ("attention.key_length", "attention.value_length", "rope.dimension_count"), head
    )
    if scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        settings |= {
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
        }
    for key, value in settings.items():
        if value is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{key}", value)
    _add_tokenizer(writer, tokenizer, config.vocab_size, source)
    if scaling == "llama3":
        angles = network.model.rotary_emb.inv_freq.float()
        plain = rope["rope_theta"] ** -torch.linspace(0, 1, len(angles) + 1)[:-1]
        writer.add_tensor("rope_freqs.weight", (plain / angles).numpy())
    _add_weights(writer, network, architecture, source)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_weights(writer: Any, network: Any, architecture: str, source: str) -> None:
    import gguf

    config = network.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, weight in network.state_dict().items():
        if name == HEAD and config.tie_word_embeddings:
            continue
        if (called := names.get_name(name, (".weight", ".bias"))) is None:
            raise _unknown(source, f"the weights {name}")
        if architecture == "llama" and (count := heads.get(name.split(".")[-2])):
            # llama.cpp interleaves the two halves of a head, which rotate together.
            weight = weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        kept = weight.float() if weight.dim() == 1 else weight.contiguous()
        if kept.dtype == torch.bfloat16:
            writer.add_tensor(
                called, kept.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16
            )
        else:
            writer.add_tensor(called, kept.numpy())


def _add_tokenizer(writer: Any, tokenizer: Any, rows: int, source: str) -> None:
    """Add a byte-pair tokenizer. rows: the number of tokens that the network knows."""
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    model, splits, normalizer = document["model"], document["pre_tokenizer"] or {}, document["normalizer"]
    parts = splits.get("pretokenizers", [splits])
    way = tuple(part.get("pattern", {}).get("Regex") or part.get("type", "") for part in parts)
    if model["type"] != "BPE" or way not in _SPLITS or normalizer not in (None, {"type": "NFC"}):
        raise _unknown(source, "its tokenizer")
    tokens, kinds = [f"[PAD{number}]" for number in range(rows)], [_UNUSED] * rows
    added = {token["id"]: token for token in document["added_tokens"]}
    spelled = {
        **{number: token for token, number in model["vocab"].items()},
        **{n: t["content"] for n, t in added.items()},
    }
    for number, token in spelled.items():
        kind = _NORMAL if number not in added else _CONTROL if added[number]["special"] else _USER_DEFINED
        tokens[number], kinds[number] = token, kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_SPLITS[way])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in model["merges"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)
    for name in ("bos", "eos", "pad"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)


def _unknown(source: str, what: str) -> ConfigError:
    return ConfigError(
        f"--gguf: swarmd does not know llama.cpp's format of {what} ({source}). Leave --gguf out: llama.cpp's"
        " convert_hf_to_gguf.py makes a GGUF file of the folder that is then written."
    )
