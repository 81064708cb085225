"""A worker process: the trainer's handle (start, messages, end), and the main loop inside the process.

Inside, a thread reads the trainer's messages, and the process exits when the trainer has ended.
"""

import contextlib
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

import msgspec

from swarmd.errors import SwarmdError
from swarmd.policy.parallel.messages import Begin, Fatal, Message, NewQuestions, Rest
from swarmd.state.logs import set_up_logging
from swarmd.system.exits import EXIT_TIMEOUT_S, exit_words

_HEADER = struct.Struct(">I")
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class ProcessLost(Exception):
    """A generator or a trainer ended unexpectedly."""


class Channel:
    """One end of a socket pair. Any thread may send messages; one thread receives them."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._incoming, self._sending = sock, sock.makefile("rb"), threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message. Errors are ignored; if the other end is closed, `receive` returns None."""
        payload = msgspec.msgpack.encode(message)
        with contextlib.suppress(OSError), self._sending:
            self._socket.sendall(_HEADER.pack(len(payload)) + payload)

    def receive(self) -> Message | None:
        """Receive the next message; return None once either end is closed."""
        try:
            (length,) = _HEADER.unpack(self._incoming.read(_HEADER.size))
            payload = self._incoming.read(length)
        except (OSError, ValueError, struct.error):
            # The connection broke, was closed here, or ended within a header.
            return None
        return _decoder.decode(payload) if len(payload) == length else None

    def close(self) -> None:
        """Close the channel and wake a pending `receive`, here and at the other end."""
        with contextlib.suppress(OSError):
            # Raised if the other end has already closed.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._incoming.close()
        self._socket.close()


class WorkerProcess(Channel):
    """Runs `python -m MODULE FD`, and is this process's end of the channel to it.

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
        super().__init__(ours)
        self.pid, self.kill = self._process.pid, self._process.kill
        self.send(begin)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def receive(self) -> Message | None:
        """Return the next message; None after the process has ended.

        Raises SwarmdError if the process reports that it cannot continue, and a restart would not help.
        """
        message = super().receive()
        if isinstance(message, Fatal):
            error = SwarmdError(message.message)
            error.exit_code = message.exit_code
            raise error
        return message

    def end(self, seconds: float = EXIT_TIMEOUT_S) -> str:
        """Close the connection, which makes the process exit, and kill it if it does not.

        Returns a description of how the process ended.
        """
        self.close()
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        return exit_words(status)


class WorkerLink(Channel):
    """The worker's end of the channel. `messages` queues all but Rest, which takes effect at once."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # Not set while the trainer wants this worker to rest.
        self.may_work = threading.Event()
        self.may_work.set()
        self._left: list[tuple[int, str]] = []  # received questions that were not returned yet
        threading.Thread(target=self._hear, name="trainer", daemon=True).start()

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
        while (message := self.receive()) is not None:
            match message:
                case Rest(resting):
                    (self.may_work.clear if resting else self.may_work.set)()
                case _:
                    self.messages.put(message)
        # The trainer has ended or closed the connection; nobody needs the unfinished work.
        os._exit(0)


def run(work: Callable[[Begin, WorkerLink], None]) -> None:
    """Run `work` as a worker process, with logging and a link to the trainer, to which errors are sent."""
    # The worker shares the trainer's standard error, which goes to trainer.log.
    set_up_logging(None, stderr=True)
    inside = WorkerLink(socket.socket(fileno=int(sys.argv[1])))
    begin = inside.messages.get()
    assert isinstance(begin, Begin)
    try:
        work(begin, inside)
    except SwarmdError as error:
        inside.send(Fatal(str(error), error.exit_code))
        sys.exit(error.exit_code)
