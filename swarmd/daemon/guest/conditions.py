"""Decides when the node pauses, and gives each pause's cause, end and remedy; keeps its CPU share. Pure.

A load that fluctuates around its limit would stop and start the node all the time. So a pause for the load
ends only after a quiet time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from swarmd.config.amounts import percent
from swarmd.config.config import WhenConfig
from swarmd.config.hours import clock_words, is_open, next_opening, window
from swarmd.state.status import PauseCause

# A pause for the load ends after the load was below its limit for this many seconds.
QUIET_S: Final = 30.0
# Seconds of unused share that may be saved up: after a pause the node must not run at full speed for long.
CREDIT_S: Final = 2.0
# Seconds of exceeded share that are remembered at most: a single step of a large model takes long.
DEBT_S: Final = 3600.0
OVERRIDE: Final = "swarmd resume goes on all the same"


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about the machine. None: unknown on this platform, or not needed by the settings."""

    on_battery: bool | None = None
    load: float | None = None  # other programs' share of all cores
    metered: bool | None = None
    gpu: float | None = None  # other programs' share of the node's GPU
    left: float | None = None  # share of one core that other programs leave to the node; None: enough


class UseByOthers:
    """Whether other programs use more than `limit`, such as "50 %", or did within the last `QUIET_S`."""

    def __init__(self, limit: str) -> None:
        self._limit = percent(limit) if limit else None
        self._at: float | None = None  # when the share was last above the limit; None: no pause

    def too_much(self, share: float | None, now: float) -> bool:
        """Return whether to pause. An unknown share never pauses, and keeps the state as it was."""
        if self._limit is None or share is None:
            return False
        if share > self._limit:
            self._at = now
        elif self._at is not None and not 0 <= now - self._at < QUIET_S:
            self._at = None
        return self._at is not None


class PauseConditions:
    """Decides which conditions for a pause hold, and remembers when the load was last too high."""

    def __init__(self, when: WhenConfig) -> None:
        self._when = when
        self._windows = [window(text) for text in when.hours]
        self._load, self._gpu = UseByOthers(when.load), UseByOthers(when.gpu)

    def check(self, facts: MachineFacts, now: float) -> Iterator[PauseCause]:
        """Yield the causes to pause that hold now.

        now: seconds since the epoch.
        """
        local = datetime.fromtimestamp(now)
        if self._when.battery == "pause" and facts.on_battery:
            yield PauseCause(
                "battery", "the machine runs on its battery", None, "when it is plugged in", OVERRIDE
            )
        if self._when.metered == "pause" and facts.metered:
            yield PauseCause("metered", "the network is metered", None, "when it is not metered", OVERRIDE)
        if self._load.too_much(facts.load, now):
            ends = f"after {QUIET_S:.0f} s below {self._when.load}"
            yield PauseCause("load", "other programs need the machine", None, ends, OVERRIDE)
        if self._gpu.too_much(facts.gpu, now):
            ends = f"after {QUIET_S:.0f} s below {self._when.gpu}"
            yield PauseCause("gpu", "other programs need the GPU", None, ends, OVERRIDE)
        if self._windows and not is_open(self._windows, local):
            opening = next_opening(self._windows, local)
            yield PauseCause(
                "hours",
                "when.hours excludes this hour",
                opening.timestamp(),
                f"at {clock_words(opening, local)}",
                OVERRIDE,
            )


def month_end(now: float) -> float:
    """Return the first moment of the next month, in the machine's time zone."""
    local = datetime.fromtimestamp(now)
    return datetime(local.year + local.month // 12, local.month % 12 + 1, 1).timestamp()


def out_of_budget(budget: int | None, moved: int, now: float) -> PauseCause | None:
    """Return a pause until next month if the budget is used up.

    budget: bytes per month; None for no limit. moved: bytes sent and received this month.
    """
    if budget is None or moved < budget:
        return None
    end = month_end(now)
    day = datetime.fromtimestamp(end).strftime("%d %B").lstrip("0")
    cause = f"this month's {budget / 1e9:g} GB are used up: the node trains alone"
    return PauseCause("month", cause, end, f"on {day}", "raise limits.month, and join again")


class CpuShare:
    """Keeps the CPU share. cores: CPU seconds per second that all processes together may use."""

    def __init__(self, cores: float, now: float) -> None:
        self._cores, self._at, self._left = cores, now, 0.0

    def spent(self, cpu_seconds: float, now: float) -> bool:
        """Charge CPU seconds spent since the last call; return whether the node must rest now."""
        gained, self._at = max(0.0, now - self._at) * self._cores, now
        self._left = max(
            -DEBT_S * self._cores, min(CREDIT_S * self._cores, self._left + gained) - cpu_seconds
        )
        return self._left < 0
