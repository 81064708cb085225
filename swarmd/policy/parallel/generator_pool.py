"""The pool of generator processes, which keeps them busy with questions. A thread listens to each of them."""

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from swarmd.errors import SwarmdError
from swarmd.policy.parallel.messages import (
    Fatal,
    FinishedAnswers,
    Message,
    NewQuestions,
    Rest,
    WorkerReady,
)
from swarmd.policy.parallel.question_queue import QuestionQueue
from swarmd.policy.parallel.worker import WorkerProcess
from swarmd.types import Generation, Task


class WorkerFailed(SwarmdError):
    """A generator or a further trainer cannot continue, and a restart would not help."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class GeneratorLost(Exception):
    """A generator process ended unexpectedly."""


class Generators:
    """Implements `swarmd.protocols.Answers`.

    If one generator dies, all are ended. The daemon then restarts the trainer from its last checkpoint, as
    after a crash of the trainer itself.
    """

    def __init__(
        self,
        count: int,
        start: Callable[[int], WorkerProcess],
        flow: QuestionQueue,
        most: Callable[[], int | None],
    ) -> None:
        """Prepare `count` generators.

        start: starts the generator with this number, counted from 0. flow: the questions and rollouts, with
        figures for the round's report. most: returns how many rollouts a round takes now; None for all.
        """
        self._count, self._start, self.flow, self._most = count, start, flow, most
        self._children: list[WorkerProcess] = []
        self._threads: list[threading.Thread] = []
        self._working: set[int] = set()  # generators that have loaded their model
        self._resting: set[str] = set()  # the reasons why they rest
        self._changed = threading.Condition()
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        """Start the generators, without waiting for them."""
        self._children = [self._start(number) for number in range(self._count)]
        for number, child in enumerate(self._children):
            self._threads.append(threading.Thread(target=self._listen, args=(number, child), daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the generators. Unfinished answers are lost."""
        for child in self._children:
            child.end()
        for thread in self._threads:
            thread.join()

    def collect(self) -> Sequence[tuple[Task, Generation]]:
        """Return finished rollouts without waiting, at most as many as a round takes."""
        with self._changed:
            taken = self.flow.collect(self._most())
            for number in self._working:
                self._top_up(number)
            return taken

    def wait(self, rollouts: int, seconds: float) -> bool:
        """Wait until `rollouts` are finished. Returns False if `seconds` pass first.

        Raises GeneratorLost if a generator died, and WorkerFailed if it reported why.
        """
        with self._changed:
            there = self._changed.wait_for(lambda: self.flow.finished >= rollouts or self._failure, seconds)
            if self._failure is not None:
                raise self._failure
            return bool(there)

    def rest(self, resting: bool, why: str = "") -> None:
        """Pause all generators between two tokens, or remove this reason for the pause.

        The generators continue when no reason is left. Any thread may call this.
        """
        with self._changed:
            before = bool(self._resting)
            (self._resting.add if resting else self._resting.discard)(why)
            if bool(self._resting) != before:
                for child in self._children:
                    child.send(Rest(resting))

    @property
    def alive(self) -> int:
        """The number of generators that have loaded their model."""
        return len(self._working)

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def _listen(self, number: int, child: WorkerProcess) -> None:
        """Handle a generator's messages until it ends."""
        failure: Exception
        try:
            while (message := child.receive()) is not None:
                self._handle(number, message)
            failure = GeneratorLost(
                f"generator {number} ended ({child.end()}). If memory is short, lower workers.generators"
                " or choose a smaller model"
            )
        except Exception as error:
            # This includes errors of this process, such as in drawing a task.
            failure = error
        with self._changed:
            # `wait` raises it in the trainer's loop.
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _handle(self, number: int, message: Message) -> None:
        with self._changed:
            match message:
                case WorkerReady():
                    self._working.add(number)
                case FinishedAnswers(answers):
                    self.flow.answered(number, answers)
                    self._changed.notify_all()
                case Fatal(text, exit_code):
                    raise WorkerFailed(text, exit_code)
            self._top_up(number)

    def _top_up(self, number: int) -> None:
        if questions := self.flow.hand_out(number):
            self._children[number].send(NewQuestions(questions))
