"""Messages between the trainer and its workers: length-prefixed msgpack over a socket pair, one type each.

A worker is a process of ours with a copy of the model: a generator answers questions, a further trainer
computes a share of each update. End of file means that the other end is gone: a worker without its trainer
ends at once, and has nothing that could be lost.
"""

import contextlib
import socket
import struct
import threading

import msgspec

from swarmd.policy.training.packing import Row
from swarmd.types import Generation

_HEADER = struct.Struct(">I")


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# Trainer to worker.


class Begin(_Message, frozen=True):
    """The first message: everything a worker needs to know."""

    config: str  # NodeConfig as JSON
    seed: int  # seed of what it samples
    folder: str  # the folder in which weights are published
    sharing: int  # processes of this run on its device, with itself


class NewQuestions(_Message, frozen=True):
    """Questions to be answered when there is time for them."""

    questions: list[tuple[int, str]]  # id, text


class Rest(_Message, frozen=True):
    """Stop between two tokens, or go on."""

    resting: bool


class Join(_Message, frozen=True):
    """Take the weights and optimizer of this folder, and meet the other trainers."""

    state: str  # folder of a saved policy
    # A file for the process group to meet in; each meeting has its own.
    meeting: str
    rank: int
    size: int


class UpdateShare(_Message, frozen=True):
    """One step of all trainers, and this worker's share of it."""

    rows: list[Row]
    check: bool  # whether to return a digest of the weights


# Worker to trainer.


class WorkerReady(_Message, frozen=True):
    """The model is loaded."""


class FinishedAnswers(_Message, frozen=True):
    answers: list[tuple[int, Generation]]  # id and generation; the tokens tell their versions


class Stepped(_Message, frozen=True):
    updates: int  # updates behind its weights now
    digest: int | None  # digest of the weights, where it was asked for


class Fatal(_Message, frozen=True):
    """The worker cannot go on, and starting it again would not help."""

    message: str
    exit_code: int


Message = Begin | NewQuestions | Rest | Join | UpdateShare | WorkerReady | FinishedAnswers | Stepped | Fatal

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Channel:
    """One end of the pair: whole messages, sent by any thread, received by one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._incoming, self._sending = sock, sock.makefile("rb"), threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message. Where the other end is closed, `receive` tells."""
        payload = msgspec.msgpack.encode(message)
        with contextlib.suppress(OSError), self._sending:
            self._socket.sendall(_HEADER.pack(len(payload)) + payload)

    def receive(self) -> Message | None:
        """Receive the next message; return None at the end of the stream, whoever ended it."""
        try:
            (length,) = _HEADER.unpack(self._incoming.read(_HEADER.size))
            payload = self._incoming.read(length)
        except (OSError, ValueError, struct.error):
            # It was torn down, closed here, or ended within a header.
            return None
        return _decoder.decode(payload) if len(payload) == length else None

    def close(self) -> None:
        """Close the channel and wake a pending `receive`, here and at the other end."""
        with contextlib.suppress(OSError):
            # The other end is gone already.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._incoming.close()
        self._socket.close()
