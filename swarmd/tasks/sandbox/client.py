"""Client of the contained verifier process, which scores completions and generates plug-ins' questions.

This module does not load torch or ReasoningGYM.

    with Verifier("tiny-9") as verifier:
        rewards = verifier.score([(TaskRef("binary_matrix", 7), completions)])
"""

import contextlib
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import IO, NamedTuple, Self, TypeVar

import msgspec

from swarmd.errors import ConfigError, SwarmdError
from swarmd.tasks.answers import GradeReason, ScoredAnswer
from swarmd.tasks.curriculum import CURRICULA, Curriculum
from swarmd.tasks.sandbox import pipe
from swarmd.tasks.sandbox.pipe import (
    Judgements,
    Made,
    PluginDescription,
    ScoreItem,
    VerifierReady,
    VerifierRefused,
    VerifierRequest,
)
from swarmd.terminal import printable
from swarmd.types import Completion, TaskRef

__all__ = [
    "Completion",
    "GradeReason",
    "Mark",
    "ScoredAnswer",
    "TaskRef",
    "Verifier",
    "VerifierFailed",
    "describe",
]

# Scores the completions of each item, in order, as `Verifier.judge` does.
Mark = Callable[[Sequence[tuple[TaskRef, Sequence[Completion]]]], Sequence[tuple[ScoredAnswer, ...]]]
ATTEMPTS = 3
# Maximum number of answers in one request: usually, and if an answer is longer than
# MAX_OWN_ANSWER_CHARACTERS.
MAX_ANSWERS, MAX_LONG_ANSWERS = 1024, 32
# Maximum number of kinds of a plug-in's faults that are logged.
MAX_FAULT_KINDS = 100
# ReasoningGYM takes two seconds to load on an idle machine.
START_TIMEOUT_S = 60.0
# The timeout for each item, on a busy machine: two of its answers may time out.
ITEM_TIMEOUT_S = 2.0
# Each attempt's timeouts are this many times the last attempt's, in case the machine is slow. No answer can
# exhaust them, as the worker has its own limits.
SLACK_FACTOR = 4.0

log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", VerifierReady, Judgements, Made)


class VerifierFailed(SwarmdError):
    """The process that scores answers keeps failing."""


class _Failed(Exception):
    """One attempt failed. The next attempt starts a new process."""


class _Pending(NamedTuple):
    item: int  # position among the items
    completion: int  # position among the item's completions
    ref: TaskRef
    texts: tuple[str, ...]


