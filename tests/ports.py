"""Ports that stay free until their program listens."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_port() -> Iterator[int]:
    """Yield a free port of 127.0.0.1, for a program that takes a port number.

    The port is bound, so the system does not assign it to another program; on Linux, a listener with
    SO_REUSEADDR may still use it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()
        yield port
