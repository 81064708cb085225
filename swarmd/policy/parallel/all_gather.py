"""Gathers bytes of every rank at every rank.

What `all_gather_object` does, but in tensors: that pickles, and nothing is unpickled here.
"""

from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from swarmd.policy.parallel.data_parallel import RankLost, join, leave


class Ranks:
    """The ranks of one run.

    Use as a context manager: entering it waits for all of them. RankLost where one is gone.

    NCCL where each rank has a GPU of its own, which is then this process's default; gloo otherwise.
    """

    def __init__(self, meeting: str, rank: int, size: int, *, on_gpus: bool) -> None:
        """Prepare to meet the other ranks.

        meeting: a file that does not exist yet, the same for all. on_gpus: whether the nodes' models are on
            GPUs.
        """
        self.rank, self.size, self._meeting = rank, size, meeting
        self.device = torch.device("cpu")
        if on_gpus and torch.cuda.device_count() >= size:
            self.device = torch.device("cuda", rank)
            torch.cuda.set_device(self.device)

    def __enter__(self) -> Self:
        join(self._meeting, self.rank, self.size, self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave()

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank; wait for all.

        Sizes are exchanged first, then the bytes, padded to the longest.
        """
        sizes = [int(size) for size in self._all(torch.tensor([len(data)], device=self.device))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        found = self._all(padded.to(self.device))
        return [bytes(each[:size].cpu().numpy()) for each, size in zip(found, sizes, strict=True)]

    def _all(self, mine: Tensor) -> list[Tensor]:
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(everybody, mine)
        except RuntimeError as error:  # gloo and NCCL raise this for a broken connection
            raise RankLost(str(error).splitlines()[0]) from error
        return everybody
