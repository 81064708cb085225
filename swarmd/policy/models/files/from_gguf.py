"""The process that reads a GGUF file: `python -m swarmd.policy.models.files.from_gguf FILE TO WANTED FOLDER`.

It writes to the folder TO: the model's weights if WANTED is their name (FOLDER must then hold the small
files), else the small files. It prints nothing on success, else a JSON string with the reason.

The weights keep the file's number type. Weights in quantised blocks become float16, since the scale of a
block is a float16. With SmolLM2-135M in Q4_1, the next token's probabilities differ from float32's by at most
0.0017 in float16, and by 0.013 in bfloat16.
"""

import contextlib
import gc
import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict, read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swarmd.config.messages import shown
from swarmd.errors import NoModel
from swarmd.policy.models.architecture import skeleton_of
from swarmd.policy.models.files.gguf import no_room, one_part
from swarmd.policy.models.files.model_folder import WEIGHTS
from swarmd.policy.models.hub import first_line
from swarmd.tasks.sandbox.containment import address_space, set_limits

# Values of general.type in files that hold no model.
_PARTS: Final = MappingProxyType(
    {
        "adapter": "a LoRA adapter. Give the model that it was made for, or merge the two with llama.cpp's"
        " `llama-export-lora`",
        "mmproj": "the part of a model that sees or hears. Give the file of its language model",
        "imatrix": "a matrix for quantising. Give the file of the model",
    }
)
# By the number in general.file_type; blocks have other numbers.
_TYPES: Final = MappingProxyType({0: torch.float32, 1: torch.float16, 32: torch.bfloat16})
# llama.cpp's names of pre-tokenizers: the same as GPT-2's, and the same with single digits.
_AS_GPT2: Final = ("", "default", "gpt-2", "phi-2", "mellum", "modern-bert")
_DIGITS_APART: Final = ("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b")
# Settings that change a model's computation; transformers reads them for few architectures only.
_COMPUTED_WITH: Final = (
    "attention.scale", "attn_logit_softcapping", "embedding_scale", "expert_count", "final_logit_softcapping",
    "logit_scale", "residual_scale",
)  # fmt: skip
# Llama 3 scales the rotations of slow positions. The file has the ratios of the angles, but not these
# parameters, which are the same in every Llama 3.
_LLAMA3: Final = MappingProxyType(
    {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
)
_ANGLES: Final = "rope_freqs.weight"
# Name of the link to the file, since transformers checks the ending.
_NAME: Final = "model.gguf"
_REMEDY: Final = "Give the safetensors model that it was made from, or choose another one."


def main() -> None:
    """Run the process: convert, or print the reason for a failure."""
    file, out = sys.argv[1:3]
    # The gguf package creates millions of objects, and this process is short-lived.
    gc.disable()
    try:
        size = Path(file).stat().st_size
        # Blocks have at least 1.6 bits per weight, and the weights are in memory twice while they are saved.
        memory = address_space() + 2**32 + 24 * size
        set_limits({resource.RLIMIT_CPU: 300 + size // 10**6, resource.RLIMIT_AS: memory})
        convert(*sys.argv[1:])
    except NoModel as error:
        fault = str(error)
    except (OSError, SafetensorError) as error:
        fault = str(no_room(Path(out).parent, error))
    except MemoryError:
        sys.exit(1)
    except BaseException as error:
        # The file is untrusted: the libraries may raise anything, and a panic in Rust is no Exception.
        fault = f"{file} cannot be converted ({first_line(error)}). {_REMEDY}"
    else:
        return
    print(json.dumps(fault))
    sys.exit(1)


def convert(file: str, out: str, wanted: str, folder: str) -> None:
    """Write the small files, or the weights. Raises NoModel, and any error of the libraries."""
    metadata, names = _read(file)
    if wanted == WEIGHTS:
        _write_weights(file, metadata, Path(out), Path(folder))
    else:
        with TemporaryDirectory(prefix="swarmd-gguf-") as private:
            # Libraries must not see the file's own folder, which may hold other files.
            (Path(private) / _NAME).symlink_to(file)
            _write_small_files(file, metadata, names, private, Path(out))


def _write_small_files(
    file: str, metadata: Mapping[str, Any], names: tuple[str, ...], private: str, out: Path
) -> None:
    config = AutoConfig.from_pretrained(private, gguf_file=_NAME, trust_remote_code=False)
    architecture = metadata["general.architecture"]
    if (width := metadata.get(f"{architecture}.attention.key_length")) and architecture in ("llama", "qwen3"):
        config.head_dim = width
    _set_positions(file, metadata, names, config)
    _require_all_read(file, metadata, names, config)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(private, gguf_file=_NAME)
    _set_splits(file, metadata, tokenizer)
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    generation = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=sorted({end for end in ends if end is not None}) or None,
    )
    for made in (config, generation, tokenizer):
        made.save_pretrained(out)


def _write_weights(file: str, metadata: Mapping[str, Any], out: Path, folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    dtype = _TYPES.get(metadata.get("general.file_type", -1), torch.float16)
    tensors = load_gguf_checkpoint(file, True, _names_alone(config, file), dtype)["tensors"]
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()},
        out / WEIGHTS,
        {"format": "pt"},
    )


def _names_alone(config: Any, file: str) -> Any:
    """Return a stand-in network with names only: transformers would rebuild its name table per module."""
    return SimpleNamespace(
        config=config, state_dict=skeleton_of(config, file).state_dict, named_children=tuple
    )


def _read(file: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return a file's metadata and its tensors' names. Raises NoModel if it holds no complete model."""
    try:
        metadata, names = read_gguf_metadata(file)
    except Exception as error:
        raise NoModel(
            f"{file} is damaged, or of an unknown version ({first_line(error)}). Download it again, or choose"
            " another model."
        ) from None
    with contextlib.suppress(ValueError):
        # The gguf package knows more block types than this reader, which raises ValueError for the rest.
        header = GgufHeader.from_file(file)
        size = Path(file).stat().st_size
        end = max((header.data_start + part.offset + part.nbytes for part in header.tensors), default=size)
        if end > size:
            raise NoModel(f"{file} is cut off: it has {size:,} of {end:,} bytes. Download it again.")
    architecture = metadata["general.architecture"]
    if metadata.get("split.count", 1) > 1:
        raise one_part(Path(file))
    if part := _PARTS.get("mmproj" if architecture == "clip" else metadata.get("general.type", "model")):
        raise NoModel(f"{file} is {part}.")
    if metadata.get(f"{architecture}.pooling_type") or not metadata.get(
        f"{architecture}.attention.causal", True
    ):
        raise NoModel(
            f"{file} holds a model of embeddings, which writes no text. Choose a model that generates text."
        )
    return metadata, names


def _set_positions(file: str, metadata: Mapping[str, Any], names: tuple[str, ...], config: Any) -> None:
    """Set the scaling of positions, which transformers does not read. Raises NoModel for an unknown kind."""
    scaling = f"{metadata['general.architecture']}.rope.scaling."
    kind = metadata.get(f"{scaling}type", "none")
    if kind in ("linear", "yarn"):
        config.rope_parameters |= {"rope_type": kind, "factor": metadata[f"{scaling}factor"]}
        if original := metadata.get(f"{scaling}original_context_length"):
            config.rope_parameters["original_max_position_embeddings"] = original
    elif kind != "none":
        raise NoModel(f"{file} has {scaling}type = {shown(kind)}, which swarmd does not read. {_REMEDY}")
    if _ANGLES in names:
        quotients = load_gguf_state_dict(GgufHeader.from_file(file))[_ANGLES][...]
        plain = config.rope_parameters["rope_theta"] ** -torch.linspace(0, 1, len(quotients) + 1)[:-1]
        config.rope_parameters |= {"rope_type": "llama3", "factor": float(quotients.max()), **_LLAMA3}
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if not torch.allclose(plain / scaled, quotients, rtol=1e-3):
            raise NoModel(
                f"{file} has {_ANGLES} that differ from Llama 3's, which swarmd does not read. {_REMEDY}"
            )


def _require_all_read(file: str, metadata: Mapping[str, Any], names: tuple[str, ...], config: Any) -> None:
    """Raise NoModel if the file has settings or tensors that transformers would ignore in its computation."""
    architecture, known = metadata["general.architecture"], config.to_dict().values()
    settings = {name: metadata.get(f"{architecture}.{name}") for name in _COMPUTED_WITH}
    unread = [name for name, value in settings.items() if value and value not in known]
    reader = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    read = get_gguf_hf_weights_map(_names_alone(config, file), reader)
    read_names = {name.removesuffix(".weight") for name in read}
    unread += [name for name in names if name != _ANGLES and name.removesuffix(".weight") not in read_names]
    if unread:
        raise NoModel(f"{file} has {shown(unread[0])}, which transformers does not read. {_REMEDY}")


def _set_splits(file: str, metadata: Mapping[str, Any], tokenizer: Any) -> None:
    """Set the pre-tokenizer if transformers does not. Raises NoModel for an unknown one."""
    splits = metadata.get("tokenizer.ggml.pre", "")
    if splits in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif metadata["tokenizer.ggml.model"] == "gpt2" and splits not in (*_AS_GPT2, *GGUF_PRE_TOKENIZER_SPLITS):
        raise NoModel(f"{file} has an unknown pre-tokenizer, {shown(splits)}. {_REMEDY}")


if __name__ == "__main__":
    main()