class Verifier:
    """Scores completions in a contained process. Thread-safe.

    The process is started at the first use, and restarted if it dies or hangs. The last <answer>…</answer> of
    a completion counts, even if the completion was truncated after it (`ended` False). Lengths and characters
    are checked here (answers.py); only references and short answers reach the process.
    """

    def __init__(self, of: Curriculum | str, command: Sequence[str] | None = None) -> None:
        self._curriculum = CURRICULA[of] if isinstance(of, str) else of
        self._command = command or (sys.executable, "-m", *self._curriculum.command)
        self._child: _Child | None = None
        self._lock = threading.RLock()
        self.restarts = 0  # failed attempts, each of which ended the process
        self.faults: list[str] = []  # distinct faults of the plug-in that were logged

    def __enter__(self) -> Self:
        """Start the process, without waiting for it."""
        with self._lock, contextlib.suppress(_Failed):
            # An error is not reported here: the first call of `judge` tries again and reports it.
            self._child = self._child or _Child(self._command, START_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process. A later call starts a new one."""
        with self._lock:
            if self._child:
                self._child.close()
            self._child = None

    @property
    def pid(self) -> int | None:
        """The process id of the verifier; None before the first use and after `close`."""
        child = self._child
        return child.pid if child else None

    def judge(
        self, items: Sequence[tuple[TaskRef, Sequence[Completion]]]
    ) -> Sequence[tuple[ScoredAnswer, ...]]:
        """Score every completion, in order, with the reason for each score.

        Raises VerifierFailed if the process keeps failing, which no completion can cause.
        """
        read = [[self._read(ref, completion) for completion in completions] for ref, completions in items]
        pending = [
            _Pending(i, j, ref, texts)
            for i, ((ref, _), found) in enumerate(zip(items, read, strict=True))
            for j, texts in enumerate(found)
            if isinstance(texts, tuple)
        ]
        scores = {(i, j): score for i, j, score in self._mark(pending)}
        return [
            tuple(
                ScoredAnswer.of(answer) if isinstance(answer, GradeReason) else scores[i, j]
                for j, answer in enumerate(found)
            )
            for i, found in enumerate(read)
        ]

    def _read(self, ref: TaskRef, completion: Completion) -> tuple[str, ...] | GradeReason:
        """Return the checked answer by turn, or the reason why it cannot be scored."""
        if not self._curriculum.names(ref.specialty, ref.n):
            return GradeReason.NO_TASK
        if len(completion.texts) > self._curriculum.turns:
            return GradeReason.TOO_LONG
        read = [self._curriculum.read(ref.specialty, text) for text in completion.texts]
        texts = tuple(text for text in read if isinstance(text, str))
        if len(texts) < len(read):
            return next(reason for reason in read if isinstance(reason, GradeReason))
        return texts if sum(map(len, texts)) <= pipe.MAX_WHOLE_CHARACTERS else GradeReason.TOO_LONG

    def score(self, items: Sequence[tuple[TaskRef, Sequence[Completion]]]) -> Sequence[tuple[float, ...]]:
        """Return one tuple of rewards, from 0 to 1, per item, in order (`swarmd.protocols.Reward`)."""
        return [tuple(score.reward for score in row) for row in self.judge(items)]

    __call__ = score

    def make(self, ref: TaskRef) -> Made:
        """Return the question of a plug-in's task, or the fault if there is none.

        Raises VerifierFailed.
        """
        request = VerifierRequest(
            self._curriculum.name, (ScoreItem(ref.specialty, ref.n, ()),), question=True
        )
        patience = 2 * pipe.STARVED_FACTOR * self._curriculum.patience
        made = self._ask(lambda child: child.exchange(request, Made, patience))
        if made.fault:
            self._note(ref, made.fault)
        return made

    def _note(self, ref: TaskRef, fault: str) -> None:
        """Log a plug-in's fault, once for each kind and at most MAX_FAULT_KINDS kinds."""
        kind = ref.specialty + " " + re.sub("[0-9]+", "#", ":".join(fault.split(":")[:2]))[:80]
        if kind not in self.faults and len(self.faults) < MAX_FAULT_KINDS:
            self.faults.append(kind)
            log.warning(
                "the tasks %s: %s n = %d: %s",
                self._curriculum.name,
                ref.specialty,
                ref.n,
                printable(fault),
            )

    def _mark(self, pending: Sequence[_Pending]) -> Iterator[tuple[int, int, ScoredAnswer]]:
        long = any(sum(map(len, each.texts)) > pipe.MAX_OWN_ANSWER_CHARACTERS for each in pending)
        most = MAX_LONG_ANSWERS if long else MAX_ANSWERS
        for start in range(0, len(pending), most):
            part = pending[start : start + most]
            items = [
                ScoreItem(ref.specialty, ref.n, tuple(p.texts for p in same))
                for (_, ref), same in groupby(part, key=lambda p: (p.item, p.ref))
            ]
            request = VerifierRequest(self._curriculum.name, tuple(items))
            replied = self._ask(partial(_Child.judge, request=request, patience=self._curriculum.patience))
            for item, fault in zip(items, replied.faults, strict=False):
                if fault and self._curriculum.patience:
                    self._note(TaskRef(item.specialty, item.n), fault)
            scores = chain.from_iterable(replied.scores)
            yield from ((p.item, p.completion, score) for p, score in zip(part, scores, strict=True))

    def _ask(self, ask: "Callable[[_Child], _Reply]") -> _Reply:
        cause = ""
        with self._lock:
            for attempt in range(ATTEMPTS):
                try:
                    self._child = self._child or _Child(self._command, START_TIMEOUT_S, SLACK_FACTOR**attempt)
                    return ask(self._child)
                except _Failed as failure:
                    cause = str(failure)
                    self.restarts += 1
                    self.close()
        remedy = (
            "fix the tasks or the reward (docs/own-tasks.md) and join again"
            if self._curriculum.patience
            else (
                f"install swarmd again, and check that `{' '.join(self._command)} < {os.devnull}` prints"
                " no error"
            )
        )
        raise VerifierFailed(
            f"the process that scores answers failed {ATTEMPTS} times in a row: {cause}. "
            f"Free some memory if that is short; otherwise {remedy}."
        )


def describe(
    command: Sequence[str], trouble: str, otherwise: str, seconds: float = 2 * START_TIMEOUT_S
) -> PluginDescription | None:
    """Start a scoring process, end it, and return its description of its task plug-in, if it has one.

    Args:
        command: the module and its arguments (`Curriculum.command`).
        trouble: the beginning of the error message.
        otherwise: its end, a remedy besides a correction of the file.
        seconds: timeout for the start; a file of own tasks is loaded twice.

    Raises:
        ConfigError: with the reason why the process does not start.
    """
    try:
        with contextlib.closing(_Child((sys.executable, "-m", *command), seconds)) as child:
            return child.ready().plugin
    except _Failed as failure:
        raise ConfigError(
            f"{trouble}: {str(failure).rstrip('.')}. Fix that, or {otherwise} (docs/own-tasks.md)."
        ) from None


class _Child:
    def __init__(self, command: Sequence[str], start_seconds: float, slack: float = 1.0) -> None:
        """Start a verifier process.

        slack: factor on all timeouts. Raises _Failed.
        """
        try:
            self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise _Failed(f"a temporary file cannot be made ({error})") from error
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                cwd="/",
                env=_environment(),
                bufsize=0,
            )
        except OSError as error:
            self._stderr.close()
            raise _Failed(f"{command[0]} cannot be started ({error})") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._slack = slack
        self._start_by = time.monotonic() + slack * start_seconds
        self.pid = self._process.pid
        # Whether the kernel contains the process; None until it is ready.
        self.seccomp: bool | None = None

    def ready(self) -> VerifierReady:
        """Wait until the process has started. Raises _Failed."""
        ready = self._receive(VerifierReady, self._start_by)
        self.seccomp = ready.seccomp
        return ready

    def judge(self, request: VerifierRequest, patience: float) -> Judgements:
        """Return one score for each answer of a request, in order.

        patience: seconds added to the timeout for each answer. Raises _Failed.
        """
        answers = [len(item.answers) for item in request.items]
        judged = self.exchange(
            request, Judgements, patience * (sum(answers) + 2 * pipe.STARVED_FACTOR * len(answers))
        )
        if [len(row) for row in judged.scores] != answers or len(judged.faults) not in (0, len(answers)):
            raise _Failed(f"it sent {sum(map(len, judged.scores))} scores for {sum(answers)} answers")
        return judged

    def exchange(self, request: VerifierRequest, kind: type[_Reply], patience: float) -> _Reply:
        """Send a request and return the reply. Raises _Failed."""
        if self.seccomp is None:
            self.ready()
        deadline = time.monotonic() + self._slack * (ITEM_TIMEOUT_S * (1 + len(request.items)) + patience)
        with self._failing():
            pipe.send(self._stdin.fileno(), request, deadline)
        return self._receive(kind, deadline)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Convert any error inside the block to a _Failed with its cause."""
        try:
            yield
        except TimeoutError:
            raise _Failed("it did not answer in time") from None
        except (OSError, EOFError):
            raise _Failed(f"it ended ({self._last_words()})") from None
        except ValueError as error:
            # Raised by msgspec if the bytes are not a message of a verifier.
            raise _Failed(f"it sent an invalid reply ({error})") from None

    def _receive(self, kind: type[_Reply], deadline: float) -> _Reply:
        with self._failing():
            reply = msgspec.msgpack.decode(pipe.receive(self._stdout.fileno(), deadline), type=pipe.Reply)
        if not isinstance(reply, kind):
            if not isinstance(reply, VerifierRefused):
                raise _Failed("it sent a reply of the wrong kind")
            raise _Failed(
                printable(reply.why)
                if kind is VerifierReady
                else f"it refused the request ({printable(reply.why)})"
            )
        return reply

    def close(self) -> None:
        """Kill the process, which may hang."""
        self._process.kill()
        self._process.wait()
        for stream in (self._stdin, self._stdout, self._stderr):
            stream.close()

    def _last_words(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "its process still runs"
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"exit code {code}" + (f": {words[-1][:300]}" if words else "")


def _environment() -> dict[str, str]:
    """Return an environment with only the import path and fixed settings.

    BLAS gets one thread, since the verifier forks.
    """
    here = str(Path(__file__).parents[3])
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([here, *(p for p in sys.path if Path(p).is_absolute())])),
        "PYTHONHASHSEED": "0",
        "PYTHONSAFEPATH": "1",
        "PYTHONUTF8": "1",
        "PYTHONWARNINGS": "ignore",
        "LC_ALL": "C",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
