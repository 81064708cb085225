"""A process that contains itself, then tries forbidden actions, and prints `<attempt>: <result>` for each.

test_containment.py runs it as a command.

With the argument `kernel`, it calls C functions directly, without Python's audit hook, so that only the
kernel can refuse them. With the argument `hook`, it acts through Python.
"""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from swarmd.tasks.sandbox import containment, seccomp

PATH = sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)
C = {
    name: getattr(libc, name)
    for name in ("open", "socket", "fork", "execv", "kill", "mmap", "mkdir", "setrlimit", "ptrace", "dup2")
}
C["mmap"].restype = ctypes.c_long
ARGV = (ctypes.c_char_p * 2)(b"/bin/true", None)
READ_EXECUTE, PRIVATE_ANONYMOUS = 5, 0x22


def by_kernel() -> dict[str, Callable[[], int]]:
    return {
        "open to read": lambda: C["open"](b"/etc/passwd", os.O_RDONLY),
        "open to write": lambda: C["open"](PATH.encode(), os.O_CREAT | os.O_WRONLY, 0o600),
        "mkdir": lambda: C["mkdir"](PATH.encode(), 0o700),
        "socket": lambda: C["socket"](socket.AF_INET, socket.SOCK_STREAM, 0),
        "unix socket": lambda: C["socket"](socket.AF_UNIX, socket.SOCK_STREAM, 0),
        "fork": lambda: C["fork"](),
        "exec": lambda: C["execv"](b"/bin/true", ARGV),
        "signal the parent": lambda: C["kill"](os.getppid(), 0),
        "executable memory": lambda: C["mmap"](None, 4096, READ_EXECUTE, PRIVATE_ANONYMOUS, -1, 0),
        "raise a limit": lambda: C["setrlimit"](7, None),
        "trace": lambda: C["ptrace"](0, 0, None, None),
        "duplicate a pipe": lambda: C["dup2"](1, 9),
    }


def by_python() -> dict[str, Callable[[], object]]:
    return {
        "open": lambda: Path("/etc/passwd").read_text(),
        "mkdir": lambda: Path(PATH).mkdir(),
        "listdir": lambda: list(Path("/").iterdir()),
        "socket": lambda: socket.socket(),
        "system": lambda: os.system(f"touch {PATH}"),
        "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "kill": lambda: os.kill(os.getppid(), 0),
        "import": lambda: __import__("ftplib"),
        "ctypes": lambda: ctypes.CDLL("libm.so.6"),
        "alarm": lambda: signal.pthread_kill(0, 0),
        "evaluate": lambda: eval("1 + 1"),
    }


def say(attempt: str, outcome: str) -> None:
    os.write(1, f"{attempt}: {outcome}\n".encode())


if __name__ == "__main__":
    if sys.argv[1] == "kernel":
        containment._refuse = lambda event, arguments: None
        attempts = by_kernel()
        say("contained", str(containment.contain()))
        for name, attempt in attempts.items():
            result = attempt()
            say(name, f"refused {ctypes.get_errno()}" if result == -1 else f"ALLOWED {result}")
    else:
        seccomp.install = lambda: False
        tries = by_python()
        say("contained", str(containment.contain()))
        for name, action in tries.items():
            try:
                with containment.marking():
                    say(name, f"ALLOWED {action()!r}")
            except PermissionError:
                say(name, "refused")
    try:
        say("memory", f"ALLOWED {len(bytearray(1 << 30))}")
    except MemoryError:
        say("memory", "refused")
    os._exit(0)
