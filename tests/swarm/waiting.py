"""Waiting for a node's messages."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarmd.daemon.local_api import control
from swarmd.errors import SwarmdError
from tests.processes import wait_until


def until(
    state: Path, holds: Callable[[dict[str, Any]], bool], node: "subprocess.Popen[Any]"
) -> dict[str, Any]:
    """The first status document for which it holds, of a node that may have just started, while it lives.

    If one never comes, raise with the node's log.
    """
    last: Any = None

    def found() -> dict[str, Any] | None:
        nonlocal last
        assert node.poll() is None, f"the node ended with status {node.returncode}\n{_told(state)}"
        try:
            last = status = control.call(state, "status", dict)
        except SwarmdError as error:  # it is not up yet, or the machine is too busy for an answer in time
            last = str(error)
            return None
        return status if holds(status) else None

    try:
        return dict(wait_until(found, every=0.2))  # each look is work for the node
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{json.dumps(last, indent=1)}\n{_told(state)}") from None


def _told(state: Path) -> str:
    """The ends of the logs of the node and of its companions.

    If two do not meet, the other one may know why.
    """
    logs = sorted(state.parent.glob("*/*.log"))
    return "\n".join(
        f"{log.relative_to(state.parent)}:\n{log.read_text(errors='replace')[-4000:]}" for log in logs
    )
