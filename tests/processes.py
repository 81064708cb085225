"""Processes that end with the test that started them, and a wait for conditions."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from tests.doubles import TIMEOUT_S


@contextmanager
def killed_after(process: "subprocess.Popen[Any]") -> Iterator["subprocess.Popen[Any]"]:
    """Kill the process when the block ends.

    `with Popen(…)` alone would wait for its end, which could be for ever if the block failed.
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
    """Wait until another process or thread makes a condition true; return its value.

    Raise TimeoutError after `seconds`.
    """
    ends = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > ends:
            raise TimeoutError(f"waited {seconds:g} s in vain")
        time.sleep(every)
    return found
