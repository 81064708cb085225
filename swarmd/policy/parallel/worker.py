"""A worker process: the trainer's handle (start, messages, end), and the main loop inside the process.

Inside, a thread reads the trainer's messages, and the process exits when the trainer has ended.
"""

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

from swarmd.errors import SwarmdError
from swarmd.policy.parallel.messages import Begin, Channel, Fatal, Message, NewQuestions, Rest
from swarmd.state.logs import set_up_logging
from swarmd.system.exits import EXIT_TIMEOUT_S, exit_words


class WorkerProcess:
    """Runs `python -m MODULE FD`.

    The process exits when the socket to this process closes, so it never outlives this process.
    """

    def __init__(self, module: str, begin: Begin, environment: Mapping[str, str]) -> None:
        """Start a worker process.

        environment: variables in addition to this process' environment.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P: do not import files of the working folder
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **environment},
            )
        self._channel = Channel(ours)
        # `receive` returns None after the process has ended.
        self.send, self.receive = self._channel.send, self._channel.receive
        self.pid, self.kill = self._process.pid, self._process.kill
        self.send(begin)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self, seconds: float = EXIT_TIMEOUT_S) -> str:
        """Close the connection, which makes the process exit, and kill it if it does not.

        Returns a description of how the process ended.
        """
        self._channel.close()
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        return exit_words(status)


log = logging.getLogger(__name__)


class WorkerLink:
    """The worker's end of the connection. `messages` queues all but Rest, which takes effect at once."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # Errors of `send` are ignored: if the trainer has ended, `_hear` notices it and exits.
        self.send = channel.send
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._may_work = threading.Event()
        self._may_work.set()
        self._left: list[tuple[int, str]] = []  # received questions that were not returned yet
        threading.Thread(target=self._hear, name="trainer", daemon=True).start()

    def rest(self) -> None:
        """Block while the trainer wants this worker to rest."""
        self._may_work.wait()

    def questions(self, most: int) -> list[tuple[int, str]]:
        """Wait for at least one question; return at most `most` of the questions that have arrived."""
        found, self._left = self._left, []
        while not found or (len(found) < most and not self.messages.empty()):
            message = self.messages.get()
            assert isinstance(message, NewQuestions)
            found += message.questions
        self._left = found[most:]
        return found[:most]

    def _hear(self) -> None:
        while (message := self._channel.receive()) is not None:
            match message:
                case Rest(resting):
                    (self._may_work.clear if resting else self._may_work.set)()
                case _:
                    self.messages.put(message)
        # The trainer has ended or closed the connection; nobody needs the unfinished work.
        os._exit(0)


def run(work: Callable[[Begin, WorkerLink], None]) -> None:
    """Run `work` as a worker process, with logging and a link to the trainer, to which errors are sent."""
    # The worker shares the trainer's standard error, which goes to trainer.log.
    set_up_logging(None, stderr=True)
    inside = WorkerLink(Channel(socket.socket(fileno=int(sys.argv[1]))))
    begin = inside.messages.get()
    assert isinstance(begin, Begin)
    try:
        work(begin, inside)
    except SwarmdError as error:
        inside.send(Fatal(str(error), error.exit_code))
        sys.exit(error.exit_code)
