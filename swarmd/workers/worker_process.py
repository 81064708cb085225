"""One worker process as the trainer sees it: start, messages, end."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from swarmd.workers.messages import Begin, Channel, Message
from swarmd.workers.restarts import LINGERS, exit_words


class WorkerProcess:
    """Runs `python -m MODULE FD`.

    It ends when its end of the pair says that we are gone, however we ended.
    """

    def __init__(self, module: str, begin: Begin, environment: Mapping[str, str]) -> None:
        """Start a worker process.

        environment: variables added to our own.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P: no file of the working folder is imported
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **environment},
            )
        self._channel = Channel(ours)
        self.pid = self._process.pid
        self._channel.send(begin)

    def send(self, message: Message) -> bool:
        """Send a message; return False if the worker has ended."""
        return self._channel.send(message)

    def receive(self) -> Message | None:
        """Receive the worker's next message; return None once it has ended."""
        return self._channel.receive()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def end(self, seconds: float = LINGERS) -> str:
        """Close its connection, on which it exits, and kill it if it does not.

        Returns how it ended, in words.
        """
        self._channel.close()
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        return exit_words(status)
