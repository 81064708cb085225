"""Decisions of the guest: pauses and their ends, `resume`, restarts, the CPU share, the monthly bytes."""

import os
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from p2p.engines.traffic import Traffic
from swarmd import link
from swarmd.config.config import NodeConfig, WhenConfig
from swarmd.daemon.guest.conditions import MachineFacts
from swarmd.daemon.guest.guest import Guest
from swarmd.daemon.guest.nvidia import NvidiaGpus
from swarmd.daemon.guest.probes import LoadProbe, Probes
from swarmd.daemon.guest.usage import SAVE_EVERY_S
from swarmd.errors import SwarmdError
from swarmd.state.status import TrafficBudget, Usage
from tests.doubles import TIMEOUT_S, Clock, until
from tests.swarmd.daemon.guest.test_probes import Times


class Meter:
    def __init__(self) -> None:
        self.spent = self.found_at = 0.0

    def read(self, _now: float) -> Usage:
        spent, self.spent = self.spent, 0.0
        return Usage(spent)

    def pids(self) -> list[int]:
        return []


class Swarm:
    def __init__(self) -> None:
        self.left: list[bool] = []

    def leave(self) -> None:
        self.left.append(True)

    def come_back(self) -> None:
        self.left.append(False)


class Played:
    """A guest with simulated conditions."""

    def __init__(self, folder: Path, clock: Clock | None = None, **sections: Any) -> None:
        self.clock, self.meter, self.swarm, self.traffic = clock or Clock(), Meter(), Swarm(), Traffic()
        self.told: list[link.ToTrainer] = []
        self.said: list[str] = []
        self.helped, self.on_gpu = 0, False
        config = NodeConfig.model_validate(sections)
        meter: Any = self.meter
        self.guest = Guest(
            config,
            folder,
            self.traffic,
            self.swarm,
            self.told.append,
            self.said.append,
            self.clock,
            meter,
            lambda *_: MachineFacts(),
            on_gpu=lambda: self.on_gpu,
            helped=lambda: self.helped,
        )
        self.guest.begin()

    def see(self, **facts: Any) -> list[str]:
        self.guest.decide(MachineFacts(**facts))
        return [each.kind for each in self.guest.pauses]


def test_a_condition_pauses_the_node_and_its_end_resumes_it(tmp_path: Path) -> None:
    node = Played(tmp_path, when={"hours": ()})
    assert node.see(on_battery=False) == [] and not node.told
    assert node.see(on_battery=True) == ["battery"] == node.see(on_battery=True)
    assert node.see(on_battery=False) == []
    pause, resume = node.told
    assert (
        isinstance(pause, link.Pause)
        and "battery" in pause.cause
        and "plugged in" in pause.cause
        and "swarmd resume" in pause.remedy
    )
    assert resume == link.Resume()


def test_the_nodes_own_new_process_does_not_count_as_another_program(tmp_path: Path) -> None:
    """A starting trainer uses the machine's only core; the meter looks for new processes each 5 s."""
    busy = iter([5.0 * search for search in range(9)])
    probes = Probes(WhenConfig(load="50 %"), NvidiaGpus(list, lambda: None))
    probes._load = LoadProbe(lambda: Times(next(busy), 0, 0, 0, 0, 0, 0))
    node, loads = Played(tmp_path), []
    for second in range(1, 21):
        node.clock.now += 1
        if second % 5 == 0:
            node.meter.found_at, node.meter.spent = node.clock.now, 5.0
        node.guest.count()
        ours, node.guest._all_ours = node.guest._all_ours, None
        loads.append(probes.measure(node.clock.now, ours).load)
    assert loads == [None] * 9 + [0.0] * 11


async def test_the_machines_load_is_measured_together_with_the_nodes_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """With a CPU share, the node's load is measured four times a second, and the machine's once."""
    node, looks = Played(tmp_path, limits={"cpu": "50 %"}), list[tuple[int, bool]]()
    counts = 0

    def read(now: float) -> Usage:
        nonlocal counts
        counts += 1
        node.meter.found_at = now - counts % 3  # the meter looks for processes at every third measurement
        return Usage(0.1)

    def measure(_now: float, ours: float | None) -> MachineFacts:
        looks.append((counts, ours is not None))
        return MachineFacts()

    async def here(call: Any) -> Any:
        return call()

    monkeypatch.setattr(trio.to_thread, "run_sync", here)
    node.meter.read, node.guest._measure = read, measure  # type: ignore[method-assign]
    with trio.move_on_after(10):
        await node.guest.run()
    assert all(known == (count % 3 == 0) for count, known in looks) and len(looks) > 5


