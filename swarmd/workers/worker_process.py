"""One worker process, as the trainer sees it: started, spoken to, and ended."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from swarmd.workers.messages import Begin, Channel, Message

HOPELESS = 5  # deaths in a row without any work done between them
LONGEST_BACKOFF = 30.0  # seconds


def backoff(deaths: int) -> float:
    """Seconds before the next start. After a first death at once: a killed process says nothing about the next."""
    return 0.0 if deaths <= 1 else min(LONGEST_BACKOFF, 2.0 ** (deaths - 2))


class Child:
    """Runs `python -m MODULE FD`. It ends when its end of the pair says that we are gone, however we ended."""

    def __init__(self, module: str, begin: Begin, environment: Mapping[str, str]) -> None:
        """environment: beside our own."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **environment},
            )
        self._channel = Channel(ours)
        self.pid = self._process.pid
        self._channel.send(begin)

    def send(self, message: Message) -> bool:
        """False where it has ended."""
        return self._channel.send(message)

    def receive(self) -> Message | None:
        """Its next message; None once it has ended."""
        return self._channel.receive()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def end(self, seconds: float = 5.0) -> str:
        """Let it go, or else kill it; how it ended, in words."""
        self._channel.close()
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        if status < 0:
            return f"killed by signal {-status}" + (" (out of memory, perhaps)" if status == -9 else "")
        return f"exit {status}"
