"""Record a decoder step as a CUDA graph and replay it: a token then costs one launch instead of a thousand.

For a small model, launching an operation takes the host longer than the operation itself. A graph has fixed
shapes, and every replay reads and writes the same memory.
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
# The failed recording, after which none is tried. It is kept, since torch's allocators may still refer to it.
_failed: Final[list[torch.cuda.CUDAGraph]] = []


def records(device: torch.device) -> bool:
    """Return whether steps are recorded on this device.

    AMD devices are excluded: if a recording fails there, or a graph is freed, the process may crash, and
    cannot continue without graphs (pytorch/pytorch#155720, #193668).
    """
    return device.type == "cuda" and torch.version.hip is None


class RecordedStep:
    """A step whose first call runs normally, whose second is recorded, and whose later calls are replayed.

    The first call returns real results, and lets libraries do their setup for a first use. On devices without
    graphs, or if an operation cannot be recorded, every call runs normally.
    """

    def __init__(self, before: "RecordedStep | None" = None) -> None:
        """Prepare a recording. `before`: the recording that this one replaces and whose memory it reuses."""
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._replaced: torch.cuda.CUDAGraph | None = (before._graph or before._replaced) if before else None

    def __call__(self, step: DecoderStep, tokens: Tensor) -> Tensor:
        """Return the logits, which the next call overwrites.

        step: always the same function. No reference to it is kept: a graph in a reference cycle would be
        freed at an arbitrary time, and so break another recording.
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
                # torch.cuda.graph would also release all cached memory, at each recording of a round.
                pool = self._replaced.pool() if self._replaced else torch.cuda.graph_pool_handle()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self._logits = step(self._tokens)
                finally:
                    _end(graph, tokens.device, pool)
        except RuntimeError as error:
            # An error inside a recording makes `capture_end` fail, too; its context is the cause.
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
    """End a recording, even a failed one.

    Without this, torch would treat all later allocations as part of the recording: it would free no memory,
    and `empty_cache` would raise.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):  # raised if it failed at a later point
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        raise


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for recordings, since cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
