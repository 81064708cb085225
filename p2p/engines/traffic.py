"""Counts and limits the bytes that an engine's connections move.

Counted is what TCP carries for us. What lies below, and what is sent again, comes on top: some 5 in 100.
"""

from collections.abc import Callable, Hashable, Sequence

import trio

from p2p.rate_limit import Claim, SharedRate

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
    """Lets bytes pass at a limited rate that all who wait share in turn (`SharedRate`).

    rate: None never waits. burst: what passes at once after a pause; the default is that of one second.
    """

    def __init__(self, rate: float | None, burst: float | None = None) -> None:
        self._shared = SharedRate(rate, burst or rate * BURST_S, 0.0) if rate else None
        # Whoever holds it sleeps until there are tokens, and then serves all.
        self._serving = trio.Lock()

    async def wait(self, size: float, by: Sequence[Hashable] = ("",)) -> None:
        """Wait until so many may pass. by: whose they are: network group, machine, connection."""
        if self._shared is None:
            return
        while size > 0:
            granted = trio.CancelScope()
            claim = Claim(min(size, self._shared.piece), granted.cancel)
            size -= claim.size
            self._shared.put(by, claim)
            self._shared.serve(trio.current_time())
            try:
                with granted:
                    async with self._serving:
                        while True:
                            seconds = self._shared.serve(trio.current_time())
                            await trio.sleep(max(seconds, LEAST_S))
            finally:
                # It is cancelled while it waits, or was granted.
                claim.size = 0
