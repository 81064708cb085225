"""A model's architecture, from its config.json alone: the network without weights, sizes, batch layout.

There are three layouts of batches. The choice is made before any large download (docs/engines.md has the
table):

    packed     concatenated sequences with our attention (swarmd/policy/attention.py): `attention.covers`
    padded     transformers' attention and cache; prompts are padded on the left for decoding, rows on the
               right for training: PADDED
    untried    as padded, for other architectures that support it; `load_model` compares a batch with single
               sequences once the weights are there
"""

import inspect
import itertools
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from swarmd.errors import NoModel
from swarmd.policy.attention import covers
from swarmd.policy.models import hub
from swarmd.policy.models.files.model_folder import Stored, checked_folder, read_config_json, weight_map
from swarmd.policy.models.memory_plan import Shape

# Maximum number of modules of a network; 512 ordinary layers have about 7,000.
MAX_MODULES: Final = 20_000
# Architectures whose padded batches were compared with single sequences
# (tests/swarmd/policy/test_architectures.py).
PADDED: Final = frozenset(
    (
        "qwen3_next", "lfm2", "lfm2_moe", "lfm3", "falcon_h1", "bamba",
        "jamba", "olmo_hybrid", "granitemoehybrid", "gpt_oss", "deepseek_v3", "cohere2",
        "gemma4_unified_text",
    )
)  # fmt: skip
# transformers' names of recurrent layer types, without convolutions, whose state is small.
RECURRENT: Final = {"linear_attention", "hybrid", "hybrid_sliding"}
# The arguments of a forward pass that PaddedRows needs, in addition to the cache.
_ASKED: Final = {"attention_mask", "position_ids"}

# Maps the names of a language model's weights inside a model with several parts to their names in the
# language model alone.
TEXT_PART: Final = MappingProxyType(
    {
        r"^language_model\.lm_head\.": "lm_head.",
        r"^language_model\.model\.": "model.",
        r"^model\.language_model\.": "model.",
    }
)
HEAD: Final = "lm_head.weight"


def read_config(place: hub.Place) -> Any:
    """Read the transformers configuration of a model's text part from its checked config.json.

    Raises NoModel if transformers does not know such a model.
    """
    document = read_config_json(place.folder, place.source)
    try:
        with checked_folder(place.folder, place.source) as folder:
            architecture = _text_part(AutoConfig.from_pretrained(folder, trust_remote_code=False), document)
        with suppress(NoModel, SafetensorError):
            # Weights that are not downloaded yet, or not whole, change nothing here.
            _tie_as_stored(architecture, place)
    except NoModel:
        raise
    except Exception as error:  # the file is untrusted: transformers may raise anything
        if "auto_map" in document:
            raise _remote_code(place.source) from None
        raise NoModel(
            "transformers cannot read the configuration of"
            f" {place.source} ({hub.first_line(error)}). If the architecture is newer than the"
            " installed transformers, upgrade it; else choose another model."
        ) from error
    architecture.name_or_path = str(place.folder)
    return architecture


def _tie_as_stored(architecture: Any, place: hub.Place) -> None:
    """Set whether the head shares the embedding's weights, as the weight files have it.

    A config.json may say the opposite, and transformers follows the files. Raises NoModel or SafetensorError
    if the weights cannot be read.
    """
    stored = weight_map(place.folder, place.source)
    ties = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(architecture), None), "_tied_weights_keys", None)
    embedding = ties.get(HEAD) if isinstance(ties, dict) else None
    renamed = {_text_name(name): name for name in stored}
    if embedding not in renamed:
        return
    embedding = renamed[embedding]
    if HEAD in renamed:
        tied = architecture.tie_word_embeddings and _equal(place, stored, renamed[HEAD], embedding)
    else:
        # Some families give the head another name in the files, outside of the network's body.
        shape, body = stored[embedding].shape, _text_name(embedding).partition(".")[0]
        tied = not any(
            stored[name].shape == shape and text.partition(".")[0] != body for text, name in renamed.items()
        )
    architecture.tie_word_embeddings = tied


def _text_name(name: str) -> str:
    for pattern, text in TEXT_PART.items():
        name = re.sub(pattern, text, name)
    return name


def _equal(place: hub.Place, stored: Mapping[str, Stored], *names: str) -> bool:
    """Return whether two tensors in the weight files are equal."""
    files: list[Any] = [safe_open(place.folder / stored[name].file, framework="pt") for name in names]
    one, other = (file.get_tensor(name) for file, name in zip(files, names, strict=True))
    return one.dtype == other.dtype and torch.equal(one, other)


def _text_part(architecture: Any, document: dict[str, Any]) -> Any:
    """Return only the language model's configuration: vision and audio are neither loaded nor trained."""
    text = architecture.get_text_config()
    if not isinstance(text, PreTrainedConfig):
        raise TypeError("its text_config is no configuration of a model")
    if has_other_parts(document) and "tie_word_embeddings" in document:
        # Read this key from the whole document, since the text part may lack it.
        text.tie_word_embeddings = document["tie_word_embeddings"]
    return text


def has_other_parts(document: dict[str, Any]) -> bool:
    """Return whether a config.json describes parts in addition to a language model, such as vision."""
    return "text_config" in document


