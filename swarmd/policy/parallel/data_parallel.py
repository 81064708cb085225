"""Data parallelism: rank 0 shards a batch's rows, gradients are all-reduced, all ranks take the same step.

A row's weight already refers to the whole batch (`packing.rows_of`), so the sum of the ranks' gradients is
the batch's gradient. Every rank receives the same bits from the same all-reduce, so all ranks have equal
weights and optimizer states after each step. torch.distributed transfers tensors only, since its object
collectives pickle; rows are sent over the workers' sockets as msgpack.
"""

import os
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.device import devices_alike
from swarmd.policy.parallel.messages import Join, Stepped, UpdateShare
from swarmd.policy.parallel.worker import ProcessLost, WorkerProcess
from swarmd.policy.training.learner import Learner, Sums
from swarmd.policy.training.packing import Row, by_prompt, packed_tokens
from swarmd.types import UpdateReport

# Updates between two comparisons of the ranks' weights, which are made only on devices of one kind.
CHECK_EVERY_UPDATES: Final = 100
# Timeout for all ranks to join, after each has loaded its weights.
JOIN_TIMEOUT: Final = timedelta(minutes=2)
# Timeout between the first rank that has its gradients and the last.
UPDATE_TIMEOUT: Final = timedelta(minutes=30)


def deal(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """Split the rows into one share per rank, with about equal numbers of tokens.

    Rows with the same prompt stay together, and in order.
    """
    shares: list[list[Row]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    # The largest groups are assigned first, each to the rank with the fewest tokens.
    for group in sorted(by_prompt(rows), key=packed_tokens, reverse=True):
        lightest = loads.index(min(loads))
        shares[lightest] += group
        loads[lightest] += packed_tokens(group)
    return shares


def join(meeting: str, rank: int, size: int, device: str = "cpu") -> None:
    """Meet the other ranks through a file, over loopback only, and wait for all of them.

    Raises ProcessLost if a rank does not join.
    """
    if interface := next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None):
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    backend = "nccl" if device == "cuda" else "gloo"
    store = dist.FileStore(meeting, size)  # type: ignore[attr-defined]  # it is public, though not in __all__
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=JOIN_TIMEOUT)
    except RuntimeError as error:
        raise ProcessLost(f"not all trainers joined: {str(error).splitlines()[0]}") from error
    # torch 2.14 made this function public.
    (getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout)(UPDATE_TIMEOUT)


def leave() -> None:
    if dist.is_initialized():
        if dist.get_backend() == "nccl":
            # Destroying the group would wait for the lost rank.
            c10d._abort_process_group()
        else:
            dist.destroy_process_group()


def combine(parameters: Sequence[nn.Parameter], sums: Sums, alive: Callable[[], bool] = lambda: True) -> None:
    """Replace this rank's gradients and sums by the totals of all ranks. Raises ProcessLost if one ended."""
    names = [f.name for f in fields(sums)]
    total = torch.tensor(
        [float(getattr(sums, name)) for name in names], dtype=torch.float64, device=parameters[0].device
    )
    added = [total]
    for parameter in parameters:
        if parameter.grad is None:
            # This rank had no rows for it.
            parameter.grad = torch.zeros_like(parameter)
        added.append(parameter.grad)
    try:
        # Start all reductions before waiting: there are hundreds, and waiting takes longer than summing.
        for tensor, work in [(tensor, dist.all_reduce(tensor, async_op=True)) for tensor in added]:
            # NCCL would wait for a dead rank for ever; gloo reports it.
            while tensor.is_cuda and not work.is_completed():
                if not alive():
                    raise ProcessLost("another trainer ended")
                time.sleep(2e-4)
            work.wait()
    except RuntimeError as error:
        # Gloo and NCCL raise this if a connection breaks or exceeds the timeout.
        raise ProcessLost(f"the connection to another trainer broke: {str(error).splitlines()[0]}") from error
    for name, value in zip(names, total.tolist(), strict=True):
        setattr(sums, name, type(getattr(sums, name))(value))


def digest(learner: Learner) -> int:
    """Return a checksum of all trained weights, which is equal on all ranks."""
    check = 0
    for weight in learner.weights.values():
        check = zlib.crc32(weight.detach().flatten().view(torch.uint8).cpu().numpy().data, check)
    return check


