"""Limits on the bytes that a machine and its network group may write in a day. No clock is read."""

import pytest

from judge import config
from judge.evaluation.disk_budget import DAY_S, DiskBudget
from judge.types import Requester

MACHINE, GROUP = 1_000.0, 2_500.0


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> DiskBudget:
    monkeypatch.setattr(config, "WRITTEN_A_DAY", {False: (MACHINE, GROUP), True: (1e6, 1e6)})
    return DiskBudget()


def new(host: str) -> Requester:
    return Requester(host, record=False)


def written(budget: DiskBudget, hosts: list[str], now: float) -> int:
    """Return the bytes that these hosts may write together, one after the other, 100 bytes at a time."""
    total = 0
    for host in hosts:
        while not budget.wait(new(host), now):
            budget.spend(new(host), 100, now)
            total += 100
    return total


@pytest.mark.parametrize(
    "near",
    [
        ["198.51.100.7"],
        ["::ffff:198.51.100.7", "198.51.100.7"],
        [f"2001:db8:0:1:{host:x}::1" for host in range(1, 200)],  # a /64
        ["10.0.0.5"],
        ["testclient"],
    ],
)
def test_a_machine_may_write_its_daily_share(budget: DiskBudget, near: list[str]) -> None:
    assert written(budget, near, 0.0) == MACHINE + 100  # the last write may exceed the limit
    assert written(budget, near, 1.0) == 0
    assert written(budget, near, DAY_S) == pytest.approx(MACHINE, abs=100)
    assert budget.wait(Requester(near[0], record=True), DAY_S) == 0


@pytest.mark.parametrize(
    "near",
    [
        [f"198.51.{host}.7" for host in range(100)],  # a /16
        [f"2001:db8:{host:x}::1" for host in range(1, 100)],  # a /32
    ],
)
def test_a_network_group_may_write_its_daily_share(budget: DiskBudget, near: list[str]) -> None:
    assert written(budget, near, 0.0) <= GROUP + 300
    assert not budget.wait(new("203.0.113.1"), 0.0)


def test_writing_is_allowed_again_after_the_stated_wait(budget: DiskBudget) -> None:
    budget.spend(new("198.51.100.7"), 1_500, 0.0)
    wait = budget.wait(new("198.51.100.7"), 0.0)
    assert wait == pytest.approx(DAY_S / 2)
    assert budget.wait(new("198.51.100.7"), wait - 1.0) > 0 == budget.wait(new("198.51.100.7"), wait + 0.1)