async def test_a_timed_pause_ends_by_itself_and_survives_a_restart(tmp_path: Path) -> None:
    node = Played(tmp_path)
    until = node.clock.now + 7200
    assert (await node.guest.on_pause({"until": until}))["until"] == until
    (shown,) = node.guest.pauses
    assert (shown.kind, shown.until, shown.remedy) == ("user", until, "swarmd resume")
    assert shown.ends.startswith("at ")
    again = Played(tmp_path, node.clock)
    assert again.see() == ["user"] and isinstance(again.told[0], link.Pause)
    again.told.clear()
    again.guest.tell_again()  # for a trainer that has just started
    assert isinstance(again.told[0], link.Pause)
    node.clock.now = until
    assert again.see() == [] and again.told[-1] == link.Resume()
    assert Played(tmp_path, node.clock).see() == []


async def test_energy_counts_the_whole_device_but_only_during_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, watts = Played(tmp_path), [300.0, None]
    monkeypatch.setattr(node.guest, "_watts", lambda: watts.pop(0))
    for node.on_gpu in (False, True, True):
        await node.guest.add_energy(12.0)
    assert node.guest.ledger.report().total.energy_wh == pytest.approx(300 * 12 / 3600) and not watts


async def test_a_pause_of_weeks_is_shown_with_its_last_date(tmp_path: Path) -> None:
    """A weekday alone would be read as the next such day."""
    node = Played(tmp_path)
    for days, form in ((0.001, "at %H:%M"), (6, "at %a %H:%M"), (7, "at %Y-%m-%d %H:%M")):
        until = node.clock.now + days * 86_400
        await node.guest.on_pause({"until": until})
        assert node.guest.pauses[0].ends == datetime.fromtimestamp(until).strftime(form)


async def test_a_pause_without_an_end_survives_restarts_until_resumed(tmp_path: Path) -> None:
    await Played(tmp_path).guest.on_pause({})
    node = Played(tmp_path)
    node.clock.now += 40 * 86_400
    assert (node.see(), node.told) == (["user"], [link.Pause("you paused it", "swarmd resume")])
    resumed = {"schema": 1, "paused": False, "ended": ["user"], "warning": ""}
    assert await node.guest.on_resume({}) == resumed
    assert await node.guest.on_resume({}) == resumed | {"ended": []}
    assert node.guest.pauses == [] and Played(tmp_path).see() == []


async def test_a_pause_that_cannot_be_saved_or_removed_gives_a_message(tmp_path: Path) -> None:
    node = Played(tmp_path)
    (tmp_path / "pause.json").mkdir()
    assert "Is a directory): the pause ends with the node" in (await node.guest.on_pause({}))["warning"]
    assert node.see() == ["user"]
    assert "Is a directory): the next start pauses again" in (await node.guest.on_resume({}))["warning"]
    assert node.see() == []


