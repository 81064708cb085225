"""Data parallelism: rank 0 shards a batch's rows, gradients are all-reduced, all ranks take the same step.

A row's weight is already that of the whole batch (`packing.rows_of`), so the sum of the ranks' gradients is
the batch's gradient. Every rank holds the sum, the same bits, from the same all-reduce, and so the same
weights and optimizer after each step. torch.distributed moves tensors only (its object collectives pickle);
rows go over the pipes of the workers, as msgpack.
"""

import os
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.models.device import devices_alike
from swarmd.policy.parallel.generator_pool import WorkerFailed
from swarmd.policy.parallel.messages import Fatal, Join, Message, Stepped, UpdateShare
from swarmd.policy.parallel.worker import WorkerProcess
from swarmd.policy.training.learner import Learner, Sums
from swarmd.policy.training.packing import Row, by_prompt, packed_tokens
from swarmd.types import UpdateReport

# How often all weights are compared, on devices of one kind.
CHECK_EVERY_UPDATES: Final = 100
# For all ranks to join, once each has its weights.
JOIN_TIMEOUT: Final = timedelta(minutes=2)
# Between the first rank that has its gradients and the last.
UPDATE_TIMEOUT: Final = timedelta(minutes=30)


def deal(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """Split the rows into a share for each rank, with about as many tokens each.

    Rows of one prompt stay together, and in order.
    """
    shares: list[list[Row]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    # The largest groups go first, each to the rank that has least.
    for group in sorted(by_prompt(rows), key=packed_tokens, reverse=True):
        lightest = loads.index(min(loads))
        shares[lightest] += group
        loads[lightest] += packed_tokens(group)
    return shares


class RankLost(Exception):
    """A rank ended while the others waited for it."""


def join(meeting: str, rank: int, size: int, device: str = "cpu") -> None:
    """Meet the other ranks in a file, over loopback alone; wait for all of them.

    Raises RankLost where one does not come.
    """
    if interface := next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None):
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    backend = "nccl" if device == "cuda" else "gloo"
    store = dist.FileStore(meeting, size)  # type: ignore[attr-defined]  # it is public, though not in __all__
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=JOIN_TIMEOUT)
    except RuntimeError as error:
        raise RankLost(f"not all came to the meeting: {str(error).splitlines()[0]}") from error
    # torch 2.14 gave it a public name.
    (getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout)(UPDATE_TIMEOUT)


def leave() -> None:
    if dist.is_initialized():
        if dist.get_backend() == "nccl":
            # Destroying the group would wait for the lost rank.
            c10d._abort_process_group()
        else:
            dist.destroy_process_group()


def combine(parameters: Sequence[nn.Parameter], sums: Sums, alive: Callable[[], bool] = lambda: True) -> None:
    """Make every rank's gradients and sums those of all. Raises RankLost where one is gone."""
    names = [f.name for f in fields(sums)]
    total = torch.tensor(
        [float(getattr(sums, name)) for name in names], dtype=torch.float64, device=parameters[0].device
    )
    added = [total]
    for parameter in parameters:
        if parameter.grad is None:
            # This rank had no rows.
            parameter.grad = torch.zeros_like(parameter)
        added.append(parameter.grad)
    try:
        # All are begun before any is waited for: there are hundreds, and a wait takes longer than a sum.
        for tensor, work in [(tensor, dist.all_reduce(tensor, async_op=True)) for tensor in added]:
            # NCCL would wait for a dead rank for ever; gloo says so itself.
            while tensor.is_cuda and not work.is_completed():
                if not alive():
                    raise RankLost("another trainer ended")
                time.sleep(2e-4)
            work.wait()
    except RuntimeError as error:
        # Gloo and NCCL raise this for a connection that is broken or silent for too long.
        raise RankLost(f"the connection to another trainer broke: {str(error).splitlines()[0]}") from error
    for name, value in zip(names, total.tolist(), strict=True):
        setattr(sums, name, type(getattr(sums, name))(value))


def digest(learner: Learner) -> int:
    """Return a checksum of all trained weights, which is the same on every rank."""
    check = 0
    for weight in learner.weights.values():
        check = zlib.crc32(weight.detach().flatten().view(torch.uint8).cpu().numpy().data, check)
    return check


class Trainers:
    """The other ranks as rank 0 sees them: processes that compute a share of each step.

    Give `step` to `LanguagePolicy.stepping`. Where a rank dies, all end; the daemon starts the trainer again
    from its last checkpoint, as when rank 0 dies itself.
    """

    def __init__(
        self,
        size: int,
        policy: LanguagePolicy,
        start: Callable[[int], WorkerProcess],
        folder: Path,
        check_every: int = CHECK_EVERY_UPDATES,
    ) -> None:
        """Prepare to train in `size` ranks, ourselves included.

        start: starts the process of a rank. folder: private, for what the ranks read.
        """
        self._size, self._policy, self._start, self._folder = size, policy, start, folder
        # Of GPUs of two kinds the norms of a gradient differ by rounding, and so do weights.
        self._checks, self._check_every = devices_alike(size), check_every
        self._children: list[WorkerProcess] = []
        # The ranks' file stays until the end: NCCL's find each other there at their first sum only.
        self._meeting = folder / "meeting"
        # What every other rank must answer for the last step; None before the first.
        self._expected: Stepped | None = None

    def __enter__(self) -> Self:
        """Start the others, without waiting for them."""
        self._children = [self._start(rank) for rank in range(1, self._size)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            child.kill()
        leave()
        self._meeting.unlink(missing_ok=True)
        for child in self._children:
            child.end()

    @property
    def alive(self) -> int:
        """The number of ranks that run, ourselves included."""
        return 1 + sum(child.alive for child in self._children)

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1 and up."""
        return [child.pid for child in self._children]

    def step(self, learner: Learner, rows: Sequence[Row]) -> UpdateReport:
        """Take `Learner.step` shared among the ranks.

        Raises RankLost where one dies, WorkerFailed where it said why.
        """
        try:
            if self._expected is None:
                self._meet()
            else:
                self._check_last_step()
            return self._shared(learner, rows)
        except RankLost:
            for child in self._children:
                child.kill()
                while _heard(child) is not None:
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
        """Check that each of the others finished the last step with the same result as ours."""
        if any(_heard(child) != self._expected for child in self._children):
            raise RankLost("another trainer ended between two steps, or its weights are not ours any more")

    def _meet(self) -> None:
        """Send the others our state, and wait for them to join."""
        state, meeting = self._folder / "state", str(self._meeting)
        state.mkdir(mode=0o700)
        try:
            self._policy.save(state)
            for child in self._children:
                if _heard(child) is None:
                    raise RankLost("another trainer ended while it was starting")
            for rank, child in enumerate(self._children, 1):
                child.send(Join(str(state), meeting, rank, self._size))
            join(meeting, 0, self._size, self._policy.device.type)
            for child in self._children:
                # The reply means that it joined, with its weights in place.
                _heard(child)
        finally:
            shutil.rmtree(state, ignore_errors=True)


def _heard(child: WorkerProcess) -> Message | None:
    message = child.receive()
    if isinstance(message, Fatal):
        raise WorkerFailed(message.message, message.exit_code)
    return message


def all_gather(data: bytes) -> list[bytes]:
    """Return the bytes of each rank that has joined, by rank; wait for all. Raises RankLost.

    Sizes are exchanged first, then the bytes, padded to the longest. torch's `all_gather_object` pickles, and
    nothing is unpickled here.
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
        raise RankLost(str(error).splitlines()[0]) from error
    return everybody
