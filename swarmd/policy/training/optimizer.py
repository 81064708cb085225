"""AdamW with float32 copies of 16-bit weights, and its saved state.

Float32 weights are stepped directly. A bfloat16 weight has 8 significant bits: a step below 1/512 of its
value is rounded away, and at the learning rates of post-training nearly all steps are. So each 16-bit weight
has a float32 copy that takes the steps, and the weight is this copy, rounded (Micikevicius et al., arXiv
1710.03740, section 3.1). This takes 4 more bytes per weight.

Adam is configured as in SAPO section 4.2: default betas, no weight decay. `adamw8bit` stores the two moments
in 8 bits, in blocks (Dettmers et al., arXiv 2110.02861), by bitsandbytes. Tensors of fewer than 4,096
elements keep 32-bit moments.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from swarmd.errors import NoModel

# Prefix of the float32 copies' names in a checkpoint.
MASTER: Final = "master"


class Optimizer:
    """Steps `weights` down their gradients. kind: "adamw" or "adamw8bit"."""

    def __init__(self, weights: Mapping[str, nn.Parameter], kind: str = "adamw") -> None:
        """Prepare to step the weights. Raises NoModel if bitsandbytes is needed and does not work."""
        self.kind, self._weights = kind, weights
        # Empty until the first step, so that a process that never trains holds no copies.
        self._masters = {
            name: nn.Parameter(torch.empty(0, device=weight.device))
            for name, weight in weights.items()
            if weight.dtype != torch.float32
        }
        self._stepped = {**weights, **self._masters}
        self._adam = _adam(kind, list(self._stepped.values()))

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Take one step with this learning rate.

        Weights without a gradient do not change. All gradients are cleared.
        """
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        for name, master in self._masters.items():
            weight = self._weights[name]
            if weight.grad is None:
                continue
            if not master.numel():
                master.data = weight.detach().float()
            # Adam skips parameters without a gradient, so only one gradient is held in float32 at a time.
            master.grad = weight.grad.float()
            self._adam.step()
            master.grad = weight.grad = None
            weight.copy_(master)

    def clear(self) -> None:
        """Clear the gradients."""
        for weight in self._weights.values():
            weight.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Return a checkpoint's tensors as "<field>/<weight>": moments, step counts, master copies."""
        found = {
            f"{MASTER}/{name}": master.detach() for name, master in self._masters.items() if master.numel()
        }
        for name, stepped in self._stepped.items():
            for field, value in self._adam.state.get(stepped, {}).items():
                found[f"{field}/{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return found

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Restore the trained weights, and the state that `tensors` returned.

        The saved weights may have had another precision.
        """
        for name, weight in self._weights.items():
            exact = tensors.get(f"{MASTER}/{name}", weights[name])
            if name in self._masters:
                self._masters[name].data = exact.to(weight.device, torch.float32, copy=True)
                weight.copy_(weights[name])
            else:
                weight.copy_(exact)
        self._adam.state.clear()
        for key, value in tensors.items():
            field, _, name = key.partition("/")
            if field != MASTER:
                stepped = self._stepped[name]
                # bitsandbytes counts steps in a Python int.
                kept = (
                    int(value)
                    if field == "step" and self.kind == "adamw8bit"
                    else value.to(stepped.device, copy=True)
                )
                self._adam.state.setdefault(stepped, {})[field] = kept


def _adam(kind: str, weights: list[nn.Parameter]) -> Any:
    if kind == "adamw":
        return torch.optim.AdamW(weights, weight_decay=0.0, fused=True)
    try:
        # Imported only here: it is large, and optional.
        from bitsandbytes.optim import AdamW8bit
    except (ImportError, OSError, RuntimeError) as error:
        # OSError, RuntimeError: its binary does not match this machine's driver.
        raise NoModel(
            f"bitsandbytes, which train.optimizer = 'adamw8bit' needs, does not work here ({error}). "
            "Install a build of it for this machine, or set train.optimizer = 'adamw'."
        ) from error
    return AdamW8bit(weights, weight_decay=0.0)
