"""Functions that wait for a node's status."""

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
    """Return a node's first status document for which `holds` is true; the node may still be starting.

    If there is none, raise an error with the node's log.
    """
    last: Any = None

    def found() -> dict[str, Any] | None:
        nonlocal last
        assert node.poll() is None, f"the node ended with status {node.returncode}\n{_told(state)}"
        try:
            last = status = control.call(state, "status", dict)
        except SwarmdError as error:  # the node is not up yet, or too busy to answer in time
            last = str(error)
            return None
        return status if holds(status) else None

    try:
        return dict(wait_until(found, every=0.2))  # rarely, because each request costs the node time
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{json.dumps(last, indent=1)}\n{_told(state)}") from None


def _told(state: Path) -> str:
    """Return the ends of the logs of the node and its companions.

    If two nodes do not meet, the other node's log may have the reason.
    """
    logs = sorted(state.parent.glob("*/*.log"))
    return "\n".join(
        f"{log.relative_to(state.parent)}:\n{log.read_text(errors='replace')[-4000:]}" for log in logs
    )
