"""The CPU share over minutes, and the check of limits that are changed while the node runs. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from swarmd.config.config import LimitsConfig
from swarmd.config.messages import shown
from swarmd.errors import SwarmdError

# What may be saved up: after a pause the node does not run at full speed for long.
CREDIT_S: Final = 2.0
# What is remembered at most: a single step of a large model takes long.
DEBT_S: Final = 3600.0


class CpuShare:
    """Keeps the CPU share. cores: CPU seconds a second, of all processes together."""

    def __init__(self, cores: float, now: float) -> None:
        self._cores, self._at, self._left = cores, now, 0.0

    def spent(self, cpu_seconds: float, now: float) -> bool:
        """Charge CPU seconds spent since the last call; return whether the node must rest now."""
        gained, self._at = max(0.0, now - self._at) * self._cores, now
        self._left = max(
            -DEBT_S * self._cores, min(CREDIT_S * self._cores, self._left + gained) - cpu_seconds
        )
        return self._left < 0


LIVE: Final = ("cpu", "month", "up", "down")  # of [limits]; the others hold from the next start


def changed(limits: LimitsConfig, asked: Mapping[str, Any], rates: bool) -> LimitsConfig:
    """Return `limits` with those that are asked for, validated as in the configuration; "": no limit.

    rates: whether the engine can keep `up` and `down`. Raises SwarmdError for the first limit that is wrong.
    """
    for name, text in asked.items():
        if name not in LIVE:
            raise SwarmdError(
                f"limits.{name} cannot be changed while the node runs; these can: {', '.join(LIVE)}."
            )
        if not isinstance(text, str):
            raise SwarmdError(f"limits.{name}: expected a text, found {shown(text)}.")
    if not rates and (asked.get("up") or asked.get("down")):
        raise SwarmdError(
            'limits.up and limits.down are kept by libp2p alone: set swarm.engine = "libp2p", and join again.'
        )
    try:
        return LimitsConfig.model_validate(
            limits.model_dump()
            | {name: text.strip() or getattr(LimitsConfig(), name) for name, text in asked.items()}
        )
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        raise SwarmdError(
            f"limits.{first['loc'][0]}: found {shown(first['input'])}: {first['ctx']['error']}."
        ) from None
