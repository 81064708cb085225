"""Frames and messages between the client, the verifier and its worker, over pipes.

It loads no ReasoningGYM and no plug-in. A frame is four bytes of length (big-endian) and that many bytes of
MessagePack. Deadlines are by `time.monotonic`.
"""

import os
import select
import time
from typing import Annotated

import msgspec

from swarmd.tasks.answers import ScoredAnswer

# A full request (client.MAX_ANSWERS of MAX_OWN_ANSWER_CHARACTERS, or MAX_LONG_ANSWERS) is below that.
MAX_FRAME_BYTES = 4 * 2**20
# For tasks that are not swarmd's own.
MAX_OWN_ANSWER_CHARACTERS = 1000
# Where the whole text is the answer.
MAX_WHOLE_CHARACTERS = 16_384
MAX_OWN_QUESTION_CHARACTERS = 16_384
MAX_FAULT_CHARACTERS = 300
# An answer may take so many times its CPU time, where others keep the processor busy.
STARVED_FACTOR = 5.0
_CHUNK_BYTES = 65_536


class TaskLimits(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Limits of a task plug-in: the keys of its `limits`, with defaults and bounds (docs/own-tasks.md)."""

    # CPU time for a question, and for an answer.
    seconds: Annotated[float, msgspec.Meta(gt=0, le=10)] = 1.0
    # Bytes of memory beyond what the process has when the plug-in is loaded.
    memory: Annotated[int, msgspec.Meta(ge=2**24, le=2**36)] = 256 * 2**20
    longest_question: Annotated[int, msgspec.Meta(ge=1, le=MAX_OWN_QUESTION_CHARACTERS)] = 8192  # characters
    longest_answer: Annotated[int, msgspec.Meta(ge=1, le=MAX_WHOLE_CHARACTERS)] = 256  # characters
    whole: bool = False  # the answer is the whole text, and not what is in <answer>…</answer>


class PluginDescription(msgspec.Struct, frozen=True):
    """A loaded plug-in's description of itself."""

    name: str
    version: str
    specialties: tuple[str, ...]
    limits: TaskLimits
    digest: str  # digest of its source
    notes: tuple[str, ...] = ()  # sentences about input that was left out


class ScoreItem(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A task reference and answers to it, checked by `answers.read`.

    Questions and ground truth are never received.
    """

    specialty: str
    n: int
    answers: tuple[str, ...]


class VerifierRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    curriculum: str
    items: tuple[ScoreItem, ...]
    question: bool = False  # ask for the question of the one item, instead of scoring answers


class VerifierReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """First message of a verifier, and of a worker: it is ready."""

    seccomp: bool  # whether the kernel contains the process
    plugin: PluginDescription | None = None


class Judgements(msgspec.Struct, tag="judged", array_like=True, frozen=True):
    """Reply to a request: for each item, in order, one score per answer, and what its plug-in did wrong."""

    scores: tuple[tuple[ScoredAnswer, ...], ...]
    faults: tuple[str, ...] = ()  # one per item, "" for none; (): none at all


class Made(msgspec.Struct, tag="made", array_like=True, frozen=True):
    """Reply to a request for a question.

    None: the reference names no task, or there is a fault, which says what the plug-in did wrong.
    """

    question: str | None
    fault: str = ""
    answer: str | None = None  # a right answer, if the plug-in tells one


class VerifierRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """Reply to an invalid request; or why a worker or a plug-in could not start."""

    why: str


Reply = VerifierReady | Judgements | Made | VerifierRefused


def send(fd: int, message: msgspec.Struct, deadline: float | None = None) -> None:
    """Write one frame.

    With a deadline, `fd` must be non-blocking; raises TimeoutError after it. Raises BrokenPipeError where
    nobody reads.
    """
    body = msgspec.msgpack.encode(message)
    view = memoryview(len(body).to_bytes(4, "big") + body)
    while view:
        if deadline is not None:
            await_event(fd, select.POLLOUT, deadline)
        try:
            view = view[os.write(fd, view[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            # There is less room than a chunk; wait for more.
            continue


def receive(fd: int, deadline: float | None = None) -> bytes:
    """Read one frame's body.

    Raises EOFError at the end of the stream, TimeoutError after the deadline, ValueError for a frame over the
    limit: nothing that follows it can be read.
    """
    size = int.from_bytes(_read(fd, 4, deadline), "big")
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _read(fd, size, deadline)


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
        if not (piece := os.read(fd, min(size - len(body), _CHUNK_BYTES))):
            raise EOFError
        body += piece
    return bytes(body)
