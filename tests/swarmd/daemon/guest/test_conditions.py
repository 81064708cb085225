"""The pause conditions, the ends of pauses, and the CPU share."""

from dataclasses import replace
from datetime import datetime

import pytest

from swarmd.config.config import WhenConfig
from swarmd.daemon.guest.conditions import (
    QUIET_S,
    CpuShare,
    MachineFacts,
    PauseConditions,
    month_end,
    out_of_budget,
)

NOON = datetime(2026, 11, 23, 12, 0).timestamp()


def kinds(of: PauseConditions, facts: MachineFacts, now: float = NOON) -> list[str]:
    return [each.kind for each in of.check(facts, now)]


def test_by_default_only_battery_power_causes_a_pause() -> None:
    busy = MachineFacts(on_battery=False, load=1.0, metered=True)
    unplugged = replace(busy, on_battery=True)
    for when, facts, found in (
        (WhenConfig(), busy, []),
        (WhenConfig(), unplugged, ["battery"]),
        (WhenConfig(battery="train"), unplugged, []),
        (WhenConfig(metered="pause"), busy, ["metered"]),
    ):
        assert kinds(PauseConditions(when), facts) == found


def test_unknown_facts_cause_no_pause() -> None:
    everything = WhenConfig(metered="pause", load="10 %", gpu="10 %")
    assert kinds(PauseConditions(everything), MachineFacts()) == []


@pytest.mark.parametrize("kind", ["load", "gpu"])
def test_a_pause_for_other_programs_load_ends_only_after_a_quiet_time(kind: str) -> None:
    conditions = PauseConditions(WhenConfig.model_validate({kind: "50 %"}))

    def found(share: float, after: float = 0.0) -> list[str]:
        return kinds(conditions, MachineFacts(**{kind: share}), NOON + after)

    assert found(0.5) == [] and found(0.51) == [kind]
    assert found(0.1, QUIET_S - 1) == [kind]
    assert found(0.1, QUIET_S) == [] == found(0.1, QUIET_S + 1)


def test_a_pause_outside_the_allowed_hours_says_when_it_ends() -> None:
    conditions = PauseConditions(WhenConfig(hours=("mon-fri 18:00-08:00",)))
    (pause,) = conditions.check(MachineFacts(), NOON)
    assert (
        pause.kind == "hours"
        and pause.until == NOON + 6 * 3600
        and pause.sentence.endswith("it goes on at 18:00")
    )
    (weekend,) = conditions.check(MachineFacts(), NOON + 5 * 86_400)
    assert weekend.ends == "at Mon 18:00" and kinds(conditions, MachineFacts(), NOON + 7 * 3600) == []


def test_every_pause_says_when_it_ends_and_what_to_do() -> None:
    conditions = PauseConditions(WhenConfig(metered="pause", load="10 %", gpu="10 %", hours=("sat",)))
    found = list(conditions.check(MachineFacts(on_battery=True, load=1.0, metered=True, gpu=1.0), NOON))
    kinds = ["battery", "metered", "load", "gpu", "hours"]
    assert [each.kind for each in found] == kinds
    assert all(each.cause and each.ends and each.remedy for each in found)


@pytest.mark.parametrize("step", [0.001, 0.05, 3.0, 40.0])  # CPU seconds of a step that cannot be interrupted
@pytest.mark.parametrize("cores", [0.02, 0.5, 3.0])
def test_the_cpu_share_is_kept_over_minutes_for_steps_of_any_length(cores: float, step: float) -> None:
    """Four threads compute whenever they are allowed; the share is checked four times a second."""
    share, now, used, left_of_step, resting = CpuShare(cores, 0.0), 0.0, 0.0, 0.0, False
    seconds = max(600.0, 20 * step / cores)
    while now < seconds:
        spent = 0.0
        while spent < 1.0 and (left_of_step > 0 or not resting):
            piece = min(left_of_step or step, 1.0 - spent)
            left_of_step = (left_of_step or step) - piece
            spent += piece
        now, used = now + 0.25, used + spent
        resting = share.spent(spent, now)
    assert 0.9 * cores <= used / seconds <= 1.08 * cores


def test_idle_time_is_not_credited() -> None:
    share = CpuShare(0.5, 0.0)
    share.spent(0.0, 3600.0)
    assert share.spent(2.0, 3600.25)  # an hour of credit would allow this much; one second does not


def test_the_monthly_byte_limit_starts_again_each_month() -> None:
    assert out_of_budget(None, 10**15, NOON) is None and out_of_budget(10**9, 10**9 - 1, NOON) is None
    spent = out_of_budget(10**9, 10**9, NOON)
    assert (
        spent is not None
        and spent.ends == "on 1 December"
        and spent.until == datetime(2026, 12, 1).timestamp()
    )
    assert (
        month_end(spent.until) == datetime(2027, 1, 1).timestamp()
        and month_end(spent.until - 1) == spent.until
    )
