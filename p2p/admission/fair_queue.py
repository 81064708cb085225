"""A bounded, fair queue of admitted envelopes. Pure. Many new authors cannot push out the frames of the others.

Where it is full, the oldest envelope of the newcomers is dropped while they have more than a quarter of it together; else the oldest
of the author that has most waiting. Envelopes leave in the order in which they came.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from p2p.types import Envelope, PeerId

FRAMES = 1024
BYTES = 32 * 1024 * 1024
NEWCOMERS = 0.25


class FairQueue:
    def __init__(self, frames: int = FRAMES, bytes_: int = BYTES) -> None:
        self._frames, self._limit = frames, bytes_
        self._lines: dict[PeerId, deque[int]] = {}  # author -> numbers of its waiting envelopes, oldest first
        self._waiting: OrderedDict[int, Envelope] = OrderedDict()  # number -> envelope, oldest first
        self._newcomers: OrderedDict[int, None] = OrderedDict()  # numbers of theirs
        self._number = 0
        self.bytes = 0
        self.dropped = 0

    def put(self, envelope: Envelope) -> None:
        self._number += 1
        self._waiting[self._number] = envelope
        self._lines.setdefault(envelope.author, deque()).append(self._number)
        if not envelope.established:
            self._newcomers[self._number] = None
        self.bytes += len(envelope.body)
        while self._waiting and (len(self._waiting) > self._frames or self.bytes > self._limit):
            self._drop()

    def drain(self) -> Sequence[Envelope]:
        """All of it, oldest first."""
        envelopes = list(self._waiting.values())
        self._waiting.clear()
        self._lines.clear()
        self._newcomers.clear()
        self.bytes = 0
        return envelopes

    def __len__(self) -> int:
        return len(self._waiting)

    def _drop(self) -> None:
        if len(self._newcomers) > NEWCOMERS * len(self._waiting):
            number = next(iter(self._newcomers))
        else:
            number = max(self._lines.values(), key=len)[0]
        envelope = self._waiting.pop(number)
        self._newcomers.pop(number, None)
        line = self._lines[envelope.author]
        line.remove(number)  # the first, or close to it
        if not line:
            del self._lines[envelope.author]
        self.bytes -= len(envelope.body)
        self.dropped += 1
