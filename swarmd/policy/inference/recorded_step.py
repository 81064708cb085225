"""Records a decoder step as a CUDA graph and replays it: a token costs one launch, not a thousand.

What the host does for each operation takes longer than a small model's operation itself. A graph is of fixed
shapes and reads and writes the same memory at each replay.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Final

import torch
from torch import Tensor

from swarmd.policy.models.device import is_out_of_memory
from swarmd.policy.models.hub import first_line

log = logging.getLogger(__name__)

DecoderStep = Callable[[Tensor], Tensor]  # tokens [B] -> logits [B, V]
# The recording that failed: none is tried after it. It is kept, as torch's allocators may go on asking it.
_failed: Final[list[torch.cuda.CUDAGraph]] = []


def records(device: torch.device) -> bool:
    """Return whether steps are recorded on a device.

    Not on AMD's: where recording fails there, and where a graph is freed, the process may crash, and nothing
    goes on without (pytorch/pytorch#155720, #193668).
    """
    return device.type == "cuda" and torch.version.hip is None


class RecordedStep:
    """A step that is called as it is at first, recorded at its second call, and replayed from then on.

    The first call does real work, and makes all that libraries make at their first use. On devices without
    graphs, and where an operation cannot be recorded, each call is as the first.
    """

    def __init__(self, before: "RecordedStep | None" = None) -> None:
        """Begin anew; `before` is the recording that this one replaces, whose memory it takes over."""
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._replaced: torch.cuda.CUDAGraph | None = (before._graph or before._replaced) if before else None

    def __call__(self, step: DecoderStep, tokens: Tensor) -> Tensor:
        """Return the logits. They are overwritten at the next call.

        step: always the same. It is not kept: a graph that is freed with a cycle of references, whenever that
        is found, spoils another's recording.
        """
        self._calls += 1
        if self._graph is None and not _failed and self._calls > 1 and records(tokens.device):
            self._record(step, tokens)
        if self._graph is None:
            return step(tokens)
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._logits

    def _record(self, step: DecoderStep, tokens: Tensor) -> None:
        graph, stream, now = torch.cuda.CUDAGraph(), _stream(tokens.device), torch.cuda.current_stream()
        self._tokens = tokens.clone()
        stream.wait_stream(now)
        try:
            with torch.cuda.stream(stream):
                # torch.cuda.graph would also give all cached memory back, at each of a round's recordings.
                pool = self._replaced.pool() if self._replaced else torch.cuda.graph_pool_handle()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self._logits = step(self._tokens)
                finally:
                    _end(graph, tokens.device, pool)
        except RuntimeError as error:
            # What fails within a recording makes its end fail, too.
            cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            if is_out_of_memory(cause):
                raise cause from None
            _failed.append(graph)
            log.warning("answers are made without CUDA graphs, more slowly: %s", first_line(cause))
        else:
            self._graph = graph
        now.wait_stream(stream)
        self._replaced = None


def _end(graph: torch.cuda.CUDAGraph, device: torch.device, pool: tuple[int, int]) -> None:
    """End a recording, also where it has failed.

    torch would then go on taking the device's memory for a recorded one's: it would free none, and
    `empty_cache` would raise.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):  # it failed later than that
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        raise


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream to record on: cuBLAS keeps memory for each one."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