def skeleton_of(architecture: Any, source: str, most: int = MAX_MODULES) -> PreTrainedModel:
    """Build the network without its weights (meta device), to count parameters before any large download.

    most: maximum number of modules. Raises NoModel if there are more, or swarmd cannot train the model.
    """
    made = itertools.count(1)

    def count(_module: nn.Module, _name: str, _part: nn.Module | None) -> None:
        # Every thread that builds modules calls this.
        if next(made) > most:
            raise NoModel(
                f"{source} has over {most:,} modules, more than any usual model. Choose another model."
            )

    try:
        with torch.device("meta"), register_module_module_registration_hook(count):
            return AutoModelForCausalLM.from_config(architecture, trust_remote_code=False)
    except NoModel:
        raise
    except Exception as error:  # the file is untrusted: transformers may raise anything
        if isinstance(error, ValueError):
            if getattr(architecture, "auto_map", None):
                raise _remote_code(source) from None
            if "Unrecognized configuration class" in str(error):
                raise NoModel(
                    f"{source} is no causal language model ({type(architecture).__name__}). Choose one that"
                    " generates text."
                ) from None
        raise _not_built(source, error) from error


def cache_argument(network: PreTrainedModel) -> str:
    """Return the name of a network's cache argument, which transformers 5.24 changed."""
    return "cache" if "cache" in inspect.signature(network.forward).parameters else "past_key_values"


def _not_built(source: str, error: Exception) -> NoModel:
    return NoModel(
        f"the network that the config.json of {source} describes cannot be built"
        f" ({hub.first_line(error)}). Correct it in a local copy, or choose another model."
    )


def is_tried(network: PreTrainedModel, source: str) -> bool:
    """Return whether our tests compare batches of this architecture with single sequences.

    Raises NoModel if the network cannot be decoded in batches: it attends to later tokens, or its states
    cannot be selected by row.
    """
    config, kind = network.config, network.config.model_type
    if covers(config):
        return True
    if not getattr(config, "is_decoder", True):
        # A network like BERT, whose tokens see later tokens.
        raise NoModel(
            f"{source} does not write from left to right ({kind}). Choose a model that generates text."
        )
    try:
        DynamicCache(config=config)
    except Exception:  # an untrusted file, as above
        # transformers has no cache for these layers.
        fitting = False
    else:
        fitting = inspect.signature(network.forward).parameters.keys() >= _ASKED | {cache_argument(network)}
    if not fitting:
        raise NoModel(
            f"{source} ({kind}) keeps its states in a form that several answers to one prompt cannot"
            " share, so it cannot be trained here. Choose another model; `swarmd models` names some."
        )
    return kind in PADDED


def context_of(text: Any) -> int | None:
    """Return the greatest length in tokens up to which a sequence's computation does not change.

    text: a text model's configuration. longrope rotates all positions differently as soon as one exceeds its
        original length, so answers must end there.
    """
    ropes = getattr(text, "rope_parameters", None) or {}
    ropes = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
    original = [
        rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"
    ]
    return min(original, default=getattr(text, "max_position_embeddings", None))


def shape_of(network: PreTrainedModel, source: str = "this model") -> Shape:
    """Count a network's parameters and sizes; works on the meta device. Raises NoModel.

    All numbers are exact, except the widths, which come from the configuration.
    """
    try:
        # Validated, since a width that is a string could be multiplied without an error.
        return msgspec.convert(asdict(_counted(network)), Shape)
    except Exception as error:  # an untrusted file, as above
        # For example, hidden_size, heads, layers or head are missing, or differ between layers.
        raise _not_built(source, error) from error


def _counted(network: PreTrainedModel) -> Shape:
    text, head = network.config.get_text_config(), network.get_output_embeddings()
    layers = [m for m in network.modules() if isinstance(m, nn.Linear) and m is not head]
    norms = [
        m
        for m in network.modules()
        if "Norm" in type(m).__name__ and tuple(w.shape for w in m.parameters())[:1] == ((text.hidden_size,),)
    ]
    # Layers may differ, as in Gemma 4. transformers' configuration of the whole then lacks what varies.
    queries, keys, inners = zip(*map(_widths, text.per_layer_config), strict=True)
    return Shape(
        parameters=sum(p.numel() for p in network.parameters()),
        layers=text.num_hidden_layers,
        norms=max(1, (len(norms) - 1) // text.num_hidden_layers),  # without the norm after the last layer
        width=text.hidden_size,
        query_width=max(queries),
        key_width=max(keys),
        inner_width=max(inners),
        vocabulary=head.weight.shape[0],
        context=context_of(text),
        adapted_inputs=sum(m.in_features for m in layers),
        adapted_outputs=sum(m.out_features for m in layers),
        adapted_weights=sum(m.weight.numel() for m in layers),
        recurrent=sum(kind in RECURRENT for kind in getattr(text, "layer_types", None) or ()),
    )


def _widths(layer: Any) -> tuple[int, int, int]:
    """Return the widths of a layer's queries, keys and inner states, from its configuration."""
    head = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    key_heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    inner = getattr(layer, "intermediate_size", None) or 4 * layer.hidden_size
    return (
        layer.num_attention_heads * head,
        key_heads * head,
        max(inner) if isinstance(inner, list | tuple) else inner,
    )


def _remote_code(source: str) -> NoModel:
    return NoModel(
        f"{source} needs Python code from its own repository, which is never run. Choose a"
        " model that transformers supports without such code."
    )
