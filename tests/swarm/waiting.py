"""Waiting for what a node says of itself."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarmd.daemon import control
from swarmd.testing import wait_until


def until(state: Path, holds: Callable[[dict[str, Any]], bool], node: "subprocess.Popen[str]") -> dict[str, Any]:
    """The first status document for which it holds, while the node lives. One that never does is told, with what the node wrote down."""
    status: dict[str, Any] = {}

    def found() -> dict[str, Any] | None:
        nonlocal status
        assert node.poll() is None, f"the node ended\n{_told(state)}"
        status = control.call(state, "status")
        return status if holds(status) else None

    try:
        return dict(wait_until(found, every=0.2))  # each look is work for the node
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{json.dumps(status, indent=1)}\n{_told(state)}") from None


def _told(state: Path) -> str:
    """The ends of the logs of the node and of those beside it: where two do not meet, the other one may know why."""
    logs = sorted(state.parent.glob("*/*.log"))
    return "\n".join(f"{log.relative_to(state.parent)}:\n{log.read_text(errors='replace')[-4000:]}" for log in logs)