@pytest.mark.parametrize("until", ["18:00", -5, 0, True, [], float("nan"), float("inf"), 1e300])
async def test_an_invalid_pause_is_rejected(tmp_path: Path, until: Any) -> None:
    node = Played(tmp_path)
    with pytest.raises(SwarmdError, match="within a year"):
        await node.guest.on_pause({"until": until})
    assert node.see() == []


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"until": "x"}', b'{"until": 1e999}', b'{"until": 1e12}', b"\xff", b"[" * 99_999]
)
def test_a_damaged_pause_file_counts_as_no_pause(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pause.json").write_bytes(content)
    assert Played(tmp_path).see() == []


async def test_unknown_conditions_are_reported_once_after_a_check(tmp_path: Path) -> None:
    node = Played(tmp_path, when={"metered": "pause"})
    await node.guest.on_pause({})
    assert not node.said  # the conditions were not checked yet
    node.see()
    node.see()
    assert len(node.said) == 1 and "when.metered has no effect" in node.said[0]
    seeing = Played(tmp_path, when={"metered": "pause"})
    seeing.see(metered=False)
    assert not seeing.said


async def test_resume_ignores_the_current_cause_of_the_pause_until_it_ends(tmp_path: Path) -> None:
    node = Played(tmp_path, when={"metered": "pause"})
    await node.guest.on_pause({})
    assert node.see(on_battery=True, metered=True) == ["user", "battery", "metered"]
    assert (await node.guest.on_resume({}))["ended"] == ["battery", "metered", "user"]
    assert (node.see(on_battery=True, metered=True), node.see(on_battery=True, metered=False)) == ([], [])
    assert node.see(on_battery=True, metered=True) == ["metered"]  # ended, then true again
    assert node.see(on_battery=False, metered=False) == [] and node.see(on_battery=True, metered=False) == [
        "battery"
    ]


def test_on_a_metered_network_the_node_leaves_the_swarm_and_keeps_training(tmp_path: Path) -> None:
    node = Played(tmp_path)
    assert node.see(metered=True) == [] and node.swarm.left == [True] and not node.told
    assert "metered" in node.guest.away[0].cause and "left the swarm" in node.said[0]
    node.see(metered=True)
    node.see(metered=False)
    assert node.swarm.left == [True, False] and node.guest.away == []
    share = Played(tmp_path, when={"metered": "share"})
    share.see(metered=True)
    assert share.swarm.left == []


def test_the_cpu_share_lets_the_trainer_rest_and_continue(tmp_path: Path) -> None:
    node = Played(tmp_path, limits={"cpu": "1 %"})
    node.meter.spent = 5.0
    node.clock.now += 0.25
    node.guest.count()
    node.guest.count()
    assert node.told == [link.Pause(brief=True)]
    node.guest.tell_again()
    node.clock.now += 3600
    node.guest.count()
    assert node.told == [link.Pause(brief=True), link.Pause(brief=True), link.Resume()]
    assert node.guest.ledger.report().total.cpu_seconds == 5.0


async def test_the_monthly_bytes_are_exact_and_start_again_each_month(tmp_path: Path) -> None:
    node = Played(tmp_path, limits={"month": "10 MB"})
    for _ in range(2000):
        node.traffic.count(up=2_000, down=4_000)
        if node.swarm.left:
            break
    moved = node.traffic.up + node.traffic.down
    assert 10e6 <= moved <= 10.1e6
    assert node.guest.ledger.report().budget == TrafficBudget(10_000_000, moved)
    (away,) = node.guest.away
    assert "0.01 GB are used up" in away.cause and "limits.month" in away.remedy
    node.see()
    assert node.swarm.left == [True]
    node.guest.ledger.save()
    assert (await node.guest.on_resume({}))["ended"] == [], "`resume` must not allow more bytes"
    again = Played(tmp_path, node.clock, limits={"month": "10 MB"})  # it does not even connect
    assert again.swarm.left == [True]
    node.clock.now = away.until
    again.see()
    assert again.swarm.left == [True, False]
    again.traffic.count(up=10_000_001)
    assert again.swarm.left == [True, False, True]


def test_restarts_do_not_extend_the_monthly_bytes(tmp_path: Path) -> None:
    """The node is killed ten times, each time just before the ledger would be saved."""
    clock, moved = Clock(), 0
    for _ in range(11):
        node = Played(tmp_path, clock, limits={"month": "100 MB"})
        for _ in range(602):
            if not node.swarm.left:
                node.traffic.count(up=16_000)
                moved += 16_000
                node.guest.count()
                node.guest.ledger.save_where_due()
    assert node.swarm.left and 100e6 <= moved <= 101e6


async def test_the_node_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, told, go_on = Played(tmp_path), threading.Event(), threading.Event()

    def slow(_descriptor: int) -> None:
        assert threading.current_thread() is not threading.main_thread() or go_on.is_set()
        told.set()
        assert go_on.wait(TIMEOUT_S)

    monkeypatch.setattr(os, "fsync", slow)
    node.clock.now += SAVE_EVERY_S
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.guest.run)
        await until(told.is_set)
        go_on.set()
        nursery.cancel_scope.cancel()
    assert (tmp_path / "usage.json").exists()


async def test_the_allowed_hours_follow_the_machines_current_time_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, a process keeps the time zone in which it started."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    node = Played(tmp_path, when={"hours": ("12:00-14:00",)})
    node.clock.now = 86_400 * 20_000 + 13 * 3600
    try:
        assert node.see() == []
        monkeypatch.setenv("TZ", "JST-9")
        assert node.see() == []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.guest.run)
            await until(lambda: node.guest.pauses)
            nursery.cancel_scope.cancel()
        assert node.guest.pauses[0].ends == "at Sat 12:00"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(("quotas", "rests"), [([], False), ([2.0], True)])
def test_the_cpu_share_is_relative_to_a_containers_quota(
    quotas: list[float], rests: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64), raising=False)
    monkeypatch.setattr("swarmd.policy.models.preflight.cgroup_cores", lambda: quotas)
    node = Played(tmp_path, limits={"cpu": "25 %"})
    node.clock.now, node.meter.spent = node.clock.now + 10, 10.0
    node.guest.count()
    assert (node.told == [link.Pause(brief=True)]) is rests


def test_rollouts_used_by_other_nodes_are_counted_across_restarts(tmp_path: Path) -> None:
    for used in (5, 2):  # the number in each run
        node = Played(tmp_path)
        for node.helped in (used - 1, used, used, 0):  # 0, because the peers that used them may be forgotten
            node.guest.count()
        node.guest.ledger.save()
    assert node.guest.ledger.report().total.helped == 7
