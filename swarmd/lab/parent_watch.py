"""Processes that end together with their parent, even after kill -9.

`python -m swarmd.lab.parent_watch PID MODULE …` runs a module as such a process; PID: the parent.
"""

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from threading import Thread

from p2p.errors import OperatorError
from swarmd.errors import SwarmdError

PARENT_CHECK_S = 1.0
# Seconds that a process has to end after SIGTERM.
TERM_TIMEOUT_S = 60.0


class LabFailed(SwarmdError):
    """A process that the lab started failed, such as a run of an experiment."""

    exit_code = 1


def watched() -> Sequence[str]:
    """Return the command prefix that runs a module which ends together with this process."""
    return (sys.executable, "-P", "-m", "swarmd.lab.parent_watch", str(os.getpid()))


def end(process: subprocess.Popen[bytes]) -> int:
    """End a process by SIGTERM, or by SIGKILL after a timeout; return its exit status."""
    process.terminate()
    try:
        return process.wait(TERM_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    return process.wait()


def end_with_parent(parent: int | None = None) -> None:
    """Send this process SIGTERM once its parent is gone, even after kill -9.

    The kernel's mechanism (`seccomp.die_with_parent`) does not work here: it acts when the *thread* that
    started this process ends, and trio starts processes from threads that end after ten seconds without work.
    parent: its pid, if it was passed on; the parent may be gone by now.
    """
    parent = parent or os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=watch, daemon=True).start()


def tell_round(number: int) -> None:
    """Report a finished round to the process that plays the runs (`swarmd.lab.runs`)."""
    print(number, file=sys.__stdout__, flush=True)


def run_program(main: Callable[..., None]) -> None:
    """Run a program of the lab with its arguments, until it or its parent ends; print an operator's error.

    Prints, for example by a strategy file, go to standard error, because standard output carries only the
    round numbers of `tell_round`.
    """
    end_with_parent()
    try:
        with redirect_stdout(sys.stderr):
            main(*sys.argv[1:])
    except OperatorError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
