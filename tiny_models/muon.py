"""Muon (Keller Jordan, 2024): momentum whose update is orthogonalised by a Newton-Schulz iteration.

torch has had Muon since 2.9, but in bfloat16, which is slow on most CPUs. This version uses float32 and works
with every supported version of torch.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch

_A, _B, _C = 3.4445, -4.7750, 2.0315  # coefficients of the original's quintic polynomial
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """An optimizer for hidden matrices only. Matrices with the same shape are updated together."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(sorted(parameters, key=lambda p: tuple(p.shape)), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for _, same_shape in groupby(group["params"], key=lambda p: tuple(p.shape)):
                self._update([p for p in same_shape if p.grad is not None], group["lr"], group["momentum"])

    def _update(self, parameters: list[torch.Tensor], lr: float, momentum: float) -> None:
        if not parameters:
            return
        nesterov = []
        for p in parameters:
            assert p.grad is not None
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.mul_(momentum).add_(p.grad)
            nesterov.append(p.grad + momentum * buffer)
        rows, columns = parameters[0].shape
        for p, direction in zip(parameters, orthogonalised(torch.stack(nesterov)), strict=True):
            p.add_(direction, alpha=-lr * max(1.0, rows / columns) ** 0.5)


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Return N matrices, of shape (N, rows, columns), with singular values moved towards 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    x: torch.Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    if tall:
        x = x.mT
    return x
