"""Limits that can be changed while the node runs: checks what is asked for. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from swarmd.config.config import LimitsConfig
from swarmd.config.messages import shown
from swarmd.errors import SwarmdError

LIVE: Final = ("cpu", "month", "up", "down")  # of [limits]; the others hold from the next start
LONGEST: Final = 40  # characters of one


def changed(limits: LimitsConfig, asked: Mapping[str, Any], rates: bool) -> LimitsConfig:
    """Return `limits` with those that are asked for, validated as in the configuration.

    rates: whether the engine can keep `up` and `down`. Raises SwarmdError for the first limit that is wrong.
    """
    for name, text in asked.items():
        if name not in LIVE:
            raise SwarmdError(
                f"limits.{name[:LONGEST]} cannot be changed while the node runs; these can:"
                f" {', '.join(LIVE)}."
            )
        if not isinstance(text, str) or len(text) > LONGEST:
            raise SwarmdError(f"limits.{name}: expected a short text, found {shown(text)}.")
    if not rates and (asked.get("up") or asked.get("down")):
        raise SwarmdError(
            'limits.up and limits.down are kept by libp2p alone: set swarm.engine = "libp2p", and join again.'
        )
    try:
        return LimitsConfig.model_validate(
            limits.model_dump() | {name: text.strip() for name, text in asked.items()}
        )
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        raise SwarmdError(
            f"limits.{first['loc'][0]}: found {shown(first['input'])}: {first['ctx']['error']}."
        ) from None
