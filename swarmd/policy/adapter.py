"""LoRA layers inside a network: folded into the base weights while answering, and taken out again without a trace."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn


@contextmanager
def merged(network: nn.Module) -> Iterator[None]:
    """Every adapted layer computes W + s B A in one product (arXiv 2106.09685, section 4.1) until the end of the block.

    The base weights are put aside, not added to and subtracted from: what comes back is what was there, bit for bit. Costs a second copy
    of the adapted layers' weights; in bfloat16 the sum is rounded.
    """
    aside: list[tuple[LoraLinear, Tensor]] = []
    try:
        with torch.no_grad():
            for layer in network.modules():
                if isinstance(layer, LoraLinear) and not layer.merged and not layer.disable_adapters:
                    weight = layer.get_base_layer().weight
                    delta = sum(layer.get_delta_weight(name).float() for name in layer.active_adapters)
                    whole = (weight.float() + delta).to(weight.dtype)
                    aside.append((layer, weight.data))
                    weight.data = whole
                    layer.merged_adapters.extend(layer.active_adapters)
        yield
    finally:
        for layer, base in aside:
            layer.get_base_layer().weight.data = base
            layer.merged_adapters.clear()
