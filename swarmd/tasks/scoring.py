"""Scores completions: the client of the contained verifier process. Loads neither torch nor ReasoningGYM.

    with Verifier("tiny-9") as verifier:
        rewards = verifier.score([(TaskRef("binary_matrix", 7), completions)])
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self, TypeVar

import msgspec

from swarmd.errors import SwarmdError
from swarmd.tasks import pipe
from swarmd.tasks.answers import GradeReason, read
from swarmd.tasks.curriculum import Curriculum, curriculum
from swarmd.tasks.pipe import Judgements, Request, ScoreItem, VerifierReady, VerifierRefused
from swarmd.types import Completion, TaskRef

__all__ = ["Completion", "GradeReason", "TaskRef", "Verifier", "VerifierFailed"]

COMMAND = (sys.executable, "-m", "swarmd.tasks.verifier")
ATTEMPTS = 3
MOST_ANSWERS = 1024  # in one request
START_SECONDS = 60.0  # ReasoningGYM takes two to load on an idle machine
ITEM_SECONDS = 2.0  # the verifier's own limits keep an item below one


_Reply = TypeVar("_Reply", VerifierReady, Judgements)


class VerifierFailed(SwarmdError):
    """The process that scores answers does not keep running."""


class _Failed(Exception):
    """One attempt failed. The next starts a new process."""


class _Pending(NamedTuple):
    item: int  # position among the items
    completion: int  # position among the item's completions
    ref: TaskRef
    answer: str


class Verifier:
    """Scores completions in a contained process. Starts it when first needed, and again if it dies or hangs. Thread-safe.

    The last <answer>…</answer> of a completion counts, even if the completion was cut after it (`ended` False). Lengths and characters are
    checked here (answers.py); only references and short answers reach the process.
    """

    def __init__(self, of: Curriculum | str, command: Sequence[str] = COMMAND) -> None:
        self._curriculum = curriculum(of if isinstance(of, str) else of.name)
        self._command = command
        self._child: _Child | None = None
        self._lock = threading.Lock()
        self.restarts = 0  # processes that had to be replaced

    def __enter__(self) -> Self:
        """Start the process, without waiting for it."""
        with self._lock, contextlib.suppress(_Failed):  # the first call to `judge` tries again, and reports
            self._child = self._child or _Child(self._command)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process. A later call starts another."""
        with self._lock:
            if self._child:
                self._child.end()
            self._child = None

    @property
    def pid(self) -> int | None:
        """Process id of the verifier; None before the first use and after `close`."""
        child = self._child
        return child.pid if child else None

    @property
    def seccomp(self) -> bool | None:
        """True if the kernel contains the process (Linux); False: only resource limits and the audit hook. None before the first use."""
        child = self._child
        return child.seccomp if child else None

    def judge(self, items: Sequence[tuple[TaskRef, Sequence[Completion]]]) -> Sequence[tuple[GradeReason, ...]]:
        """The grade of every completion, in order. Raises VerifierFailed if no process runs; never because of a completion."""
        reasons: list[list[GradeReason]] = []
        pending: list[_Pending] = []
        for i, (ref, completions) in enumerate(items):
            known = self._curriculum.names(ref.specialty, ref.n)
            reasons.append([])
            for j, completion in enumerate(completions):
                answer = read(ref.specialty, completion.text) if known else GradeReason.NO_TASK
                reasons[i].append(answer if isinstance(answer, GradeReason) else GradeReason.CRASHED)
                if isinstance(answer, str):
                    pending.append(_Pending(i, j, ref, answer))
        for i, j, reason in self._mark(pending):
            reasons[i][j] = reason
        return [tuple(row) for row in reasons]

    def score(self, items: Sequence[tuple[TaskRef, Sequence[Completion]]]) -> Sequence[tuple[float, ...]]:
        """One tuple of rewards (0.0 or 1.0) per item, in order (`swarmd.protocols.Reward`)."""
        return [tuple(reason.reward for reason in row) for row in self.judge(items)]

    __call__ = score

    def _mark(self, pending: Sequence[_Pending]) -> Iterator[tuple[int, int, GradeReason]]:
        for start in range(0, len(pending), MOST_ANSWERS):
            part = pending[start : start + MOST_ANSWERS]
            items = []
            for _, group in groupby(part, key=lambda p: p.item):
                same = list(group)
                items.append(ScoreItem(same[0].ref.specialty, same[0].ref.n, tuple(p.answer for p in same)))
            reasons = self._ask(Request(self._curriculum.name, tuple(items)))
            yield from ((p.item, p.completion, reason) for p, reason in zip(part, reasons, strict=True))

    def _ask(self, request: Request) -> list[GradeReason]:
        cause = ""
        with self._lock:
            for _ in range(ATTEMPTS):
                try:
                    self._child = self._child or _Child(self._command)
                    return self._child.ask(request)
                except _Failed as failure:
                    cause = str(failure)
                    self.restarts += 1
                    if self._child:
                        self._child.end()
                    self._child = None
        raise VerifierFailed(
            f"the process that scores answers failed {ATTEMPTS} times in a row: {cause}. Free some memory if that is short; "
            f"otherwise install swarmd again, and see what `{' '.join(self._command)} < {os.devnull}` says (nothing, if all is well)."
        )


class _Child:
    """One verifier process and its pipes."""

    def __init__(self, command: Sequence[str]) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, cwd="/", env=_environment(), bufsize=0
            )
        except OSError as error:
            self._stderr.close()
            raise _Failed(f"{command[0]} cannot be started ({error})") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._start_by = time.monotonic() + START_SECONDS
        self.pid = self._process.pid
        self.seccomp: bool | None = None

    def ask(self, request: Request) -> list[GradeReason]:
        """Reasons of all answers of a request, in order. Raises _Failed."""
        answers = sum(len(item.answers) for item in request.items)
        try:
            if self.seccomp is None:
                self.seccomp = self._receive(VerifierReady, self._start_by).seccomp
            deadline = time.monotonic() + ITEM_SECONDS * (1 + len(request.items))
            pipe.send(self._stdin.fileno(), request, deadline)
            reasons = [reason for row in self._receive(Judgements, deadline).reasons for reason in row]
        except TimeoutError:
            raise _Failed("it did not answer in time") from None
        except (OSError, EOFError):
            raise _Failed(f"it ended ({self._last_words()})") from None
        except ValueError as error:  # msgspec: not a message of a verifier
            raise _Failed(f"it sent something else than an answer ({error})") from None
        if len(reasons) != answers:
            raise _Failed(f"it sent {len(reasons)} answers to {answers} questions")
        return reasons

    def _receive(self, kind: type[_Reply], deadline: float) -> _Reply:
        reply = msgspec.msgpack.decode(pipe.receive(self._stdout.fileno(), deadline), type=pipe.Reply)
        if not isinstance(reply, kind):
            raise _Failed(f"it refused the request ({reply.why})" if isinstance(reply, VerifierRefused) else "it answered out of turn")
        return reply

    def end(self) -> None:
        """Kill the process: it may hang."""
        self._process.kill()
        self._process.wait()
        for stream in (self._stdin, self._stdout, self._stderr):
            stream.close()

    def _last_words(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "but is still there"
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"exit code {code}" + (f": {words[-1][:300]}" if words else "")


def _environment() -> dict[str, str]:
    """An empty environment but for the path of this code. One BLAS thread: the verifier forks."""
    here = str(Path(__file__).parents[2])
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([here, *(p for p in sys.path if Path(p).is_absolute())])),
        "PYTHONHASHSEED": "0",
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        "PYTHONWARNINGS": "ignore",
        "LC_ALL": "C",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
