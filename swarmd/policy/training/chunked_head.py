"""The chunked head: log-probabilities and gradients from hidden states, one chunk of tokens at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from swarmd.policy.attention import PackedLayout, capped, run
from swarmd.policy.models.memory_plan import chunk_of
from swarmd.policy.training.packing import Packed


class Decoder:
    """An adopted network (`attention.adopt`), split into decoder and head, with gradients."""

    def __init__(self, network: PreTrainedModel, device: torch.device, chunk: int = 0) -> None:
        """Split a network into decoder and head.

        chunk: the number of tokens whose logits are held at once; 0 for the number that a plan would choose.
        """
        self._decoder: nn.Module = network.base_model
        self._head: nn.Module = network.get_output_embeddings()
        self._device, self._dtype = device, network.get_input_embeddings().weight.dtype
        config = network.config
        self._divisor: float = getattr(config, "logits_scaling", 1.0)  # Granite
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)  # Gemma
        self.chunk = chunk or chunk_of(config.vocab_size)

    def hidden(self, batch: Packed) -> Tensor:
        """Return the hidden states [N, d] of the tokens that predict the completions' tokens."""
        stream = PackedLayout(batch.spans, self._device, self._dtype)
        states: Tensor = run(self._decoder, batch.ids, batch.positions, stream).last_hidden_state
        # An embedding lookup: on CUDA, indexing would sum its gradients in another order each time.
        return F.embedding(batch.sources, states[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head and the network's later operations: [n, d] -> [n, V]."""
        logits: Tensor = self._head(hidden)
        return capped(logits if self._divisor == 1 else logits / self._divisor, self._softcap)


@contextmanager
def recomputing(network: nn.Module) -> Iterator[None]:
    """Recompute activations until the block ends: layers keep only their inputs (arXiv 1604.06174).

    This saves most of the memory of long batches and takes about a third more time.
    """
    layers = [m for m in network.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        # transformers checks `training` of the layer itself. The layer's submodules stay in eval mode,
        # without dropout.
        layer.training, layer.gradient_checkpointing = True, True
        layer._gradient_checkpointing_func = partial(
            checkpoint, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for layer in layers:
            layer.training, layer.gradient_checkpointing = False, False


@torch.no_grad()
def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return each target's log-probability, the entropy in nats, and all probabilities [N, V].

    logits: [N, V]. targets: [N]. Computed in float32 and at the sampling temperature, since this distribution
    is the policy. Without gradient; see `logits_gradient`.
    """
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    probabilities = scaled.softmax(-1)
    # Compute log Z from the likeliest token, whose probability is at least 1/V. This is exact and saves a
    # second pass of exponentials.
    highest, likeliest = scaled.max(-1)
    normaliser = highest - probabilities.gather(1, likeliest[:, None])[:, 0].log()
    entropy = normaliser - torch.linalg.vecdot(probabilities, scaled)
    return scaled.gather(1, targets[:, None])[:, 0] - normaliser, entropy, probabilities


def logits_gradient(probabilities: Tensor, targets: Tensor, gradient: Tensor, temperature: float) -> Tensor:
    """Return the gradient of a loss with respect to the logits [N, V]: (1[target] − p) g / T.

    gradient: g [N], the gradient with respect to the targets' log-probabilities. Overwrites `probabilities`.
    """
    gradient = gradient[:, None] / temperature
    return probabilities.mul_(-gradient).scatter_add_(1, targets[:, None], gradient)
