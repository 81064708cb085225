"""Pseudo-terminals with 80 columns; a test reads a program's output from them as a user sees it."""

import contextlib
import fcntl
import os
import pty
import struct
import termios


def terminal() -> tuple[int, int]:
    """Return the test's end of a terminal and the program's end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    return ours, theirs


def rest_of(ours: int) -> str:
    """Read from the test's end until the program's end is closed, and close the test's end."""
    said = b""
    with contextlib.suppress(OSError):  # the program's end is closed
        while some := os.read(ours, 65536):
            said += some
    os.close(ours)
    return said.decode(errors="replace")
