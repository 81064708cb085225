"""The month's budget of bytes.

How much is left, and why the node is out of the swarm once nothing is. Pure.
"""

from datetime import datetime

from swarmd.daemon.guest.conditions import PauseCause


def month_end(now: float) -> float:
    """Return the first moment of the next month, in the machine's own time zone."""
    local = datetime.fromtimestamp(now)
    return datetime(local.year + local.month // 12, local.month % 12 + 1, 1).timestamp()


def out_of_budget(budget: int | None, moved: int, now: float) -> PauseCause | None:
    """Return a pause until next month if the budget is used up.

    budget: bytes per month; None for no limit. moved: bytes of this month, up and down.
    """
    if budget is None or moved < budget:
        return None
    end = month_end(now)
    day = datetime.fromtimestamp(end).strftime("%d %B").lstrip("0")
    cause = f"this month's {budget / 1e9:g} GB are used up: it trains alone"
    return PauseCause("month", cause, end, f"on {day}", "raise limits.month, and join again")
