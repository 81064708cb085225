"""Frames and messages between the client, the verifier and its worker, over pipes.

This module does not load ReasoningGYM or a plug-in. A frame is its length in four bytes (big-endian) and
that many bytes of MessagePack. Deadlines are times of `time.monotonic`.
"""

import os
import select
import time
from typing import Annotated

import msgspec

from swarmd.tasks.answers import ScoredAnswer

# A full request (client.MAX_ANSWERS of MAX_OWN_ANSWER_CHARACTERS, or MAX_LONG_ANSWERS) fits into this.
MAX_FRAME_BYTES = 4 * 2**20
# Default limit of an answer to an own task.
MAX_OWN_ANSWER_CHARACTERS = 1000
# Limit of an answer if the whole text is the answer.
MAX_WHOLE_CHARACTERS = 16_384
MAX_OWN_QUESTION_CHARACTERS = 16_384
MAX_FAULT_CHARACTERS = 300
MAX_TURNS = 64
# On a busy machine, an answer may take this many times its CPU limit in wall-clock time.
STARVED_FACTOR = 5.0
_CHUNK_BYTES = 65_536


class TaskLimits(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Limits of a task plug-in: the keys of its `limits`, with defaults and bounds (docs/own-tasks.md)."""

    # CPU seconds for a question, and for an answer.
    seconds: Annotated[float, msgspec.Meta(gt=0, le=10)] = 1.0
    # Bytes in addition to the memory that the process uses when the plug-in is loaded.
    memory: Annotated[int, msgspec.Meta(ge=2**24, le=2**36)] = 256 * 2**20
    longest_question: Annotated[int, msgspec.Meta(ge=1, le=MAX_OWN_QUESTION_CHARACTERS)] = 8192  # characters
    longest_answer: Annotated[int, msgspec.Meta(ge=1, le=MAX_WHOLE_CHARACTERS)] = 256  # characters
    whole: bool = False  # whether the whole text is the answer, instead of the part in <answer>…</answer>
    # Maximum number of the model's texts in an environment's episode.
    turns: Annotated[int, msgspec.Meta(ge=2, le=MAX_TURNS)] = 8


class PluginDescription(msgspec.Struct, frozen=True):
    """A loaded plug-in's description of itself."""

    name: str
    version: str
    specialties: tuple[str, ...]
    limits: TaskLimits
    digest: str  # digest of its source
    notes: tuple[str, ...] = ()  # sentences about input that was left out
    environment: bool = False  # whether a task has several turns
    examples: tuple[tuple[str, str], ...] = ()  # turns that `model.examples` shows before a question


class ScoreItem(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A task reference, and answers to the task, each with its texts by turn. They passed `Curriculum.read`.

    The verifier never receives questions, observations or ground truth.
    """

    specialty: str
    n: int
    answers: tuple[tuple[str, ...], ...]


class VerifierRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    curriculum: str
    items: tuple[ScoreItem, ...]
    question: bool = False  # ask for the question of the single item instead of scores


class VerifierReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """First message of a verifier or a worker: it is ready."""

    seccomp: bool  # whether the kernel contains the process
    plugin: PluginDescription | None = None


class Judgements(msgspec.Struct, tag="judged", array_like=True, frozen=True):
    """Reply to a request: per item, in order, one score per answer, and the plug-in's fault if any."""

    scores: tuple[tuple[ScoredAnswer, ...], ...]
    faults: tuple[str, ...] = ()  # one per item, "" for none; () if there are none at all


class Made(msgspec.Struct, tag="made", array_like=True, frozen=True):
    """Reply to a request for a question.

    `question` is None if the reference names no task or the plug-in failed; `fault` describes the failure.
    """

    question: str | None
    fault: str = ""
    answer: tuple[str, ...] | None = None  # the texts of a right answer by turn, if the plug-in gives one


class VerifierRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """Reply to an invalid request, or the reason why a worker or a plug-in could not start."""

    why: str


Reply = VerifierReady | Judgements | Made | VerifierRefused


def send(fd: int, message: msgspec.Struct, deadline: float | None = None) -> None:
    """Write one frame.

    With a deadline, `fd` must be non-blocking. Raises TimeoutError after the deadline, and BrokenPipeError if
    the other end is closed.
    """
    body = msgspec.msgpack.encode(message)
    view = memoryview(len(body).to_bytes(4, "big") + body)
    while view:
        if deadline is not None:
            await_event(fd, select.POLLOUT, deadline)
        try:
            view = view[os.write(fd, view[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            # The pipe has less room than a chunk; wait for more.
            continue


def receive(fd: int, deadline: float | None = None) -> bytes:
    """Read one frame's body.

    Raises EOFError at the end of the stream, TimeoutError after the deadline, and ValueError for a frame over
    the limit. After a ValueError the stream cannot be read further.
    """
    size = int.from_bytes(_read(fd, 4, deadline), "big")
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"frame too large: {size:,} bytes (limit {MAX_FRAME_BYTES:,})")
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