class Trainers(ExitStack):
    """The other ranks as seen by rank 0: processes that compute a share of each step.

    The end of a `with` block ends them.
    Pass `step` to `LanguagePolicy.stepping`. If one rank dies, all are ended. The daemon then restarts the
    trainer from its last checkpoint, as after a crash of rank 0.
    """

    def __init__(
        self,
        size: int,
        policy: LanguagePolicy,
        start: Callable[[int], WorkerProcess],
        folder: Path,
        check_every: int = CHECK_EVERY_UPDATES,
    ) -> None:
        """Start the other ranks, without waiting for them: `size` ranks, including this process.

        start: starts the process of a rank. folder: a private folder for the files that the ranks read.
        """
        super().__init__()
        self._size, self._policy, self._folder = size, policy, folder
        # On different kinds of GPU, gradient norms differ by rounding, and so do the weights.
        self._checks, self._check_every = devices_alike(size), check_every
        # The meeting file is kept until the end, since NCCL's ranks connect only at their first reduction.
        self._meeting = folder / "meeting"
        # The reply that every other rank must give to the last step; None before the first step.
        self._expected: Stepped | None = None
        self._children = [start(rank) for rank in range(1, size)]
        self.pids = [child.pid for child in self._children]
        self.callback(self._end)

    def _end(self) -> None:
        for child in self._children:
            child.kill()
        leave()
        self._meeting.unlink(missing_ok=True)
        for child in self._children:
            child.end()

    @property
    def alive(self) -> int:
        """The number of running ranks, including this process."""
        return 1 + sum(child.alive for child in self._children)

    def step(self, learner: Learner, rows: Sequence[Row]) -> UpdateReport:
        """Take `Learner.step`, shared among the ranks.

        Raises ProcessLost if a rank dies, and SwarmdError if it reported why.
        """
        try:
            if self._expected is None:
                self._meet()
            else:
                self._check_last_step()
            return self._shared(learner, rows)
        except ProcessLost:
            for child in self._children:
                child.kill()
                while child.receive() is not None:
                    pass
            raise

    def _shared(self, learner: Learner, rows: Sequence[Row]) -> UpdateReport:
        own, *others = deal(rows, self._size)
        check = self._checks and (learner.updates + 1) % self._check_every == 0
        for child, share in zip(self._children, others, strict=True):
            child.send(UpdateShare(share, check))
        report = learner.step(own, partial(combine, alive=lambda: self.alive == self._size))
        self._expected = Stepped(learner.updates, digest(learner) if check else None)
        return report

    def _check_last_step(self) -> None:
        """Check that each other rank finished the last step with this rank's result."""
        if any(child.receive() != self._expected for child in self._children):
            raise ProcessLost("another trainer ended between two steps, or its weights differ from rank 0")

    def _meet(self) -> None:
        """Send this rank's state to the other ranks, and wait for them to join."""
        with TemporaryDirectory(dir=self._folder) as state:
            self._policy.save(Path(state))
            for child in self._children:
                if child.receive() is None:
                    raise ProcessLost("another trainer ended while it was starting")
            for rank, child in enumerate(self._children, 1):
                child.send(Join(state, str(self._meeting), rank, self._size))
            join(str(self._meeting), 0, self._size, self._policy.device.type)
            for child in self._children:
                # The reply means that the rank has joined and loaded its weights.
                child.receive()


def all_gather(data: bytes) -> list[bytes]:
    """Return the bytes of all ranks, in order of rank; waits for all. Raises ProcessLost.

    The ranks exchange sizes first, then the bytes, padded to the longest. torch's `all_gather_object`
    pickles, and swarmd never unpickles.
    """
    sizes = [int(size) for size in _all(torch.tensor([len(data)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
    return [bytes(each[:size].numpy()) for each, size in zip(_all(padded), sizes, strict=True)]


def _all(mine: Tensor) -> list[Tensor]:
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(everybody, mine)
    except RuntimeError as error:
        # gloo raises this for a broken connection.
        raise ProcessLost(str(error).splitlines()[0]) from error
    return everybody
