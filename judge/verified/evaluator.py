"""Run the process that evaluates weights (worker.py) with a time limit, and check its bounded reply."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from judge.errors import JudgeError
from judge.verified.messages import (
    AnswerRequest,
    DescribeRequest,
    GivenAnswers,
    ModelDescriptions,
    ModelTensors,
    Reply,
    WorkerRefusal,
)
from swarmd.types import Completion

COMMAND = (sys.executable, "-P", "-W", "ignore", "-m", "judge.verified.worker")
# Seconds for the start, including downloads; importing torch takes three on an idle machine.
START_S = 300.0
MAX_REPLY_BYTES = 32 * 2**20
_PIECE_BYTES = 65_536


class EvaluationFailed(Exception):
    """An evaluation failed; the text says why."""


class Evaluator:
    def __init__(self, seconds: float, command: Sequence[str] = COMMAND) -> None:
        """Set up the evaluator.

        seconds: wall-clock limit of an evaluation. command: the worker's; the judge's process id and the
        weights' file descriptor are appended.
        """
        self._seconds, self._command = seconds, tuple(command)

    async def describe(self, models: Sequence[str]) -> dict[str, ModelTensors]:
        """Return names and shapes of the models' tensors. Raises JudgeError.

        The operator chose the models; missing ones are downloaded.
        """
        request = msgspec.json.encode(DescribeRequest(tuple(models)))
        try:
            received, _ = await self._asked(request, START_S)
            reply = msgspec.json.decode(received, type=Reply)
        except (TimeoutError, EvaluationFailed, msgspec.MsgspecError) as error:
            raise JudgeError(
                "the process that evaluates weights ended, or was still downloading its models after"
                f" {START_S:g} s ({type(error).__name__}). Start the judge again, which resumes the"
                " download, or leave out --verified-bytes."
            ) from None
        if isinstance(reply, WorkerRefusal):
            raise JudgeError(f"{reply.error} Name other models with --verified-model.")
        if not isinstance(reply, ModelDescriptions) or not reply.contained:
            raise JudgeError(
                "this system cannot sandbox the evaluation of weights: use Linux on x86_64 or aarch64, or"
                " leave --verified-bytes out."
            )
        return reply.models

    async def answers(self, weights: Path, request: AnswerRequest) -> Sequence[Sequence[Completion]]:
        """Return the model's answers to each question.

        Raises EvaluationFailed; OSError if the file cannot be read.
        """
        with weights.open("rb") as file:
            try:
                received, code = await self._asked(
                    msgspec.json.encode(request),
                    self._seconds,
                    file.fileno(),
                    HF_HUB_OFFLINE="1",
                    OMP_NUM_THREADS="1",
                )
            except TimeoutError:
                raise EvaluationFailed(
                    f"the evaluation took longer than {self._seconds:g} s and was ended"
                ) from None
        return _checked(received, code, request)

    async def _asked(
        self, request: bytes, seconds: float, *given: int, **environment: str
    ) -> tuple[bytes, int]:
        """Run a new process for one request, and end it; return its reply and exit code.

        given: file descriptors to pass on. environment: variables to add. Raises TimeoutError,
        EvaluationFailed.
        """
        process = await asyncio.create_subprocess_exec(
            *self._command,
            str(os.getpid()),
            *map(str, given),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=given,
            start_new_session=True,  # so Ctrl-C goes to the judge alone
            env={**os.environ, **environment},
        )
        try:
            async with asyncio.timeout(seconds):
                received = await _exchange(process, request)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await _read_away(process)
            await process.wait()
        return received, process.returncode or 0


async def _exchange(process: asyncio.subprocess.Process, request: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):
        # The process has ended already; its exit code says why.
        process.stdin.write(request)
        await process.stdin.drain()
    process.stdin.close()
    received = bytearray()
    while piece := await process.stdout.read(_PIECE_BYTES):
        received += piece
        if len(received) > MAX_REPLY_BYTES:
            raise EvaluationFailed("the evaluation's reply is too large")
    await process.wait()
    return bytes(received)


async def _read_away(process: asyncio.subprocess.Process) -> None:
    """Drain the output of a killed process.

    asyncio stops reading if too much output waits, and counts the process as ended only at the end of its
    output; without this, `wait` would wait forever.
    """
    assert process.stdout is not None
    while await process.stdout.read(_PIECE_BYTES):
        pass


def _checked(received: bytes, code: int, request: AnswerRequest) -> Sequence[Sequence[Completion]]:
    if not received:
        raise EvaluationFailed(_death(code))
    try:
        reply = msgspec.json.decode(received, type=Reply)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise EvaluationFailed("the evaluation ended in the middle of its reply") from None
    if isinstance(reply, WorkerRefusal):
        raise EvaluationFailed(reply.error)
    if not isinstance(reply, GivenAnswers) or [len(row) for row in reply.answers] != [request.answers] * len(
        request.questions
    ):
        raise EvaluationFailed("the evaluation returned a wrong number of answers")
    return [[Completion(answer.text, answer.ended) for answer in row] for row in reply.answers]


def _death(code: int) -> str:
    return "the process that evaluates weights " + (
        "was killed: it took too much processor time or memory"
        if code in (-signal.SIGKILL, -signal.SIGXCPU)
        else f"ended by itself (code {code})"
    )
