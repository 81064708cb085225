"""The learning rate by update number. Pure."""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """`kind`: "constant", "linear" or "cosine", after a linear warm-up.

    `total` counts the warm-up in; constant does not look at it.
    """

    kind: str = "constant"
    warmup: int = 0  # updates until the full rate is reached
    total: int = 0  # updates until the lowest rate is reached; 0: never, the rate stays
    lowest: float = 0.0  # share of the full rate that is left in the end

    def __post_init__(self) -> None:
        if self.kind not in SHAPES:
            raise ValueError(f"no such schedule: {self.kind!r}; there are {', '.join(SHAPES)}")
        if self.warmup < 0 or self.total < 0 or not 0 <= self.lowest <= 1:
            raise ValueError(
                "warm-up and total are counts of updates, and the lowest rate a share between 0 and 1"
            )
        if self.total and self.total < self.warmup:
            raise ValueError(
                f"the schedule ends after {self.total} updates, within its warm-up of {self.warmup}"
            )


def learning_rate(peak: float, schedule: RateSchedule, update: int) -> float:
    """Return the learning rate of update number `update`, the first being 0.

    It depends on nothing else, so a resumed run goes on where it was.

    Warm-up: peak (update + 1) / warmup, so that the first step is not lost. Then the shape, from 1 to
        `lowest`; after `total`, `lowest`. Cosine: SGDR, arXiv 1608.03983, eq. 5, without restarts.
    """
    if update < schedule.warmup:
        return peak * (update + 1) / schedule.warmup
    if schedule.kind == "constant" or not schedule.total:
        return peak
    length = schedule.total - schedule.warmup
    done = min(1.0, (update - schedule.warmup) / length) if length else 1.0
    return peak * (schedule.lowest + (1 - schedule.lowest) * SHAPES[schedule.kind](done))


def _constant(_: float) -> float:
    return 1.0


def _linear(done: float) -> float:
    return 1.0 - done


def _cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


SHAPES: Final = MappingProxyType({"constant": _constant, "linear": _linear, "cosine": _cosine})
