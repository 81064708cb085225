"""Counts and limits the bytes that an engine's connections move.

The counters hold the payload of TCP. Headers and retransmissions add about 5 %.
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

# Shortest sleep. The clock may not have a finer resolution.
LEAST_S = 0.001
# Answers to one machine: bytes a second, and the burst in seconds of this rate (8 MiB). A network group has
# GROUP_FACTOR times as much. Each is at most half of `up`, so that answers to other machines need not wait.
UPLOAD_PER_S, UPLOAD_BURST_S = 512 * 1024.0, 16.0
# The share of the month's bytes that inbound connections may move. The rate is even; the burst is one day's
# bytes.
STRANGERS, _DAY_S, _MONTH_DAYS = 0.5, 86_400.0, 31


class Line(NamedTuple):
    """A connection's path in the tree of a shared rate: network group, machine, connection."""

    group: str
    machine: str
    connection: Hashable
    # Whether the other side dialled. An attacker can dial us often, but cannot choose which peers we dial.
    stranger: bool = False

    @property
    def path(self) -> tuple[Hashable, ...]:
        return self[:3]


UNKNOWN_LINE = Line("", "", "")


def line_of_host(host: str, connection: Hashable, stranger: bool = False) -> Line:
    """Return the line of a direct connection with a host."""
    return Line(share_group_of_host(host) or "", machine_of_host(host), connection, stranger)


class Traffic:
    """Counts one engine's bytes and limits their rates.

    Bytes to send wait at the gate `sending`. Received bytes wait at the gate `reading` before the next read,
    so that TCP slows the other side down. Bytes of inbound connections first wait at the gate `strangers`.

    up, down: limits in bytes a second; None for no limit.
    """

    def __init__(self, up: float | None = None, down: float | None = None) -> None:
        self.up = self.down = 0  # bytes, so far
        # The engine's connections, and the time when their unread bytes were last added up.
        self.muxers: WeakSet[Any] = WeakSet()
        self.added_up_at = -math.inf
        self._stop_at = float("inf")
        self._on_stop: Callable[[], None] = lambda: None
        self.limit(up, down)

    def limit(self, up: float | None, down: float | None, month: float | None = None) -> None:
        """Set new limits. Tasks that already wait keep to the old limits.

        up, down: as in the constructor. month: bytes a month; None for no limit.
        """
        self.sending, self.reading, self._own = RateGate(up), RateGate(down), RateGate(up)
        a_day = month * STRANGERS / _MONTH_DAYS if month else None
        self.strangers = RateGate(a_day / _DAY_S if a_day else None, a_day)
        self._most_up = up / 2 if up else float("inf")
        self._uploads = Latest[tuple[Hashable, ...], RateGate](2048)  # by machine and by group

    async def send(self, size: float, line: Line, own: bool = False) -> None:
        """Wait until `size` bytes may be sent on a line.

        own: whether the bytes are a frame of this node. Own frames go before all other bytes. Among
            themselves they share a rate fairly, because many listening peers may get the same frame.
        """
        if line.stranger:
            await self.strangers.wait(size, line.path)
        if own:
            await self._own.wait(size, line.path)
        await self.sending.wait(size, () if own else line.path)

    async def read(self, size: float, line: Line) -> None:
        """Wait until the next read from a line, after `size` bytes came from it."""
        if line.stranger:
            await self.strangers.wait(size, line.path)
        await self.reading.wait(size, line.path)

    async def upload(self, size: float, line: Line) -> None:
        """Wait until `size` bytes of an answer may be sent to the peer that asked.

        All connections of a machine share one rate fairly, and so do all machines of a network group.
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
        """Call `on_stop` once `size` more bytes were counted."""
        self._stop_at, self._on_stop = self.up + self.down + size, on_stop


class RateGate:
    """Limits a rate of bytes, which all waiting tasks share fairly (`SharedRate`).

    rate: bytes a second; None for no limit. burst: bytes that pass at once after a pause; by default one
        second's.
    """

    def __init__(self, rate: float | None, burst: float | None = None) -> None:
        self._shared = SharedRate(rate, burst or rate, 0.0) if rate else None
        # The task that holds the lock sleeps until there are tokens, and then serves all waiting tasks.
        self._serving = trio.Lock()

    async def wait(self, size: float, by: Sequence[Hashable] = ("",)) -> None:
        """Wait until `size` bytes may pass. by: their owner, as network group, machine, connection."""
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
                            await trio.sleep(max(self._shared.serve(trio.current_time()), LEAST_S))
            finally:
                # The task was cancelled, or the claim was granted: withdraw the claim.
                claim.size = 0
