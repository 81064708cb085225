"""The contained process that scores answers: `python -m swarmd.tasks.verifier`, started by `scoring.Verifier`.

Two processes. The verifier loads ReasoningGYM once and talks to its client over standard input and output; it scores nothing itself. Its
worker, a fork, gives up everything it does not need (containment.py), regenerates each task from its reference, and scores. An answer that
takes longer than LIMIT, or kills the worker, earns nothing; a new worker is forked, in about 30 ms.

A limit of the containment: code that ran in the worker could forge the results of later answers. None of the scorers we use runs any.

The verifier ends when its standard input closes or its parent is gone. It ignores SIGINT and SIGTERM.
"""

import gc
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from swarmd.tasks import pipe, seccomp
from swarmd.tasks.answers import GradeReason
from swarmd.tasks.containment import contain, marking
from swarmd.tasks.curriculum import CURRICULA
from swarmd.tasks.grading import grade, solution
from swarmd.tasks.pipe import Judgements, Request, ScoreItem, VerifierReady, VerifierRefused
from swarmd.tasks.source import TaskRef, tasks_of

LIMIT = 0.2  # seconds an answer may take, the regeneration of its task included
MOST_LOST = 2  # workers that one item may cost
WORKER_LIFE = 4096  # answers after which a worker is replaced
START_LIMIT = 10.0  # seconds a worker may take to be contained
PARENT_CHECK = 2.0  # seconds

Mark = Callable[[str], GradeReason]
Prepare = Callable[[str, str, int], Mark | None]  # (curriculum, specialty, n) -> how to mark an answer to it; None: no such task

_CODES: Sequence[GradeReason] = tuple(GradeReason)  # a worker sends one byte per answer, an index into this: nothing is parsed


def prepare(curriculum: str, specialty: str, n: int) -> Mark | None:
    """Regenerate the task, and return a function that grades answers to it."""
    if curriculum not in CURRICULA:
        return None
    tasks = tasks_of(curriculum)
    task = tasks.task(TaskRef(specialty, n))
    return None if task is None else lambda answer: grade(tasks, task, answer)


def warm_up() -> None:
    """Generate and grade one task of each kind, so that workers have nothing left to import."""
    for curriculum in CURRICULA:
        tasks = tasks_of(curriculum)
        for specialty in tasks.curriculum.specialties:
            task = tasks.task(TaskRef(specialty, 1))
            if task is not None:
                grade(tasks, task, solution(tasks, task))


