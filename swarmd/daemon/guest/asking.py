"""Asking the platform: a command's output, and the seconds that all cores were busy."""

import subprocess
from collections.abc import Callable, Sequence
from typing import Any, Final

PATIENCE: Final = 2.0  # seconds for a command

# A command's standard output; raises OSError or subprocess.SubprocessError
Run = Callable[[Sequence[str]], str]


def run(command: Sequence[str]) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=True, stdin=subprocess.DEVNULL
    ).stdout


def all_seconds(times: Any) -> float:
    """Add up psutil's times of all cores, in seconds.

    User time contains guest time already, so that is not added again.
    """
    return float(sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))


def busy_seconds(times: Any) -> float:
    return all_seconds(times) - float(times.idle + getattr(times, "iowait", 0.0))
