"""A bounded, fair queue of admitted items. Pure.

Where it is full, it drops the oldest item of whoever has most waiting (`holders`). The rest leave in the
order in which they came.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

from p2p.admission.holders import Holders
from p2p.types import Envelope, ReceivedBody

MAX_FRAMES = 1024
MAX_BYTES = 32 * 1024 * 1024

W = TypeVar("W", bound=Envelope | ReceivedBody)


class FairQueue(Generic[W]):
    def __init__(self, frames: int = MAX_FRAMES, bytes_: int = MAX_BYTES) -> None:
        self._frames, self._limit = frames, bytes_
        self._holders: Holders[int] = Holders()
        self._waiting: OrderedDict[int, W] = OrderedDict()  # by number, oldest first
        self._number = 0
        self.bytes = 0
        self.dropped = 0

    def put(self, item: W) -> None:
        self._number += 1
        self._waiting[self._number] = item
        self._holders.add(self._number, item.author, item.group)
        self.bytes += len(item.body)
        while self._waiting and (len(self._waiting) > self._frames or self.bytes > self._limit):
            self._drop()

    def drain(self) -> Sequence[W]:
        """Take all items, oldest first."""
        items = list(self._waiting.values())
        self._waiting.clear()
        self._holders = Holders()
        self.bytes = 0
        return items

    def __len__(self) -> int:
        return len(self._waiting)

    def _drop(self) -> None:
        number = self._holders.excess()
        self._holders.remove(number)
        self.bytes -= len(self._waiting.pop(number).body)
        self.dropped += 1