class WorkerLost(Exception):
    """A worker that has to be replaced; `reason` is TIMEOUT or CRASHED."""

    def __init__(self, reason: GradeReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Worker:
    """One contained fork of this process. Raises OSError where it cannot be contained."""

    def __init__(self, prepare: Prepare) -> None:
        jobs, self._jobs = os.pipe()
        self._results, results = os.pipe()
        verifier = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _become_worker(jobs, results, verifier, prepare)
        os.close(jobs)
        os.close(results)
        os.set_blocking(self._jobs, False)
        self.answered = 0
        started = msgspec.msgpack.decode(pipe.receive(self._results, time.monotonic() + START_LIMIT), type=VerifierReady | VerifierRefused)
        if isinstance(started, VerifierRefused):
            raise OSError(f"the worker cannot be contained: {started.why}")
        self.seccomp = started.seccomp

    def hand(self, curriculum: str, item: ScoreItem) -> None:
        """Send answers to grade; call `result` once for each."""
        try:
            pipe.send(self._jobs, Request(curriculum, (item,)), time.monotonic() + LIMIT)
        except OSError as error:  # TimeoutError: it does not read; BrokenPipeError: it is gone
            raise WorkerLost(GradeReason.TIMEOUT if isinstance(error, TimeoutError) else GradeReason.CRASHED) from error

    def result(self) -> GradeReason:
        """Grade of the next answer. Raises WorkerLost."""
        try:
            pipe.await_event(self._results, select.POLLIN, time.monotonic() + LIMIT)
        except TimeoutError:
            raise WorkerLost(GradeReason.TIMEOUT) from None
        code = os.read(self._results, 1)
        if not code or code[0] >= len(_CODES):
            raise WorkerLost(GradeReason.CRASHED)
        self.answered += 1
        return _CODES[code[0]]

    def end(self) -> None:
        """Kill it, whatever it is doing."""
        os.close(self._jobs)
        os.close(self._results)
        os.kill(self._pid, signal.SIGKILL)  # a dead child must still be reaped
        os.waitpid(self._pid, 0)


class Marker:
    """Grades items with a worker, and replaces the worker when needed."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self.worker = Worker(prepare)

    def mark(self, curriculum: str, item: ScoreItem) -> tuple[GradeReason, ...]:
        """One reason per answer. After a death the answer is tried once more, since something else may have killed the worker."""
        if self.worker.answered >= WORKER_LIFE:
            self._replace()
        reasons: list[GradeReason] = []
        lost = 0
        while len(reasons) < len(item.answers) and lost < MOST_LOST:
            try:
                self.worker.hand(curriculum, ScoreItem(item.specialty, item.n, item.answers[len(reasons) :]))
                while len(reasons) < len(item.answers):
                    reasons.append(self.worker.result())
            except WorkerLost as loss:
                self._replace()
                lost += 1
                if loss.reason is GradeReason.TIMEOUT or lost == MOST_LOST:
                    reasons.append(loss.reason)
        return (*reasons, *[GradeReason.SKIPPED] * (len(item.answers) - len(reasons)))

    def _replace(self) -> None:
        self.worker.end()
        self.worker = Worker(self._prepare)


def serve(requests: int, replies: int, prepare: Prepare) -> None:
    """Answer requests until `requests` ends or the parent is gone."""
    parent = os.getppid()
    marker = Marker(prepare)
    try:
        pipe.send(replies, VerifierReady(marker.worker.seccomp))
        while _wait_for_request(requests, parent):
            pipe.send(replies, _reply(requests, marker))
    except (EOFError, BrokenPipeError):  # the client is gone: the usual end
        return
    finally:
        marker.worker.end()


def _wait_for_request(requests: int, parent: int) -> bool:
    """False when the parent is gone. Not left to the kernel (PR_SET_PDEATHSIG): that acts when the *thread* which started us ends."""
    while os.getppid() == parent:
        try:
            pipe.await_event(requests, select.POLLIN, time.monotonic() + PARENT_CHECK)
        except TimeoutError:
            continue
        return True
    return False


def _reply(requests: int, marker: Marker) -> Judgements | VerifierRefused:
    try:
        request = msgspec.msgpack.decode(pipe.receive(requests), type=Request)
    except (ValueError, RecursionError) as error:  # a frame too long, not MessagePack (msgspec's errors are ValueErrors), too deep
        return VerifierRefused(str(error))
    return Judgements(tuple(marker.mark(request.curriculum, item) for item in request.items))


def _become_worker(jobs: int, results: int, verifier: int, prepare: Prepare) -> NoReturn:
    """Never returns and never raises: the forked copy of the verifier's stack must not run on."""
    try:
        seccomp.die_with_parent(signal.SIGKILL)
        if os.getppid() == verifier:
            _work(jobs, results, prepare)
    finally:
        os._exit(1)


def _work(jobs: int, results: int, prepare: Prepare) -> None:
    os.dup2(0, 2)  # 0 and 1 lead to /dev/null
    low, high = sorted((jobs, results))
    os.closerange(3, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, 1024)
    try:
        held = contain()
    except (OSError, ValueError) as error:  # the verifier raises it, and its client shows it
        pipe.send(results, VerifierRefused(repr(error)))
        return
    pipe.send(results, VerifierReady(held))
    while True:  # until the verifier closes its end (EOFError) or kills us; whatever a scorer raises ends the worker too
        job = msgspec.msgpack.decode(pipe.receive(jobs), type=Request)
        for item in job.items:
            mark = prepare(job.curriculum, item.specialty, item.n)
            for answer in item.answers:
                os.write(results, bytes([_CODES.index(_mark(mark, answer))]))


def _mark(mark: Mark | None, answer: str) -> GradeReason:
    if mark is None:
        return GradeReason.NO_TASK
    with marking():
        return mark(answer)


def run(prepare: Prepare) -> None:
    """Serve on standard input and output. They are moved to other descriptors first, so that prints cannot mix with replies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    requests, replies = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    warm_up()
    gc.freeze()  # never collect what is loaded now: forks keep sharing the memory
    serve(requests, replies, prepare)


if __name__ == "__main__":
    run(prepare)
