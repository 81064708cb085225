"""Processes that end with the test that started them, and waiting for their events."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from tests.doubles import TIMEOUT_S


@contextmanager
def killed_after(process: "subprocess.Popen[Any]") -> Iterator["subprocess.Popen[Any]"]:
    """Kills it when the block is left.

    `with Popen(…)` alone waits, and if the block failed that may be for ever.
    """
    with process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], Any], seconds: float = TIMEOUT_S, *, every: float = 0.02) -> Any:
    """Wait for another process or thread to reach a condition. Returns the condition's value; raises
    TimeoutError."""
    ends = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > ends:
            raise TimeoutError(f"waited {seconds:g} s in vain")
        time.sleep(every)
    return found
