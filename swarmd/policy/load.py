"""A named model, ready to be trained: network on its device, tokenizer, and what a checkpoint has to know of it."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from swarmd.config import ModelConfig
from swarmd.errors import NoModel
from swarmd.policy import hub
from swarmd.policy.device import choose_device, choose_dtype, free_memory, is_out_of_memory

LORA_FROM: Final = 100_000_000  # parameters; larger models get an adapter unless the configuration says otherwise


@dataclass(frozen=True, slots=True)
class Loaded:
    """`network` is the transformers model itself, with LoRA layers inside where there is an adapter; in eval mode (no dropout), always."""

    network: nn.Module
    tokenizer: Any
    source: str
    revision: str | None  # the commit, for a model of the hub
    device: torch.device
    dtype: torch.dtype
    parameters: int  # of the base model
    lora_rank: int | None  # None: all weights are trained
    fingerprint: str  # of the base weights as they were loaded


def load_model(config: ModelConfig, seed: int, free: Callable[[torch.device], int] = free_memory) -> Loaded:
    """Load what the configuration names. NoModel or Unreachable with cause and remedy; nothing large is fetched before it is known to fit.

    seed: of the adapter's first weights. free: bytes free on a device.
    """
    transformers_logging.disable_progress_bar()
    device = choose_device(config.device)
    place = hub.locate(config.name, config.revision)
    architecture = _read_config(place)
    skeleton = _skeleton(architecture, place.source)
    parameters = sum(p.numel() for p in skeleton.parameters())
    lora_rank = config.lora_rank if config.lora == "on" or (config.lora == "auto" and parameters > LORA_FROM) else None
    dtype = choose_dtype(config.dtype, device, trained_whole=lora_rank is None)
    _check_room(place.source, memory_needed(skeleton, dtype, lora_rank), device, free)

    tokenizer = _tokenizer(place, skeleton)
    network = _weights(hub.with_weights(place), architecture, dtype, place.source)
    fingerprint = _fingerprint(network)
    try:
        network = (_with_adapter(network, lora_rank, seed) if lora_rank else network).to(device).eval()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise _too_large(place.source, f"its {parameters:,} parameters did not fit on {device}") from error
    return Loaded(network, tokenizer, place.source, place.revision, device, dtype, parameters, lora_rank, fingerprint)


def memory_needed(network: nn.Module, dtype: torch.dtype, lora_rank: int | None) -> int:
    """Bytes for weights, gradients and Adam's two moments; what one micro-batch holds comes on top. Works on the meta device.

    A LoRA pair of rank r on a layer of n inputs and m outputs has r (n + m) weights, kept in float32.
    """
    weights = sum(p.numel() for p in network.parameters()) * dtype.itemsize
    if lora_rank is None:
        return 4 * weights
    head = network.get_output_embeddings()  # type: ignore[operator]  # of every causal language model
    layers = [m for m in network.modules() if isinstance(m, nn.Linear) and m is not head]
    return weights + 4 * 4 * lora_rank * sum(m.in_features + m.out_features for m in layers)


def _read_config(place: hub.Place) -> Any:
    try:
        document = json.loads((place.folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise _not_json(place.source)
        return AutoConfig.from_pretrained(place.folder, trust_remote_code=False)
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise _not_json(place.source) from None
    except (ValueError, KeyError, TypeError, OSError) as error:  # what transformers raises for a configuration it can't make sense of
        if "auto_map" in document:
            raise _remote_code(place.source) from None
        raise NoModel(
            f"transformers cannot read the configuration of {place.source} ({hub.first_line(error)}). "
            "If the architecture is newer than the installed transformers, upgrade it; else choose another model."
        ) from error


def _not_json(source: str) -> NoModel:
    return NoModel(f"the config.json of {source} is not a JSON object. Download the model again.")


def _skeleton(architecture: Any, source: str) -> nn.Module:
    """The network without its weights (meta device): to count, before anything is fetched."""
    try:
        with torch.device("meta"):
            network: nn.Module = AutoModelForCausalLM.from_config(architecture, trust_remote_code=False)
    except ValueError:
        if getattr(architecture, "auto_map", None):
            raise _remote_code(source) from None
        raise NoModel(f"{source} is no causal language model ({type(architecture).__name__}). Choose one that generates text.") from None
    return network


def _remote_code(source: str) -> NoModel:
    return NoModel(f"{source} needs Python code from its own repository, which is never run. Choose one that transformers knows itself.")


def _check_room(source: str, needed: int, device: torch.device, free: Callable[[torch.device], int]) -> None:
    there = free(device)
    if needed > there:
        raise _too_large(source, f"training it takes at least {_gigabytes(needed)}, and {device} has {_gigabytes(there)} free")


def _too_large(source: str, why: str) -> NoModel:
    return NoModel(f"not enough memory for {source}: {why}. Close other programs, set model.lora to 'on', or choose a smaller model.")


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def _tokenizer(place: hub.Place, network: nn.Module) -> Any:
    """The model's tokenizer, once it is known to have what a chat needs."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(place.folder, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError, ImportError) as error:  # missing, damaged, or of a kind that needs more
        raise NoModel(
            f"the tokenizer of {place.source} cannot be loaded ({hub.first_line(error)}). Choose another model, or repair its files."
        ) from error
    if tokenizer.chat_template is None:
        raise NoModel(
            f"the tokenizer of {place.source} has no chat template, so questions cannot be put to it. "
            "Choose an instruct model, or add a chat_template.jinja to a local copy."
        )
    if tokenizer.eos_token_id is None:
        raise NoModel(
            f"the tokenizer of {place.source} has no end-of-sequence token, so answers could not end. "
            "Set eos_token in the tokenizer_config.json of a local copy, or choose another model."
        )
    rows = network.get_input_embeddings().num_embeddings  # type: ignore[operator]  # of every causal language model
    if len(tokenizer) > rows:
        raise NoModel(
            f"the tokenizer of {place.source} has {len(tokenizer)} tokens and its network only {rows}: they do not belong together. "
            "Take both from the same model."
        )
    return tokenizer


