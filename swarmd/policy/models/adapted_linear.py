"""peft's LoRA layer with another forward. Apart from lora.py because peft takes a while to import."""

from typing import Any

from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor

from swarmd.policy.models.lora import adapted, lora_factors


class AdaptedLinear(LoraLinear):  # type: ignore[misc]
    """The layer that training, answers and log-probabilities all go through.

    See `lora.adapted` for what it computes.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Apply layer and adapter: x [..., n] -> [..., m]."""
        base, factors = self.base_layer, lora_factors(self)
        if factors is None:
            alone: Tensor = base(x, *args, **kwargs)
            return alone
        return adapted(x.reshape(-1, x.shape[-1]), base.weight, base.bias, *factors).view(*x.shape[:-1], -1)
