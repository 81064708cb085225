"""The usage ledger: a small file with the node's costs and its help to other nodes, by day, month and in all.

Days and months are in the machine's time zone. The file is replaced as a whole, so kill -9 loses only the
usage since the last save.
"""

import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from p2p import durable
from swarmd.state.status import TrafficBudget, Usage, UsageReport, UsageRow

log = logging.getLogger(__name__)

USAGE_FILE = "usage.json"
SAVE_EVERY_S: Final = 60.0
# Save after this share of the month's budget was moved, so kill -9 makes the node forget at most that much.
SAVE_AFTER: Final = 1 / 2000
DAYS_KEPT, MONTHS_KEPT = 62, 36


class _Ledger(msgspec.Struct):
    since: float  # when counting began
    total: Usage = Usage()
    months: dict[str, Usage] = {}  # "2026-11"
    days: dict[str, Usage] = {}  # "2026-11-23"
    schema: int = 1


class UsageLedger:
    """The ledger. clock: seconds since the epoch. budget: bytes per month; None for no limit."""

    def __init__(self, path: Path, clock: Callable[[], float], budget: int | None = None) -> None:
        self._path, self._clock, self._budget = path, clock, budget
        read = msgspec.json.Decoder(_Ledger).decode
        self._ledger = durable.load(path, read, "counting begins anew") or _Ledger(clock())
        self._saved_at, self._saved_bytes = clock(), self._ledger.total.bytes_moved
        self._failed = False

    def add(self, used: Usage) -> None:
        day, month = self._names()
        ledger = self._ledger
        ledger.total = ledger.total.plus(used)
        for table, name, kept in ((ledger.days, day, DAYS_KEPT), (ledger.months, month, MONTHS_KEPT)):
            table[name] = table.get(name, Usage()).plus(used)
            for oldest in sorted(table)[:-kept]:
                del table[oldest]

    @property
    def this_month(self) -> Usage:
        return self._ledger.months.get(self._names()[1], Usage())

    def report(self) -> UsageReport:
        """Return the status field `usage`: the node's usage of its machine."""
        (day, month), ledger = self._names(), self._ledger
        return UsageReport(
            _row(ledger.days.get(day, Usage()), day=day),
            _row(self.this_month, month=month),
            _row(ledger.total, since=ledger.since),
            [_row(ledger.days[name], day=name) for name in sorted(ledger.days)],
            None if self._budget is None else TrafficBudget(self._budget, self.this_month.bytes_moved),
        )

    def save_where_due(self) -> None:
        """Save once a minute, or earlier if more than the share SAVE_AFTER of the budget was moved."""
        moved = self._ledger.total.bytes_moved - self._saved_bytes
        much = self._budget is not None and moved > self._budget * SAVE_AFTER
        if much or not 0 <= self._clock() - self._saved_at < SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Save the ledger. If the disk is full, go on counting: the next save contains everything."""
        self._saved_at, self._saved_bytes = self._clock(), self._ledger.total.bytes_moved
        try:
            durable.replace(self._path, msgspec.json.encode(self._ledger))
        except OSError as error:
            if not self._failed:
                log.warning(
                    "%s cannot be written: %s. What the node costs is counted, and lost if it is killed.",
                    self._path,
                    error.strerror or error,
                )
            self._failed = True
        else:
            self._failed = False

    def _names(self) -> tuple[str, str]:
        now = datetime.fromtimestamp(self._clock()).astimezone()
        return now.strftime("%Y-%m-%d"), now.strftime("%Y-%m")


def _row(usage: Usage, **name: Any) -> UsageRow:
    return UsageRow(**msgspec.structs.asdict(usage), **name)
