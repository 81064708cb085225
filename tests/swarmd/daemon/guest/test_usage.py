"""A node's usage is counted by day, by month and in total, and survives restarts and damage."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from p2p import durable
from swarmd.daemon.guest.meters import FIND_EVERY_S, ProcessMeter
from swarmd.daemon.guest.usage import DAYS_KEPT, SAVE_EVERY_S, UsageLedger
from swarmd.daemon.local_api.status_words import cost_words
from swarmd.state.status import Usage
from tests import ROOT
from tests.doubles import Clock

DAY = 86_400.0
ONE = Usage(10.0, None, 1000, 2000, 4096, 3)


def test_amounts_are_counted_for_the_day_the_month_and_in_total(tmp_path: Path) -> None:
    clock = Clock()
    ledger = UsageLedger(tmp_path / "usage.json", clock)
    ledger.add(ONE)
    clock.now += 40 * DAY  # another month
    ledger.add(ONE)
    ledger.add(Usage(1.0, energy_wh=0.5))
    shown = ledger.report()
    today, month, total = shown.today, shown.month, shown.total
    assert (today.cpu_seconds, today.energy_wh, shown.days[1]) == (11.0, 0.5, today)
    assert (month.cpu_seconds, month.helped, ledger.this_month.bytes_moved) == (11.0, 3, 3000)
    assert (total.bytes_up, total.bytes_written, total.helped) == (2000, 8192, 6)
    assert [row.bytes_down for row in shown.days] == [2000, 2000]
    assert cost_words(today) == "0.2 CPU minutes, about 0.00 kWh, 0.0 MB up, 0.0 MB down, 0.00 GB written"


def test_the_document_describes_each_figure() -> None:
    document = (ROOT / "docs" / "guest.md").read_text()
    missing = [name for name in Usage.__struct_fields__ if f"`{name}`" not in document]
    assert not missing, f"add rows to the table of docs/guest.md: {missing}"


def test_saved_usage_is_restored_after_a_restart(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "usage.json"
    ledger = UsageLedger(path, clock, budget=2000 * ONE.bytes_moved)
    ledger.add(ONE)
    ledger.save_where_due()
    # The ledger is written after a minute, or after more than a share of the budget.
    assert not path.exists()
    ledger.add(Usage(bytes_up=1))
    ledger.save_where_due()
    assert UsageLedger(path, clock, 2000 * ONE.bytes_moved).report() == ledger.report()
    ledger.add(ONE)
    clock.now += SAVE_EVERY_S
    ledger.save_where_due()
    assert UsageLedger(path, clock).report().total.cpu_seconds == 20.0


def test_the_file_stays_small(tmp_path: Path) -> None:
    clock = Clock()
    ledger = UsageLedger(tmp_path / "usage.json", clock)
    for _ in range(3 * 365):
        ledger.add(ONE)
        clock.now += DAY
    ledger.save()
    assert len(ledger.report().days) == DAYS_KEPT and (tmp_path / "usage.json").stat().st_size < 20_000
    assert ledger.report().total.cpu_seconds == 3 * 365 * 10.0


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"since": "x"}', b"[" * 100_000, b"\xff" * 99, b'{"since": 1, "days": {"a": 1}}']
)
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "usage.json"
    path.write_bytes(content)
    ledger = UsageLedger(path, Clock())
    assert (
        ledger.report().total.cpu_seconds == 0 and (tmp_path / "usage.json.corrupt").read_bytes() == content
    )
    ledger.save()
    assert UsageLedger(path, Clock()).report() == ledger.report()


def test_a_full_disk_loses_no_counted_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = UsageLedger(tmp_path / "usage.json", Clock())
    ledger.add(ONE)
    with monkeypatch.context() as full:
        full.setattr(
            durable, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        ledger.save()
    ledger.save()
    assert UsageLedger(tmp_path / "usage.json", Clock()).report().total.cpu_seconds == 10.0


def test_the_meter_also_counts_children_that_have_ended() -> None:
    meter = ProcessMeter(0.0)
    burn = "import time\nwhile time.process_time() < 0.4: pass\n"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert 0.35 < meter.read(1.0).cpu_seconds < 3.0
    running = subprocess.Popen(
        [sys.executable, "-c", burn + "print('burnt', flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert running.stdout is not None and running.stdout.readline() == b"burnt\n"
        us = sum(psutil.Process().cpu_times()[:2])
        first = meter.read(1.0 + FIND_EVERY_S).cpu_seconds
        assert first > 0.35
        running.communicate(b"\n")
        second = meter.read(1.5 + FIND_EVERY_S).cpu_seconds  # not counted again with its parent's
        assert second < 0.3 + sum(psutil.Process().cpu_times()[:2]) - us
    finally:
        running.kill()
        running.wait()
