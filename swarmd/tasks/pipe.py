"""Frames and messages between the client, the verifier and its worker, over pipes. Loads no ReasoningGYM.

A frame is four bytes of length (big-endian) and that many bytes of MessagePack. Deadlines are by `time.monotonic`.
"""

import os
import select
import time

import msgspec

from swarmd.tasks.answers import GradeReason

LONGEST_FRAME = 4 * 2**20  # bytes; a full request (scoring.MOST_ANSWERS answers of 256 characters) is below 1 MiB
_CHUNK = 65_536


class ScoreItem(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A task reference and answers to it, checked by `answers.read`. Questions and ground truth are never received."""

    specialty: str
    n: int
    answers: tuple[str, ...]


class Request(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    curriculum: str
    items: tuple[ScoreItem, ...]


class VerifierReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """First message of a verifier, and of a worker: it is ready."""

    seccomp: bool  # it is contained by the kernel


class Judgements(msgspec.Struct, tag="judged", array_like=True, frozen=True):
    """Reply to a request: for each item, in order, one reason per answer."""

    reasons: tuple[tuple[GradeReason, ...], ...]


class VerifierRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """Reply to an invalid request; or why a worker could not start."""

    why: str


Reply = VerifierReady | Judgements | VerifierRefused


class FrameTooLong(ValueError):
    """A frame over the limit. It was read and dropped, so the next one can be received."""


def send(fd: int, message: msgspec.Struct, deadline: float | None = None) -> None:
    """Write one frame. With a deadline, `fd` must be non-blocking; raises TimeoutError after it. BrokenPipeError where nobody reads."""
    body = msgspec.msgpack.encode(message)
    view = memoryview(len(body).to_bytes(4, "big") + body)
    while view:
        if deadline is not None:
            await_event(fd, select.POLLOUT, deadline)
        try:
            view = view[os.write(fd, view[:_CHUNK]) :]
        except BlockingIOError:  # less room than a chunk; wait for more
            continue


def receive(fd: int, deadline: float | None = None) -> bytes:
    """Read one frame's body. Raises EOFError at the end of the stream, TimeoutError after the deadline, FrameTooLong."""
    size = int.from_bytes(_read(fd, 4, deadline), "big")
    if size <= LONGEST_FRAME:
        return _read(fd, size, deadline)
    left = size
    while left:
        left -= len(_read(fd, min(left, _CHUNK), deadline))
    raise FrameTooLong(f"a frame of {size} bytes is over the limit of {LONGEST_FRAME}")


def await_event(fd: int, event: int, deadline: float) -> None:
    """Return once `fd` is ready (or closed at the other end). Raises TimeoutError after the deadline."""
    poll = select.poll()
    poll.register(fd, event)
    while not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        if time.monotonic() >= deadline:
            raise TimeoutError


def _read(fd: int, size: int, deadline: float | None) -> bytes:
    body = bytearray()
    while len(body) < size:
        if deadline is not None:
            await_event(fd, select.POLLIN, deadline)
        piece = os.read(fd, min(size - len(body), _CHUNK))
        if not piece:
            raise EOFError
        body += piece
    return bytes(body)
