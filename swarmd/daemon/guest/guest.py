"""The node as a guest of its machine: counts what it costs. A task of the daemon (trio)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import trio

from p2p.engines.common.traffic import Traffic
from swarmd.daemon.guest.process_meter import ProcessMeter
from swarmd.state.usage import USAGE_FILE, Usage, UsageLedger

COUNT_EVERY: Final = 5.0  # seconds


class Guest:
    def __init__(self, folder: Path, traffic: Traffic, clock: Callable[[], float], meter: ProcessMeter | None = None) -> None:
        """folder: the state folder. traffic: of the node's engine."""
        self.ledger = UsageLedger(folder / USAGE_FILE, clock)
        self._traffic, self._clock = traffic, clock
        self._meter = meter or ProcessMeter(clock())
        self._moved = (traffic.up, traffic.down)

    async def run(self) -> None:
        try:
            while True:
                await trio.sleep(COUNT_EVERY)
                self.count()
                self.ledger.save_where_due()
        finally:
            self.count()
            self.ledger.save()

    def count(self) -> None:
        """Enter into the ledger what was spent since the last call."""
        spent, before, now = self._meter.read(self._clock()), self._moved, (self._traffic.up, self._traffic.down)
        self._moved = now
        self.ledger.add(Usage(spent.cpu_seconds, None, now[0] - before[0], now[1] - before[1], spent.bytes_written))

    def document(self) -> dict[str, Any]:
        """For the status: what the node has cost."""
        return {"usage": self.ledger.document()}
