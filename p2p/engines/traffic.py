"""Counts and limits the bytes that an engine's connections move.

Counted is what TCP carries for us. What lies below, and what is sent again, comes on top: some 5 in 100.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import trio

from p2p.admission.inbound_slots import GROUP_FACTOR
from p2p.latest import Latest
from p2p.netgroup import machine_of_host, share_group_of_host
from p2p.rate_limit import Claim, SharedRate

# The clock may not move in shorter steps.
LEAST_S = 0.001
# Answers to one machine, in bytes a second and in seconds of this rate at once: 8 MiB. A network group has
# GROUP_FACTOR times as much, and neither more than half of `up`, so that answers to others need not wait.
UPLOAD_PER_S, UPLOAD_BURST_S = 512 * 1024.0, 16.0
# The share of a month's bytes that strangers may move, evenly: a day's at once.
STRANGERS, _DAY_S, _MONTH_DAYS = 0.5, 86_400.0, 31


class Line(NamedTuple):
    """A connection, as it shares a rate: in turn by network group, machine and connection."""

    group: str
    machine: str
    connection: Hashable
    # Whether the other side made it. An attacker makes many, but cannot choose whom we dial.
    stranger: bool = False

    @property
    def path(self) -> tuple[Hashable, ...]:
        return self[:3]


UNKNOWN_LINE = Line("", "", "")


def line_of_host(host: str, connection: Hashable, stranger: bool = False) -> Line:
    """Return the line of a direct connection with a host."""
    return Line(share_group_of_host(host) or "", machine_of_host(host), connection, stranger)


class Traffic:
    """Counters of one node's engine, and the gates of what it sends and reads.

    Bytes wait at `sending` before they are sent, and at `reading` once they are read: the other side then
    slows down, by TCP's own means. Strangers' bytes wait at `strangers` before.

    up, down: at most so many bytes a second; None: no limit.
    """

    def __init__(self, up: float | None = None, down: float | None = None) -> None:
        self.up = self.down = 0  # bytes, so far
        # The engine's connections, and when their unread bytes were added up.
        self.muxers: WeakSet[Any] = WeakSet()
        self.added_up_at = -math.inf
        self._stop_at = float("inf")
        self._on_stop: Callable[[], None] = lambda: None
        self.limit(up, down)

    def limit(self, up: float | None, down: float | None, month: float | None = None) -> None:
        """Set other limits. Whoever waits already waits as long as before. month: bytes of a month."""
        self.sending, self.reading, self._own = RateGate(up), RateGate(down), RateGate(up)
        a_day = month * STRANGERS / _MONTH_DAYS if month else None
        self.strangers = RateGate(a_day / _DAY_S if a_day else None, a_day)
        self._most_up = up / 2 if up else float("inf")
        self._uploads = Latest[tuple[Hashable, ...], RateGate](2048)  # of machines and groups

    async def send(self, size: float, line: Line, own: bool = False) -> None:
        """Wait until so many bytes may be sent on a line.

        own: whether they are a frame of this node. Such go before all other bytes, in turn among themselves:
        the frame also goes to a crowd that only listens.
        """
        if line.stranger:
            await self.strangers.wait(size, line.path)
        if own:
            await self._own.wait(size, line.path)
        await self.sending.wait(size, () if own else line.path)

    async def read(self, size: float, line: Line) -> None:
        """Wait until more may be read of a line, from which so many bytes came."""
        if line.stranger:
            await self.strangers.wait(size, line.path)
        await self.reading.wait(size, line.path)

    async def upload(self, size: float, line: Line) -> None:
        """Wait until so many bytes may be sent that the peer asked for.

        All connections of a machine share a rate in turn, and all machines of a network group.
        """
        for level, rate in ((2, UPLOAD_PER_S), (1, GROUP_FACTOR * UPLOAD_PER_S)):
            of, rate = line[:level], min(rate, self._most_up)
            gate = self._uploads.get(of) or RateGate(rate, rate * UPLOAD_BURST_S)
            self._uploads[of] = gate
            await gate.wait(size, line.path[level:])

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
        self._shared = SharedRate(rate, burst or rate, 0.0) if rate else None
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
            if granted.cancel_called:
                continue
            try:
                with granted:
                    async with self._serving:
                        while True:
                            seconds = self._shared.serve(trio.current_time())
                            await trio.sleep(max(seconds, LEAST_S))
            finally:
                # It is cancelled while it waits, or was granted.
                claim.size = 0
