"""LoRA layers: merged into the base weights while answering, and unmerged bit for bit."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear


def lora_layers(network: nn.Module) -> "list[tuple[str, LoraLinear]]":
    """The adapted layers and their names. Where nobody has imported peft, which takes a while, there are none."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.lora import Linear as LoraLinear

    return [(name, module) for name, module in network.named_modules() if isinstance(module, LoraLinear)]


@contextmanager
def merged(network: nn.Module) -> Iterator[None]:
    """Every adapted layer computes W + s B A in one product (arXiv 2106.09685, section 4.1) until the end of the block.

    The base weights are put aside, not added to and subtracted from: what comes back is what was there, bit for bit. Costs a second copy
    of the adapted layers' weights; in bfloat16 the sum is rounded.
    """
    aside: list[tuple[LoraLinear, Tensor]] = []
    try:
        with torch.no_grad():
            for _, layer in lora_layers(network):
                if not layer.merged and not layer.disable_adapters:
                    weight = layer.get_base_layer().weight
                    whole = _whole(layer, weight)
                    aside.append((layer, weight.data))
                    weight.data = whole
                    layer.merged_adapters.extend(layer.active_adapters)
        yield
    finally:
        for layer, base in aside:
            layer.get_base_layer().weight.data = base
            layer.merged_adapters.clear()


class StandingMerge:
    """Layers that stay folded in, for a network that only answers, and whose adapter comes from elsewhere; `merged` leaves them alone."""

    def __init__(self, network: nn.Module) -> None:
        """Holds the base weights of adapted layers a second time; does nothing where there is no adapter."""
        self._base: list[tuple[LoraLinear, Tensor]] = []
        for _, layer in lora_layers(network):
            self._base.append((layer, layer.get_base_layer().weight.detach().clone()))
            layer.merged_adapters.extend(layer.active_adapters)
        self.refold()

    def refold(self) -> None:
        """The adapter has changed: compute W + s B A anew, from W as it was loaded, into the memory the network computes with."""
        with torch.no_grad():
            for layer, base in self._base:
                layer.get_base_layer().weight.copy_(_whole(layer, base))


def _whole(layer: "LoraLinear", base: Tensor) -> Tensor:
    delta: Tensor = sum(layer.get_delta_weight(name).float() for name in layer.active_adapters)
    return (base.float() + delta).to(base.dtype)