def _weights(folder: Path, architecture: Any, dtype: torch.dtype, source: str) -> nn.Module:
    try:
        network: nn.Module
        network, report = AutoModelForCausalLM.from_pretrained(
            folder, config=architecture, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise NoModel(
            f"the weights of {source} cannot be loaded ({hub.first_line(error)}). Download them again, or choose another model."
        ) from error
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise _too_large(source, "its weights did not fit") from error
        raise NoModel(f"the weights of {source} do not fit its configuration ({hub.first_line(error)}). Download it again.") from error
    if report["missing_keys"]:  # transformers would go on with random ones
        some = ", ".join(sorted(report["missing_keys"])[:3])
        raise NoModel(f"the weights of {source} are not all there ({some} …). Download it again, or choose another model.")
    return network


def _with_adapter(network: nn.Module, rank: int, seed: int) -> nn.Module:
    """LoRA on every linear layer but the head (arXiv 2106.09685), alpha = 2 r; adapter weights are float32 whatever the base is.

    Only the layers are kept, not peft's wrapper around the model: they do their work inside the network's own forward.
    """
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):  # peft draws from torch's global source
        torch.manual_seed(seed)
        adapted: nn.Module = get_peft_model(network, config).get_base_model()
    return adapted


def _fingerprint(network: nn.Module) -> str:
    """16 hex digits of names, shapes and the first weights of every tensor: tells base models apart, whatever dtype they were loaded in."""
    digest = hashlib.sha256()
    for name, weight in sorted(network.named_parameters()):
        first = weight.detach().flatten()[:64].to(torch.bfloat16).float()
        digest.update(f"{name}{tuple(weight.shape)}{first.tolist()}".encode())
    return digest.hexdigest()[:16]
