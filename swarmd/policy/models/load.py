"""Load a named model for training: network, tokenizer, and the fingerprint for its checkpoints."""

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from swarmd.config.config import ModelConfig
from swarmd.errors import NoModel
from swarmd.policy.inference.padded import agrees_with_itself
from swarmd.policy.lm_head import take_over_head
from swarmd.policy.models import hub
from swarmd.policy.models.architecture import TEXT_PART, has_other_parts, read_config
from swarmd.policy.models.device import free_memory, is_out_of_memory, within_memory
from swarmd.policy.models.files.model_folder import again, checked_folder, read_config_json
from swarmd.policy.models.files.progress import Download
from swarmd.policy.models.fit import FittedModel, fit
from swarmd.policy.models.lora import NF4, adapted_linear, pack_bases
from swarmd.policy.models.memory_plan import Workload

ORDINARY_WORK: Final = Workload()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(FittedModel):
    """A loaded model, always in eval mode (no dropout).

    `network` is the transformers model itself. With an adapter, it contains LoRA layers.
    """

    network: PreTrainedModel
    fingerprint: str  # fingerprint of the base weights as loaded


def load_model(
    config: ModelConfig,
    seed: int,
    free: Callable[[torch.device], int] = free_memory,
    work: Workload = ORDINARY_WORK,
    report: Callable[[Download], None] = lambda _: None,
) -> Loaded:
    """Load the configured model. Nothing large is downloaded before it is known to fit.

    Args:
        config: the `[model]` section.
        seed: seed of a new adapter's weights.
        free: returns the free bytes of a device.
        work: the work of a round; see `swarmd.policy.models.fit.work_of`.
        report: receives the progress of a download.

    Raises:
        NoModel, Unreachable: with cause and remedy.
    """
    transformers_logging.disable_progress_bar()
    found = fit(config, work, free)
    found.require()
    place, device = found.place, found.device

    folder = hub.with_weights(place, report)
    if read_config(place).tie_word_embeddings != found.architecture.tie_word_embeddings:
        # The downloaded weights show that the head is tied, or not tied, against the configuration.
        found = fit(config, work, free)
        found.require()
    plan = found.plan
    network = load_weights(folder, found.architecture, found.dtype, place.source)
    if not found.tried and not agrees_with_itself(network):
        raise NoModel(
            f"{place.source} ({network.config.model_type})"
            " computes other results in batched decoding than in one pass with the installed"
            " transformers, so it would be trained on wrong probabilities. Choose another"
            " model; `swarmd models` names some."
        )
    fingerprint = fingerprint_of(network)
    with within_memory(
        _too_large(place.source, f"its {found.shape.parameters:,} parameters did not fit on {device}")
    ):
        if plan.lora_rank:
            network = with_adapter(network, plan.lora_rank, seed)
        if plan.dtype == NF4:
            pack_bases(network, device)
        network = network.to(device).eval()
        take_over_head(network)
    return Loaded(
        **{field.name: getattr(found, field.name) for field in fields(found)},
        network=network,
        fingerprint=fingerprint,
    )


def _too_large(source: str, why: str) -> NoModel:
    return NoModel(
        f"not enough memory for {source}: {why}. Close other programs, or choose a smaller model. `swarmd"
        " doctor model` shows the memory that it needs."
    )


def load_weights(folder: Path, architecture: Any, dtype: torch.dtype, source: str) -> PreTrainedModel:
    """Load a folder's network with its weights on the CPU.

    architecture: the result of `read_config`. Raises NoModel.
    """
    parts = has_other_parts(read_config_json(folder, source))
    told = transformers_logging.get_verbosity()
    # Otherwise transformers logs one line for each tensor of the parts that are left out.
    transformers_logging.set_verbosity_error()
    try:
        with checked_folder(folder, source, weights=True) as private:
            network, report = AutoModelForCausalLM.from_pretrained(
                private,
                config=architecture,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                key_mapping=dict(TEXT_PART) if parts else None,
            )
    except NoModel:
        raise
    except Exception as error:  # the files are untrusted: transformers may raise anything
        if is_out_of_memory(error):
            raise _too_large(source, "its weights did not fit") from error
        raise NoModel(
            f"the weights of {source} cannot be loaded, or do not fit its configuration"
            f" ({hub.first_line(error)}). {again(folder)}, or choose another model."
        ) from error
    finally:
        transformers_logging.set_verbosity(told)
    if report["missing_keys"]:
        # transformers would continue with random weights for them.
        some = ", ".join(sorted(report["missing_keys"])[:3])
        raise NoModel(
            f"the weights of {source} are incomplete: {some} are missing. {again(folder)}, or choose another"
            " model."
        )
    return network


# Layers whose weights fast kernels read directly, bypassing an adapter; peft refuses to adapt these.
_BY_KERNELS: Final = MappingProxyType({"falcon_h1": ["out_proj"], "nemotron_h": ["out_proj"]})


def lora_config(rank: int, network: PreTrainedModel) -> Any:
    """Return peft's LoraConfig for every linear layer except the head (arXiv 2106.09685), with alpha = 2 r.

    Adapter weights are float32, independent of the base's dtype.
    """
    # Imported here, since peft's import is slow and only adapters need it.
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM",
        exclude_modules=_BY_KERNELS.get(network.config.model_type),
    )  # fmt: skip
    # In some families peft also adapts experts and routers, which were linear layers before transformers 5
    # and are parameters now. The memory plan and `lora.fold` do not support these. peft also mistakes other
    # layers with such names for experts (huggingface/peft#3711). So all of these are left out.
    convert_peft_config_for_transformers(config, network, None)
    config.target_parameters, config.rank_pattern, config.alpha_pattern = None, {}, {}
    return config


def with_adapter(network: PreTrainedModel, rank: int, seed: int) -> PreTrainedModel:
    """Add an adapter that has no effect yet. seed: seed of its first weights.

    Only the adapted layers are kept, without peft's wrapper around the model. They work inside the network's
    own forward pass (`lora.adapted`).
    """
    config = lora_config(rank, network)
    config._register_custom_module({nn.Linear: adapted_linear()})
    with torch.random.fork_rng(devices=[]):
        # peft draws from torch's global generator.
        torch.manual_seed(seed)
        return in_peft(network, config).get_base_model()


def in_peft(network: PreTrainedModel, config: Any) -> Any:
    """Wrap a network with an adapter as a peft model."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        # The operator cannot avoid this warning: peft reads a deprecated property of transformers.
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(network, config)


def fingerprint_of(network: nn.Module) -> str:
    """Identify a base model by 16 hex digits, independent of the dtype that it was loaded in.

    The digits hash the names, shapes and first 64 weights of all tensors. Weights are rounded to bfloat16, as
    most models are stored, then to float16, which has less precision for small numbers.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(network.named_parameters()):
        first = weight.detach().flatten()[:64].to(torch.bfloat16).to(torch.float16)
        digest.update(f"{name}{tuple(weight.shape)}{first.tolist()}".encode())
    return digest.hexdigest()[:16]
