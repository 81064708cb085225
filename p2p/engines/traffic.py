"""Counts and limits the bytes that an engine's connections move.

Counted is what TCP carries for us. What lies below, and what is sent again, comes on top: some 5 in 100.
"""

from collections.abc import Callable

import trio

from p2p.rate_limit import TokenBucket

# How long a full token bucket lasts.
BURST_S = 1.0
# The clock may not move in shorter steps.
LEAST_S = 0.001


class Traffic:
    """Counters of one node's engine, and the gates of what it sends and reads.

    Bytes wait at `sending` before they are sent, and at `reading` once they are read: the other side then
    slows down, by TCP's own means.

    up, down: at most so many bytes a second; None: no limit.
    """

    def __init__(self, up: float | None = None, down: float | None = None) -> None:
        self.up = self.down = 0  # bytes, so far
        self._stop_at = float("inf")
        self._on_stop: Callable[[], None] = lambda: None
        self.limit(up, down)

    def limit(self, up: float | None, down: float | None) -> None:
        """Set other limits. Whoever waits already waits as long as before."""
        self.sending, self.reading = RateGate(up), RateGate(down)

    def count(self, up: int = 0, down: int = 0) -> None:
        self.up, self.down = self.up + up, self.down + down
        if self.up + self.down >= self._stop_at:
            self._stop_at = float("inf")
            self._on_stop()

    def stop_after(self, size: float, on_stop: Callable[[], None]) -> None:
        """Call on_stop once so many more bytes were counted."""
        self._stop_at, self._on_stop = self.up + self.down + size, on_stop


class RateGate:
    """One token bucket that all connections share; whoever comes first is served first.

    rate: None never waits.
    """

    def __init__(self, rate: float | None) -> None:
        self._bucket = TokenBucket(rate, rate * BURST_S, 0.0) if rate else None
        self._turn = trio.Lock()

    async def wait(self, size: float) -> None:
        if self._bucket is None:
            return
        async with self._turn:
            while size > 0:
                # Wait for pieces that the bucket can hold.
                piece = min(size, self._bucket.burst / 2)
                while (seconds := self._bucket.wait(trio.current_time(), piece)) > 0:
                    await trio.sleep(max(seconds, LEAST_S))
                size -= piece
