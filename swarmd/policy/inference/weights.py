"""The policy's weights as files, for an engine that runs elsewhere.

An adapter as peft reads it, or the whole model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save_file
from torch import Tensor, nn

from swarmd.policy.models.load import lora_config
from swarmd.policy.models.lora import folded, lora_layers

_ADAPTER: Final = ".default."  # peft's name of the only adapter, inside tensor names
_OF_PEFT: Final = "base_model.model."  # peft's prefix of tensor names in a file


@dataclass(frozen=True, slots=True)
class NetworkWeights:
    """Implements `swarmd.policy.inference.engine.Weights`.

    network: with LoRA layers inside where there is a rank.
    """

    network: nn.Module
    version: int
    lora_rank: int | None
    model: str  # the base model: a folder or a repository, written into the adapter

    def write_adapter(self, folder: Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors."""
        assert self.lora_rank is not None
        layers = [name for name, _ in lora_layers(self.network)]
        config = lora_config(self.lora_rank)
        config.target_modules = {name.rpartition(".")[2] for name in layers}
        config.base_model_name_or_path = self.model
        config.inference_mode = True
        adapter = {name: p.detach() for name, p in self.network.named_parameters() if "lora_" in name}
        tensors = {_OF_PEFT + name.replace(_ADAPTER, "."): p.contiguous() for name, p in adapter.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)

    def write_model(self, folder: Path) -> None:
        """Write config.json and model.safetensors; a tensor shared by two layers (tied) is written once.

        Adapted layers are written in float32: W + s B A in 16 bits would lose part of the adapter.
        """
        network: Any = self.network
        tensors: dict[str, Tensor] = {}
        there: set[int] = set()
        for name, weight in network.named_parameters(remove_duplicate=True):
            if "lora_" not in name and weight.data_ptr() not in there:
                there.add(weight.data_ptr())
                tensors[name.replace(".base_layer.", ".")] = weight.detach().contiguous()
        tensors |= {f"{name}.weight": folded(layer) for name, layer in lora_layers(network)}
        tensors |= {
            name: b.contiguous() for name, b in network.named_buffers() if name in network.state_dict()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        network.config.save_pretrained(folder)
        network.generation_config.save_pretrained(folder)
