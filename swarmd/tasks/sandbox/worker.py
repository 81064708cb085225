"""A verifier process and its contained worker: generates questions and scores answers for `client.Verifier`.

There are two processes. The verifier loads what it needs once (ReasoningGYM: verifier.py; a plug-in:
plugin_process.py) and talks to its client over standard input and output; it scores nothing itself. Its
worker, a fork, gives up all rights that it does not need (containment.py), regenerates each task from its
reference, and scores the answers. An answer that takes too long or kills the worker earns no reward, and a
new worker is forked in about 30 ms. The limit is on the worker's CPU time, so that a right answer stays right
on a busy machine.

The containment has one limit: code that ran in the worker could forge the results of later answers. Swarmd's
own scorers run no code from an answer.

The verifier ends when its standard input closes or its parent ends. It ignores SIGINT and SIGTERM.
"""

import gc
import os
import random
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
import psutil

from swarmd.tasks.answers import GradeReason, ScoredAnswer
from swarmd.tasks.sandbox import pipe, seccomp
from swarmd.tasks.sandbox.containment import MEMORY_BYTES, close_files_except, contain, marking
from swarmd.tasks.sandbox.pipe import (
    Judgements,
    Made,
    PluginDescription,
    ScoreItem,
    VerifierReady,
    VerifierRefused,
    VerifierRequest,
)

# CPU seconds that an answer may take, including the regeneration of its task.
ANSWER_CPU_S = 0.2
# Maximum number of workers that one item may cost; its remaining answers are skipped.
MAX_LOST_WORKERS = 2
# A worker is replaced after this many answers.
WORKER_ANSWERS = 4096
# The longest time that a worker may take to contain itself.
START_TIMEOUT_S = 10.0
PARENT_CHECK_S = 2.0


class Prepared(NamedTuple):
    """A regenerated task: its question, and a function that scores an answer (`ScoredAnswer.of`)."""

    question: str
    mark: Callable[[str], GradeReason | float]
    facts: Any = None  # the facts that its answers are scored by
    # Returns the texts of a right answer by turn, if one is known.
    solution: Callable[[], Sequence[str] | None] = lambda: None
    # Plays an episode again with the model's texts; None: the task has one turn, and `mark` scores it.
    play: Callable[[Sequence[str]], ScoredAnswer] | None = None


class Marked(msgspec.Struct, tag="marked", array_like=True, frozen=True):
    """A worker's result for one answer."""

    score: ScoredAnswer
    fault: str = ""  # the plug-in's fault, if any


_Word = TypeVar("_Word", Made, Marked)


class TaskFault(Exception):
    """A plug-in raised, or returned something other than required. The text describes the fault."""

    def __init__(self, what: str, *, fatal: bool = False) -> None:
        """Describe a plug-in's fault.

        fatal: whether its worker must be replaced, because it ran out of memory.
        """
        super().__init__(what[: pipe.MAX_FAULT_CHARACTERS])
        self.fatal = fatal


class PluginRefused(Exception):
    """A plug-in cannot be used. The text gives the reason."""


@dataclass(frozen=True)
class Work:
    """The work of contained workers, and its limits."""

    # Called with curriculum, specialty and n. Returns None if there is no such task. Raises TaskFault.
    prepare: Callable[[str, str, int], Prepared | None]
    seconds: float = ANSWER_CPU_S  # CPU time; the wall-clock limit is pipe.STARVED_FACTOR times this
    memory: int = MEMORY_BYTES
    plugin: PluginDescription | None = None
    # Called before the first request; may raise PluginRefused.
    check: Callable[["Marker"], None] = lambda _: None


