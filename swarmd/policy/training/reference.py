"""The reference policy: the weights that training began from, kept to measure the KL divergence from them.

An adapter is switched off: the base model is there. Of weights that are all trained, a copy is put aside in
the machine's memory (not the accelerator's), as they were loaded, so before a checkpoint is restored; and
exchanged with the trained ones while it is looked at.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from swarmd.policy.models.lora import lora_layers


class ReferencePolicy:
    """Made before anything is trained."""

    def __init__(self, network: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
        """Keep what is needed to restore the network's start.

        weights: the trained ones.
        """
        self._adapted = [layer for _, layer in lora_layers(network)]
        kept = () if self._adapted else weights.values()
        self._copies = [(weight, weight.detach().to("cpu", copy=True)) for weight in kept]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the network back to its start until the block ends; nothing may be trained there."""
        try:
            self._adapters(on=False)
            self._exchange()
            yield
        finally:
            self._exchange()
            self._adapters(on=True)

    def _adapters(self, *, on: bool) -> None:
        for layer in self._adapted:
            layer.enable_adapters(on)

    @torch.no_grad()
    def _exchange(self) -> None:
        for i, (weight, other) in enumerate(self._copies):
            if weight.device.type == "cpu":
                self._copies[i], weight.data = (weight, weight.data), other
            else:
                now: Tensor = weight.detach().to("cpu", copy=True)
                weight.copy_(other)
                self._copies[i] = (weight, now)
