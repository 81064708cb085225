"""The pool of generator processes: keeps them busy with questions and restarts them when they die.

Each has a thread.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from swarmd.errors import SwarmdError
from swarmd.policy.parallel.messages import Ask, Fatal, FinishedAnswers, Rest, Wake, WorkerReady
from swarmd.policy.parallel.question_queue import QuestionQueue
from swarmd.policy.parallel.restarts import MAX_BACKOFF_S, Deaths
from swarmd.policy.parallel.worker import WorkerProcess
from swarmd.types import Generation, Task

log = logging.getLogger(__name__)


class WorkerFailed(SwarmdError):
    """A process that generates or trains cannot be kept running."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Generators:
    """Implements `swarmd.protocols.Answers`."""

    def __init__(
        self,
        count: int,
        start: Callable[[int, int], WorkerProcess],
        flow: QuestionQueue,
        most: Callable[[], int | None],
        longest_backoff: float = MAX_BACKOFF_S,
    ) -> None:
        """Prepare `count` generators.

        start(generator, restarts): starts one, both numbers from 0. most: rollouts that a round takes now;
        None for all.
        """
        self._longest_backoff = longest_backoff
        self._start, self._flow, self._most = start, flow, most
        self._children: list[WorkerProcess | None] = [None] * count
        self._working: set[int] = set()  # generators that have loaded their model
        # Guards everything here, the flow too.
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._resting: set[str] = set()  # reasons to rest
        self._failure: SwarmdError | None = None
        self._bug: Exception | None = None
        self._threads = [
            threading.Thread(target=self._keep, args=(i,), name=f"generator-{i}", daemon=True)
            for i in range(count)
        ]
        self.restarts = 0
        self.seconds = 0.0  # seconds of computing, of all generators together
        self.rollouts = 0  # rollouts finished so far

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End them; what they have in hand is given up."""
        self._closing.set()
        with self._changed:
            children = [child for child in self._children if child]
        for child in children:
            child.end()
        for thread in self._threads:
            thread.join()

    def collect(self) -> Sequence[tuple[Task, Generation]]:
        """Return the finished rollouts, at most as many as a round takes, without waiting."""
        with self._changed:
            taken = self._flow.collect(self._most())
            for number in self._working:
                self._top_up(number)
            return taken

    def wait(self, rollouts: int, seconds: float) -> bool:
        """Wait until `rollouts` are finished; return False when `seconds` are over first.

        Raises WorkerFailed where waiting is of no use.
        """
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._flow.finished >= rollouts or self._failure or self._bug, seconds
            )
            if self._failure is not None:
                raise self._failure
            if self._bug is not None:
                raise RuntimeError("a thread that keeps a generator busy failed") from self._bug
            return bool(there)

    def rest(self, resting: bool, why: str = "") -> None:
        """Stop all generators between two tokens, or let them go on, where they rest for no other reason.

        Any thread may call it.
        """
        with self._changed:
            before = bool(self._resting)
            (self._resting.add if resting else self._resting.discard)(why)
            if bool(self._resting) == before:
                return
            for child in self._children:
                if child:
                    child.send(Rest() if resting else Wake())

    @property
    def flow(self) -> QuestionQueue:
        """The question queue, which holds the figures for the round's report."""
        return self._flow

    @property
    def alive(self) -> int:
        """Return how many have their model and can answer."""
        with self._changed:
            return len(self._working)

    @property
    def pids(self) -> list[int]:
        with self._changed:
            return [child.pid for child in self._children if child]

    def _keep(self, number: int) -> None:
        """Run one generator, and start it again when it dies."""
        deaths, life = Deaths(self._longest_backoff), 0
        try:
            while not self._closing.is_set():
                worked, ended = self._one_life(number, life)
                if self._closing.is_set() or self._failure:
                    return
                if worked:
                    deaths.progress()
                death, life = deaths.died(ended), life + 1
                if death.hopeless:
                    self._fail(
                        WorkerFailed(
                            f"a generator died {death.count} times in a row without answering: {ended}. See"
                            " trainer.log; where memory is short, lower workers.generators or take a smaller"
                            " model.",
                            1,
                        )
                    )
                    return
                log.warning(
                    "generator %d ended (%s); it is started again, its questions are asked again",
                    number,
                    ended,
                )
                self._closing.wait(death.backoff)
        except Exception as error:
            # It is a fault of ours, as in drawing a task. `wait` raises it in the loop.
            with self._changed:
                self._bug = error
                self._changed.notify_all()

    def _one_life(self, number: int, life: int) -> tuple[bool, str]:
        """Run one generator process until it ends; return whether it answered anything, and how it ended."""
        child, worked = self._start(number, life), False
        with self._changed:
            self._children[number] = child
            self.restarts += life > 0
            if self._resting:
                # Told here, or a `rest(False)` that comes now would arrive before it.
                child.send(Rest())
        if self._closing.is_set():
            return False, child.end()
        while (message := child.receive()) is not None:
            match message:
                case WorkerReady():
                    with self._changed:
                        self._working.add(number)
                        self._top_up(number)
                case FinishedAnswers(answers, seconds):
                    worked = True
                    with self._changed:
                        self._flow.answered(number, answers)
                        self.seconds, self.rollouts = self.seconds + seconds, self.rollouts + len(answers)
                        self._top_up(number)
                        self._changed.notify_all()
                case Fatal(text, exit_code):
                    self._fail(WorkerFailed(text, exit_code))
        with self._changed:
            self._children[number] = None
            self._working.discard(number)
            self._flow.lost(number)
        return worked, child.end()

    def _top_up(self, number: int) -> None:
        child = self._children[number]
        questions = self._flow.hand_out(number)
        if child and questions:
            # If the child has just died, `lost` gets the questions back.
            child.send(Ask(questions))

    def _fail(self, failure: SwarmdError) -> None:
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
