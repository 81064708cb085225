"""A bounded, fair queue of admitted envelopes. Pure.

Where it is full, the oldest envelope of whoever has most waiting is dropped (`holders`). Envelopes leave in the order in which they came.
"""

from collections import OrderedDict
from collections.abc import Sequence

from p2p.admission.holders import Holders
from p2p.types import Envelope

FRAMES = 1024
BYTES = 32 * 1024 * 1024


class FairQueue:
    def __init__(self, frames: int = FRAMES, bytes_: int = BYTES) -> None:
        self._frames, self._limit = frames, bytes_
        self._holders: Holders[int] = Holders()
        self._waiting: OrderedDict[int, Envelope] = OrderedDict()  # number -> envelope, oldest first
        self._number = 0
        self.bytes = 0
        self.dropped = 0

    def put(self, envelope: Envelope) -> None:
        self._number += 1
        self._waiting[self._number] = envelope
        self._holders.add(self._number, envelope.author, envelope.group)
        self.bytes += len(envelope.body)
        while self._waiting and (len(self._waiting) > self._frames or self.bytes > self._limit):
            self._drop()

    def drain(self) -> Sequence[Envelope]:
        """Take all of it, oldest first."""
        envelopes = list(self._waiting.values())
        self._waiting.clear()
        self._holders = Holders()
        self.bytes = 0
        return envelopes

    def __len__(self) -> int:
        return len(self._waiting)

    def _drop(self) -> None:
        number = self._holders.excess()
        self._holders.remove(number)
        self.bytes -= len(self._waiting.pop(number).body)
        self.dropped += 1
