"""Waiting for what a node says of itself."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarmd.daemon import control
from swarmd.testing import wait_until


def until(state: Path, holds: Callable[[dict[str, Any]], bool], node: "subprocess.Popen[str]") -> dict[str, Any]:
    """The first status document for which it holds, while the node lives."""

    def found() -> dict[str, Any] | None:
        assert node.poll() is None, "the node ended"
        status = control.call(state, "status")
        return status if holds(status) else None

    return dict(wait_until(found, every=0.2))  # each look is work for the node
