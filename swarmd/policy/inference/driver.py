"""Drives the inference engine: weight sync before answers, sleep during training."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from swarmd.policy.inference.decode import Sample, Sampling
from swarmd.policy.inference.engine import BuiltInEngine, InferenceEngine, checked
from swarmd.policy.inference.own import OwnEngine
from swarmd.policy.inference.weights import NetworkWeights
from swarmd.policy.models.load import Loaded


class Driver:
    """An engine that always answers with the weights the network has."""

    def __init__(self, engine: InferenceEngine, loaded: Loaded) -> None:
        self.engine, self._loaded = engine, loaded
        self._synced: int | None = None  # version of the weights the engine has
        self._asleep = False
        self._may_work: Callable[[], object] = lambda: None

    def rest_with(self, rest: Callable[[], object]) -> None:
        """Give the engine a function in which it waits while the node has to rest.

        It is called between tokens by engines on the trainer's own network, and before each call of the
        others.
        """
        self._may_work = rest
        if isinstance(self.engine, BuiltInEngine):
            self.engine.rest = rest

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        sampling: Sampling,
        generator: torch.Generator,
        version: int,
        between: Callable[[], int] | None,
    ) -> list[list[Sample]]:
        """Generate answers; see `InferenceEngine.generate`.

        version: updates behind the network's weights. between: see `decode`. An engine that cannot take new
            weights between tokens takes them between calls, and its tokens say so.
        """
        if isinstance(self.engine, OwnEngine):
            self.engine.between = between
            return self.engine.generate(prompts, copies, sampling, generator)
        if between is not None:
            version = between()
        self._may_work()
        if self._asleep:
            self.engine.wake()
            self._asleep = False
        if version != self._synced:
            x = self._loaded
            self.engine.sync(NetworkWeights(x.network, version, x.lora_rank, x.source))
            self._synced = version
        answers = self.engine.generate(prompts, copies, sampling, generator)
        if self.engine.foreign:
            vocabulary: int = self._loaded.network.get_input_embeddings().num_embeddings  # type: ignore[operator]
            answers = checked(answers, prompts, copies, sampling, vocabulary)
        if between is None:
            return answers
        return [[replace(s, versions=(version,) * len(s.ids)) for s in samples] for samples in answers]

    def rest(self) -> None:
        """Put the engine to sleep: the network is about to be trained."""
        if not self._asleep:
            self.engine.sleep()
            self._asleep = True

    def forget(self) -> None:
        """Sync the weights before the next answers: they have changed, whatever their version says."""
        self._synced = None

    def close(self) -> None:
        self.engine.close()
