"""The engine `own`: the trainer's network itself decodes (decode.py).

It shares the weights, so there is nothing to sync, and keeps nothing between calls: of `InferenceEngine` it
has `generate` alone.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from swarmd.errors import NoModel
from swarmd.policy.attention import adopt
from swarmd.policy.inference.decode import Done, Sample, Sampling, decode, groups
from swarmd.policy.models.device import is_out_of_memory, release_cached

log = logging.getLogger(__name__)


class OwnEngine:
    """Answers with the trainer's own network."""

    def __init__(
        self,
        network: nn.Module,
        tokens: int,
        rest: Callable[[], object] = lambda: None,
        between: Callable[[], int] | None = None,
        *,
        packed: bool = True,
    ) -> None:
        """Wrap a network.

        tokens: how many tokens' keys and values are held at once; fewer once memory was short. packed: use
            packed weights, if that can be, until memory is short.
        """
        self._network, self._tokens, self._rest, self._between = network, tokens, rest, between
        self._packed = packed
        self.done: Done = lambda *_: None  # told how many answers have ended

    def generate(
        self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, generator: torch.Generator
    ) -> list[list[Sample]]:
        """Generate answers; see `InferenceEngine`.

        Raises NoModel where not even one prompt's completions fit into memory.
        """
        while True:
            try:
                return decode(
                    self._network,
                    prompts,
                    copies,
                    sampling,
                    generator,
                    self._tokens,
                    self._between,
                    self._rest,
                    done=self.done,
                    packed=self._packed,
                )
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Out of the handler, so that the traceback no longer holds the tensors.
            release_cached(generator.device)
            self._packed = False
            # Of networks that copy a prompt for each answer. Others may have several prompts in less.
            largest = copies * (max(map(len, prompts)) + sampling.limit)
            if self._tokens < largest and all(
                len(group) == 1
                for group in groups(prompts, copies, sampling, self._tokens, adopt(self._network))
            ):
                raise NoModel(
                    f"not enough memory on {generator.device} to answer one question {copies} times. Close"
                    " other programs, lower generate.max_new_tokens or round.completions, or choose a smaller"
                    " model."
                )
            self._tokens = min(self._tokens, len(prompts) * largest) // 2
            log.warning(
                "out of memory while answering: at most %d tokens of keys and values from now on",
                self._tokens,
            )
