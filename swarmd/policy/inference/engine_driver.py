"""Drives the inference engine: weight sync before answers, sleep during training.

An engine that runs elsewhere gets the policy's weights as files: the adapter in peft's format, or the whole
model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from swarmd.errors import NoModel
from swarmd.policy.inference.decode import Sample, Sampling
from swarmd.policy.inference.engine import InferenceEngine, checked
from swarmd.policy.inference.own_engine import OwnEngine
from swarmd.policy.models.device import dtype_name
from swarmd.policy.models.load import Loaded, lora_config
from swarmd.policy.models.lora import folded, lora_layers

_ADAPTER: Final = ".default."  # peft's name of the only adapter, inside tensor names
_OF_PEFT: Final = "base_model.model."  # peft's prefix of tensor names in a file


@dataclass(frozen=True, slots=True)
class NetworkWeights:
    """Implements `swarmd.policy.inference.engine.Weights`.

    network: contains LoRA layers if `lora_rank` is not None.
    """

    network: nn.Module
    version: int
    lora_rank: int | None
    model: str  # the base model: a folder or a repository, written into the adapter

    def write_adapter(self, folder: Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors."""
        assert self.lora_rank is not None
        config = lora_config(self.lora_rank, self.network)
        config.target_modules = {name.rpartition(".")[2] for name, _ in lora_layers(self.network)}
        config.base_model_name_or_path = self.model
        config.inference_mode = True
        tensors = {
            _OF_PEFT + name.replace(_ADAPTER, "."): weight.detach().contiguous()
            for name, weight in self.network.named_parameters()
            if "lora_" in name
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)

    def write_model(self, folder: Path) -> None:
        """Write config.json and model.safetensors. A tensor that two layers share (tied) is written once.

        Adapted layers are written in float32, since W + s B A in 16 bits would lose part of the adapter.
        """
        network: Any = self.network
        tensors: dict[str, Tensor] = {
            name.replace(".base_layer.", "."): weight.detach().contiguous()
            for name, weight in network.named_parameters()
            if "lora_" not in name
        }
        tensors |= {f"{name}.weight": folded(layer) for name, layer in lora_layers(network)}
        tensors |= {
            name: b.contiguous() for name, b in network.named_buffers() if name in network.state_dict()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        network.config.save_pretrained(folder)
        network.generation_config.save_pretrained(folder)


class EngineDriver:
    """Keeps an engine in sync with the network's weights.

    The engine `own` uses the network itself and needs no sync. Any other engine is foreign: it is another
    implementation, and its answers are checked.
    """

    def __init__(
        self,
        engine: OwnEngine | InferenceEngine,
        loaded: Loaded,
        rest: Callable[[], object] = lambda: None,
        between: Callable[[], int] | None = None,
    ) -> None:
        self.engine, self._loaded, self._rest, self._between = engine, loaded, rest, between
        self.synced: int | None = None  # version of the weights that the engine has, or last answered with
        self._asleep = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        sampling: Sampling,
        generator: torch.Generator,
        version: int,
    ) -> list[list[Sample]]:
        """Generate answers; see `InferenceEngine.generate`.

        With `between`, weights come from another process: a foreign engine takes them before the call, and
        all of its tokens have that version.

        version: the number of updates that led to the network's weights.

        Raises NoModel if all first log-probabilities are NaN, since nothing could be learnt from such
        answers.
        """
        if isinstance(self.engine, OwnEngine):
            answers = self.engine.generate(prompts, copies, sampling, generator)
            self.synced = version
        else:
            version = self._synced_to(self.engine, version)
            answers = self.engine.generate(prompts, copies, sampling, generator)
            vocabulary: int = self._loaded.network.get_input_embeddings().num_embeddings
            answers = checked(answers, prompts, copies, sampling, vocabulary)
            if self._between is not None:
                answers = [[replace(s, versions=(version,) * len(s.ids)) for s in each] for each in answers]
        first = [s.logprobs[0] for samples in answers for s in samples if s.ids]
        if first and all(map(math.isnan, first)):
            dtype = dtype_name(self._loaded.dtype)
            remedy = "Set model.dtype to 'float32', or choose" if dtype != "float32" else "Choose"
            raise NoModel(
                f"all probabilities of {self._loaded.source} are NaN in {dtype}. {remedy} another model."
            )
        return answers

    @property
    def foreign(self) -> bool:
        return not isinstance(self.engine, OwnEngine)

    def _synced_to(self, engine: InferenceEngine, version: int) -> int:
        """Wake the engine and give it the network's weights. Returns their version."""
        if self._between is not None:
            version = self._between()
        self._rest()
        if self._asleep:
            engine.wake()
            self._asleep = False
        if version != self.synced:
            x = self._loaded
            engine.sync(NetworkWeights(x.network, version, x.plan.lora_rank, x.source))
            self.synced = version
        return version

    def sleep(self) -> None:
        """Put a foreign engine to sleep before the network is trained."""
        if not isinstance(self.engine, OwnEngine) and not self._asleep:
            self.engine.sleep()
            self._asleep = True

    def forget(self) -> None:
        """Force a sync before the next answers: the weights have changed, even if their version has not."""
        self.synced = None

    def close(self) -> None:
        if not isinstance(self.engine, OwnEngine):
            self.engine.close()