class WorkerLost(Exception):
    """A worker died or hung and must be replaced. `reason` is TIMEOUT or CRASHED."""

    def __init__(self, reason: GradeReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Worker:
    """One contained fork of this process.

    Raises OSError if it cannot be contained, and WorkerLost if it dies before it is ready.
    """

    def __init__(self, work: Work) -> None:
        self._seconds = work.seconds
        jobs, self._jobs = os.pipe()
        self._results, results = os.pipe()
        verifier = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                seccomp.die_with_parent(verifier)
                _be_worker(jobs, results, work)
            finally:
                # Never return or raise: the forked process must not continue in its copy of the verifier's
                # stack.
                os._exit(1)
        os.close(jobs)
        os.close(results)
        os.set_blocking(self._jobs, False)
        self._process = psutil.Process(self._pid)
        self.answered = 0
        try:
            said = pipe.receive(self._results, time.monotonic() + START_TIMEOUT_S)
        except EOFError as error:
            self.end()
            raise WorkerLost(GradeReason.CRASHED) from error
        started = msgspec.msgpack.decode(said, type=VerifierReady | VerifierRefused)
        if isinstance(started, VerifierRefused):
            raise OSError(f"the worker cannot be contained: {started.why}")
        self.seccomp = started.seccomp

    def hand(self, request: VerifierRequest) -> None:
        """Send answers to score, or ask for a question. Call `receive` once for each result."""
        try:
            pipe.send(self._jobs, request, self._latest())
        except OSError as error:
            # TimeoutError: the worker does not read its requests. BrokenPipeError: the worker has died.
            raise WorkerLost(
                GradeReason.TIMEOUT if isinstance(error, TimeoutError) else GradeReason.CRASHED
            ) from error

    def _await(self) -> float:
        """Wait until a result begins to arrive. Returns the deadline for its end. Raises WorkerLost."""
        latest, used = self._latest(), self._used()
        left = self._seconds
        while True:
            try:
                pipe.await_event(self._results, select.POLLIN, min(latest, time.monotonic() + left))
            except TimeoutError:
                left = self._seconds - (self._used() - used)
                if left <= 0 or time.monotonic() >= latest:
                    raise WorkerLost(GradeReason.TIMEOUT) from None
            else:
                return latest

    def _used(self) -> float:
        """Return the CPU seconds that the worker has used; 0 if it is dead (then it does not matter)."""
        try:
            times = self._process.cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def _latest(self) -> float:
        return time.monotonic() + pipe.STARVED_FACTOR * self._seconds

    def receive(self, kind: type[_Word]) -> _Word:
        """Return the next answer's score, or the requested question. Raises WorkerLost."""
        self.answered += 1
        try:
            return msgspec.msgpack.decode(pipe.receive(self._results, self._await()), type=kind)
        except TimeoutError:
            raise WorkerLost(GradeReason.TIMEOUT) from None
        except (EOFError, ValueError) as error:
            # The worker has died, or a plug-in's code wrote into the pipe.
            raise WorkerLost(GradeReason.CRASHED) from error

    def end(self) -> None:
        """Kill the worker, whatever it is doing."""
        os.close(self._jobs)
        os.close(self._results)
        # A dead child must still be reaped.
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class Marker:
    """Scores items with a worker, and replaces the worker when needed."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.worker = self._started()

    def _started(self) -> Worker:
        """Start a worker; try a second time if the first dies before it is ready, which may be chance."""
        try:
            return Worker(self._work)
        except WorkerLost:
            return Worker(self._work)

    def mark(self, curriculum: str, item: ScoreItem) -> tuple[tuple[ScoredAnswer, ...], str]:
        """Return one score per answer, and the plug-in's first fault, or "".

        An answer whose worker crashed is tried a second time, since another cause may have killed the worker.
        """
        self._renew()
        scores: list[ScoredAnswer] = []
        fault, lost = "", 0
        while len(scores) < len(item.answers) and lost < MAX_LOST_WORKERS:
            try:
                self.worker.hand(
                    VerifierRequest(
                        curriculum, (ScoreItem(item.specialty, item.n, item.answers[len(scores) :]),)
                    )
                )
                while len(scores) < len(item.answers):
                    word = self.worker.receive(Marked)
                    scores.append(word.score)
                    fault = fault or word.fault
            except WorkerLost as loss:
                self._replace()
                lost += 1
                if loss.reason is GradeReason.TIMEOUT or lost == MAX_LOST_WORKERS:
                    scores.append(ScoredAnswer.of(loss.reason))
                    fault = fault or self._describe_loss("score", loss)
        left_out = [ScoredAnswer.of(GradeReason.SKIPPED)] * (len(item.answers) - len(scores))
        return (*scores, *left_out), fault

    def make(self, curriculum: str, specialty: str, n: int) -> Made:
        """Return the question that a reference names, or the fault if there is none."""
        self._renew()
        for last in (False, True):
            try:
                self.worker.hand(VerifierRequest(curriculum, (ScoreItem(specialty, n, ()),), question=True))
                return self.worker.receive(Made)
            except WorkerLost as loss:
                self._replace()
                if last or loss.reason is GradeReason.TIMEOUT:
                    return Made(None, self._describe_loss("generate", loss))
        raise AssertionError("the second loss returns")

    def _describe_loss(self, function: str, loss: WorkerLost) -> str:
        if loss.reason is GradeReason.TIMEOUT:
            return f"{function}: took longer than {self._work.seconds:g} s and was killed"
        return f"{function}: its process died twice, perhaps because it used too much memory"

    def _renew(self) -> None:
        if self.worker.answered >= WORKER_ANSWERS:
            self._replace()

    def _replace(self) -> None:
        # Start the new worker first: if that fails, the old one is still here for `serve` to end.
        old, self.worker = self.worker, self._started()
        old.end()


def serve(requests: int, replies: int, work: Work) -> None:
    """Answer requests until `requests` closes or the parent process ends."""
    parent = os.getppid()
    marker = Marker(work)
    try:
        work.check(marker)
        pipe.send(replies, VerifierReady(marker.worker.seccomp, work.plugin))
        while _wait_for_request(requests, parent):
            pipe.send(replies, _reply(requests, marker))
    except (EOFError, BrokenPipeError):
        # The client has closed its end, which is the usual end of this process.
        return
    finally:
        marker.worker.end()


def _wait_for_request(requests: int, parent: int) -> bool:
    """Wait for a request. Returns False when the parent process has ended.

    PR_SET_PDEATHSIG cannot replace this check: it acts when the parent's *thread* that started us ends.
    """
    while os.getppid() == parent:
        try:
            pipe.await_event(requests, select.POLLIN, time.monotonic() + PARENT_CHECK_S)
        except TimeoutError:
            continue
        return True
    return False


def _reply(requests: int, marker: Marker) -> Judgements | Made | VerifierRefused:
    try:
        request = msgspec.msgpack.decode(pipe.receive(requests), type=VerifierRequest)
        if request.question and len(request.items) != 1:
            return VerifierRefused("a request for a question must have exactly one item")
    except (ValueError, RecursionError) as error:
        # The request is not valid MessagePack (msgspec's errors are ValueErrors), or nested too deep.
        return VerifierRefused(str(error))
    if request.question:
        return marker.make(request.curriculum, request.items[0].specialty, request.items[0].n)
    marked = [marker.mark(request.curriculum, item) for item in request.items]
    faults = tuple(fault for _, fault in marked)
    return Judgements(tuple(scores for scores, _ in marked), faults if any(faults) else ())


def _be_worker(jobs: int, results: int, work: Work) -> None:
    # Descriptors 0 and 1 already lead to /dev/null.
    os.dup2(0, 2)
    close_files_except(jobs, results)
    try:
        held = contain(work.memory)
    except (OSError, ValueError) as error:
        # The verifier raises this error, and its client shows it.
        pipe.send(results, VerifierRefused(repr(error)))
        return
    pipe.send(results, VerifierReady(held))
    # This loop lasts until the verifier closes its end (EOFError) or kills this process. Any other exception
    # of a scorer ends the worker, too.
    while True:
        job = msgspec.msgpack.decode(pipe.receive(jobs), type=VerifierRequest)
        try:
            for item in job.items:
                _do(results, work, job, item)
        except TaskFault:
            # Only fatal faults are raised here.
            return


def _do(results: int, work: Work, job: VerifierRequest, item: ScoreItem) -> None:
    """Write the question of an item, or a score for each of its answers.

    Reports a fatal TaskFault first, then raises it.
    """
    prepared, fault, right = None, None, None
    try:
        prepared = work.prepare(job.curriculum, item.specialty, item.n)
        right = prepared.solution() if prepared and job.question else None
    except TaskFault as error:
        fault = error
    if job.question:
        texts = tuple(right) if right else None
        pipe.send(results, Made(prepared.question if prepared else None, str(fault or ""), texts))
    for answer in item.answers:
        score, said = _scored(prepared, fault, answer)
        pipe.send(results, Marked(score, str(said or "")))
        if said is not None and said.fatal:
            raise said
    if fault is not None and fault.fatal:
        raise fault


def _scored(
    prepared: Prepared | None, fault: TaskFault | None, texts: Sequence[str]
) -> tuple[ScoredAnswer, TaskFault | None]:
    if prepared is None:
        return ScoredAnswer.of(GradeReason.FAULT if fault else GradeReason.NO_TASK), fault
    try:
        with marking():
            if prepared.play is not None:
                return prepared.play(texts), None
            return ScoredAnswer.of(prepared.mark(texts[-1])), None
    except TaskFault as error:
        return ScoredAnswer.of(GradeReason.FAULT), error


def run(load: Callable[[], Work]) -> None:
    """Serve on standard input and output.

    The two are first moved to other descriptors, so that prints of a plug-in cannot mix with replies.

    load: does all slow loading once. If it raises PluginRefused, the reason is sent to the client.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    requests, replies = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    try:
        work = load()
        # Since Python 3.13, the first seed that is a string triggers an import, and workers cannot import.
        random.Random("")
        # Exclude all present objects from garbage collection, so that forks keep sharing their memory.
        gc.freeze()
        serve(requests, replies, work)
    except PluginRefused as error:
        pipe.send(replies, VerifierRefused(str(error)))
