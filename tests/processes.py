"""Processes that end with the test that started them."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil


@contextmanager
def killed_after(process: "subprocess.Popen[Any]") -> Iterator["subprocess.Popen[Any]"]:
    """Kills it when the block is left.

    `with Popen(…)` alone waits, and where the block failed that may be for ever.
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
