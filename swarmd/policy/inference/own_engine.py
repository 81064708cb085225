"""The engine `own`: the trainer's own network decodes (decode.py).

The engine shares the weights, so no sync is needed, and it keeps nothing between calls. Of `InferenceEngine`
it implements only `generate`.
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
    """Answers with the trainer's network."""

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

        tokens: maximum number of tokens whose keys and values are held at the same time; lowered when memory
            runs out. packed: use packed weights if possible, until memory runs out.
        """
        self._network, self._tokens, self._rest, self._between = network, tokens, rest, between
        self._packed = packed
        self.done: Done = lambda *_: None  # called with the number of finished answers

    def generate(
        self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, generator: torch.Generator
    ) -> list[list[Sample]]:
        """Generate answers; see `InferenceEngine`.

        Raises NoModel if not even one prompt's completions fit into memory.
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
            # Outside of the handler, so that the traceback no longer holds the tensors.
            release_cached(generator.device)
            self._packed = False
            # For networks that copy the prompt for each answer; covered networks may need less.
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
