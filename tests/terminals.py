"""Terminals of 80 columns that a test reads: a program's output as a person sees it."""

import contextlib
import fcntl
import os
import pty
import struct
import termios


def terminal() -> tuple[int, int]:
    """Return our end of a terminal, and the one that is given to a program."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    return ours, theirs


def rest_of(ours: int) -> str:
    """Read until nobody has the other end open, and close our end."""
    said = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while some := os.read(ours, 65536):
            said += some
    os.close(ours)
    return said.decode(errors="replace")
