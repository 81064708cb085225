"""LoRA (arXiv 2106.09685): adapted layers, their forward pass, and merging adapters.

All users of the policy compute the same: the update, the sampler, the judge. With a 16-bit base, two common
methods lose a young adapter, whose effect is still small (docs/performance.md, "Further checks"). One rounds
W + s B A to the base's dtype. The other, peft's forward, adds the adapter's output to an already rounded
product, and so loses every part below half of the product's last digit.

The base may be stored in 4 bits (QLoRA, arXiv 2305.14314): NF4 by bitsandbytes, in blocks of 64 weights with
8-bit scales. A layer's weights are unpacked to bfloat16 when it is used. So the error of the quantization is
in the model from the start, and equal for all users.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmd.errors import NoModel
from swarmd.policy.models.device import gives_float32, require_bitsandbytes

NF4: Final = "nf4"  # `model.dtype`


def adapted(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> Tensor:
    """Return x Wᵀ + s (x Aᵀ) Bᵀ + b.

    x: [N, n]. weight: [m, n]. bias: [m]. down, up: as from `lora_factors`. Returns [N, m]. The sum of both
    products is in float32 and is rounded once.
    """
    out = summed(F.linear(F.linear(x, down), up), x, weight)
    return out if bias is None else out + bias


def summed(added: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return added + x Wᵀ, rounded once.

    added: [N, m]. x: [N, n]. weight: [m, n], not trained. On a CPU, the matrix product adds `added` to its
    float32 accumulator. cuBLAS in 16 bits and MPS round the product first, which lost a young adapter
    (docs/performance.md), so there the product is computed in float32.
    """
    if x.device.type == "cpu" or x.dtype == torch.float32:
        return torch.addmm(added, x, weight.T)
    out: Tensor = _Summed.apply(added, x, weight)  # type: ignore[no-untyped-call]
    return out


class _Summed(torch.autograd.Function):
    """`summed` for devices on which torch defines no gradient for it."""

    @staticmethod
    def forward(ctx: Any, added: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        if not gives_float32(x.device, x.dtype):
            return torch.addmm(added.float(), x.float(), weight.float().T).to(x.dtype)
        return torch.add(torch.mm(x, weight.T, out_dtype=torch.float32), added, out=torch.empty_like(added))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (weight,) = ctx.saved_tensors
        return gradients[0], gradients[0] @ weight if ctx.needs_input_grad[1] else None, None


def base_of(layer: Any) -> Any:
    """Return the base layer of an adapted layer, or the layer itself."""
    return getattr(layer, "base_layer", layer)


def lora_factors(layer: Any) -> tuple[Tensor, Tensor] | None:
    """Return A [r, n] and s B [m, r] of a layer, or None if no adapter is active.

    They have the dtype of the layer's base, as with torch's autocast.
    """
    if not hasattr(layer, "lora_A") or layer.disable_adapters:
        return None
    (name,) = layer.active_adapters
    base = layer.base_layer
    dtype = base.weight.dtype if isinstance(base, nn.Linear) else base.dtype
    return layer.lora_A[name].weight.to(dtype), (layer.lora_B[name].weight * layer.scaling[name]).to(dtype)


def joined_factors(layers: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """Return the `lora_factors` of layers with joined outputs, as of one layer; None if none is adapted."""
    factors = [lora_factors(layer) for layer in layers]
    if not any(factors):
        return None
    weights = [base_of(layer).weight for layer in layers]
    # A layer without an adapter is treated as one with an adapter of rank 0.
    each = [found or (weight[:0], weight[:, :0]) for found, weight in zip(factors, weights, strict=True)]
    return torch.cat([a for a, _ in each]), torch.block_diag(*(b for _, b in each))  # type: ignore[no-untyped-call]


def lora_layers(network: nn.Module) -> list[tuple[str, Any]]:
    """Return the adapted layers, of peft's class, and their names. Does not import peft, which is slow."""
    return [(name, module) for name, module in network.named_modules() if hasattr(module, "lora_A")]


@torch.no_grad()
def folded(layer: Any) -> Tensor:
    """Return W + s B A of an adapted layer, in float32."""
    delta = sum(layer.get_delta_weight(name).float() for name in layer.active_adapters)
    return torch.add(layer.get_base_layer().weight.float(), delta)


@torch.no_grad()
def fold(network: nn.Module) -> float:
    """Add s B A to every adapted layer's W, rounded to its dtype; the adapters stay until `unload`.

    Returns the share of the adapter's energy that rounding loses: the squared norm of the rounding error over
    the squared norm of s B A.
    """
    lost = energy = 0.0
    for _, layer in lora_layers(network):
        weight, whole = layer.get_base_layer().weight, folded(layer)
        energy += float((whole - weight.float()).square().sum())
        weight.copy_(whole)
        lost += float((whole - weight.float()).square().sum())
    return lost / energy if energy else 0.0


def adapted_linear() -> type:
    """Return a subclass of peft's LoRA layer whose forward is `adapted`."""
    # peft is slow to import, and only adapters need it.
    from peft.tuners.lora import Linear as LoraLinear

    class AdaptedLinear(LoraLinear):  # type: ignore[misc]
        """The layer that training, answers and log-probabilities all use."""

        def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            """Apply layer and adapter: x [..., n] -> [..., m]."""
            base, factors = self.base_layer, lora_factors(self)
            # MPS computes some three-dimensional products wrongly (pytorch/pytorch#192934, #180776).
            rows = x.reshape(-1, x.shape[-1])
            out: Tensor = base(rows) if factors is None else adapted(rows, base.weight, base.bias, *factors)
            return out.view(*x.shape[:-1], -1)

    return AdaptedLinear


def require_nf4(device: torch.device, *, adapter: bool) -> None:
    """Raise NoModel if a base cannot be stored in 4 bits here. Imports nothing."""
    if not adapter:
        raise NoModel("model.dtype 'nf4' works only if an adapter is trained. Set model.lora to 'on'.")
    require_bitsandbytes("model.dtype = 'nf4'", device, "set model.dtype to 'auto'")


class FourBitLinear(nn.Module):
    """Computes like the linear layer that it was made from, whose weights it stores in 4 bits."""

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self._packed, self._state = _packed(layer.weight.detach().to(device))
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        self.dtype = layer.weight.dtype

    @property
    def weight(self) -> Tensor:
        """The whole weight matrix [m, n] in the compute dtype, unpacked at each access."""
        return _unpacked(self._packed, self._state)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def pack_bases(network: nn.Module, device: torch.device) -> None:
    """Move every adapted layer's base to the device in 4 bits, one by one."""
    for _, layer in lora_layers(network):
        layer.base_layer = FourBitLinear(layer.base_layer, device)


@torch.no_grad()
def round_to_four_bits(network: nn.Module) -> None:
    """Round the weights that training stores in 4 bits, but keep their dtype."""
    head: Any = network.get_output_embeddings()  # type: ignore[operator]  # all causal language models have it
    for layer in network.modules():
        if isinstance(layer, nn.Linear) and layer is not head:
            layer.weight.copy_(_unpacked(*_packed(layer.weight)))


def _packed(weight: Tensor) -> tuple[Tensor, Any]:
    """Return a weight in 4 bits, and bitsandbytes' state for unpacking it."""
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(weight.contiguous(), quant_type=NF4, compress_statistics=True)
    return packed, state


def _unpacked(packed: Tensor, state: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(packed, state)
    return weight
