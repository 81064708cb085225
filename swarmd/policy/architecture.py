"""A model's architecture, from its config.json alone: its network without weights, and what of it costs memory."""

import json
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from swarmd.errors import NoModel
from swarmd.policy import hub
from swarmd.policy.plan import Shape


def read_config(place: hub.Place) -> Any:
    """transformers' configuration of it. NoModel where there is none that it knows itself."""
    try:
        document = json.loads((place.folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise _not_json(place.source)
        return AutoConfig.from_pretrained(place.folder, trust_remote_code=False)
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise _not_json(place.source) from None
    # What transformers raises for a configuration it can't make sense of, the last for a value of the wrong kind.
    except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
        if "auto_map" in document:
            raise _remote_code(place.source) from None
        raise NoModel(
            f"transformers cannot read the configuration of {place.source} ({hub.first_line(error)}). "
            "If the architecture is newer than the installed transformers, upgrade it; else choose another model."
        ) from error


def skeleton_of(architecture: Any, source: str) -> nn.Module:
    """The network without its weights (meta device): to count, before anything is fetched."""
    try:
        with torch.device("meta"):
            network: nn.Module = AutoModelForCausalLM.from_config(architecture, trust_remote_code=False)
    except ValueError:
        if getattr(architecture, "auto_map", None):
            raise _remote_code(source) from None
        raise NoModel(f"{source} is no causal language model ({type(architecture).__name__}). Choose one that generates text.") from None
    return network


def shape_of(network: nn.Module) -> Shape:
    """Counted on the network itself, so exact but for the widths, which are the configuration's. Works on the meta device."""
    text: Any = network.config.get_text_config()  # type: ignore[operator,union-attr]  # of every transformers model
    head: Any = network.get_output_embeddings()  # type: ignore[operator]  # of every causal language model
    layers = [m for m in network.modules() if isinstance(m, nn.Linear) and m is not head]
    norms = [
        m for m in network.modules() if "Norm" in type(m).__name__ and tuple(w.shape for w in m.parameters())[:1] == ((text.hidden_size,),)
    ]
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return Shape(
        parameters=sum(p.numel() for p in network.parameters()),
        layers=text.num_hidden_layers,
        norms=max(1, (len(norms) - 1) // text.num_hidden_layers),  # less the one behind the last layer
        width=text.hidden_size,
        query_width=text.num_attention_heads * head_width,
        key_width=(getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_width,
        inner_width=max(inner) if isinstance(inner, list | tuple) else inner,
        vocabulary=head.weight.shape[0],
        context=getattr(text, "max_position_embeddings", None),
        adapted=sum(m.weight.numel() for m in layers),
        adapted_inputs=sum(m.in_features for m in layers),
        adapted_outputs=sum(m.out_features for m in layers),
    )


def _not_json(source: str) -> NoModel:
    return NoModel(f"the config.json of {source} is not a JSON object. Download the model again.")


def _remote_code(source: str) -> NoModel:
    return NoModel(f"{source} needs Python code from its own repository, which is never run. Choose one that transformers knows itself.")
