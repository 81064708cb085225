"""Sandbox for the process that scores answers of other peers. The process itself cannot undo it.

There are three layers, because no layer exists everywhere. The seccomp filter (Linux) is the boundary: the
kernel refuses files, sockets, processes and signals. Resource limits work on every Unix. The audit hook is a
second line of defence; macOS has only the hook and the limits.
"""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from swarmd.tasks.sandbox import seccomp

# Address space in bytes, in addition to what the process already uses.
MEMORY_BYTES = 256 * 2**20
# CPU seconds in the life of a worker. Workers are replaced long before they reach this limit.
CPU_S = 60

# From Python's table of audit events: docs.python.org/3/library/audit_events.html.
_REFUSED = (
    "open",
    "import",
    "os.",
    "posix.",
    "socket.",
    "subprocess.",
    "shutil.",
    "ctypes.",
    "fcntl.",
    "mmap.",
    "pty.",
    "resource.",
    "signal.",
    "syslog.",
    "tempfile.",
    "glob.",
    "pathlib.",
    "urllib.",
    "http.",
    "ftplib.",
    "smtplib.",
    "sqlite3.",
    "pickle.",
    "marshal.",
    "code.__new__",
    "function.__new__",
    "builtins.input",
    "cpython.run",
    "webbrowser.",
    "_thread.start",
    "sys.settrace",
    "sys.setprofile",
    "sys.addaudithook",
)
# ReasoningGYM's generators evaluate arithmetic that they wrote themselves. Its scorers must evaluate nothing.
_REFUSED_WHILE_MARKING = ("compile", "exec")

_marking = False


def contain(memory: int = MEMORY_BYTES, cpu: int = CPU_S) -> bool:
    """Give up files, sockets, processes, executable memory and most memory.

    The process must open and import everything that it needs before this call.

    Args:
        memory: bytes in addition to the memory that the process already uses.
        cpu: CPU seconds in the life of the process.

    Returns:
        whether the kernel enforces the containment (seccomp).

    Raises:
        OSError: if a limit cannot be set on Linux.
    """
    limit_resources(memory, cpu)
    held = seccomp.install()
    # The hook comes last, since it would refuse to install the filter.
    sys.addaudithook(_refuse)
    return held


def close_files_except(*kept: int) -> None:
    """Close all file descriptors above 2, except these."""
    for before, after in pairwise((2, *sorted(kept), 1024)):
        os.closerange(before + 1, after)


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Also refuse `compile`, `eval` and `exec`, until the block ends."""
    global _marking
    _marking = True
    try:
        yield
    finally:
        _marking = False


def _refuse(event: str, arguments: tuple[object, ...]) -> None:  # noqa: ARG001
    if event.startswith(_REFUSED) or (_marking and event in _REFUSED_WHILE_MARKING):
        raise PermissionError(f"refused in the verifier: {event}")


def limit_resources(memory: int = MEMORY_BYTES, cpu: int = CPU_S) -> None:
    """Forbid files, processes and core dumps, and limit memory and CPU time."""
    set_limits(
        {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_NOFILE: 8,
            resource.RLIMIT_NPROC: 0,
            resource.RLIMIT_CPU: cpu,
            resource.RLIMIT_AS: address_space() + memory,
        }
    )


def set_limits(limits: Mapping[int, int]) -> None:
    """Set these resource limits, but never above the present hard limits.

    Raises OSError or ValueError on Linux if a limit cannot be set.
    """
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(limit, (value, value))
        except (OSError, ValueError):
            # macOS refuses some of them (RLIMIT_AS).
            if sys.platform == "linux":
                raise


def address_space() -> int:
    """Return this process' virtual memory in bytes; 1 GiB if the system does not say."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 2**30
