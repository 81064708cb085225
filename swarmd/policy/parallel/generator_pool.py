"""The pool of generator processes, which keeps them busy with questions. A thread listens to each of them."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from swarmd.policy.parallel.messages import FinishedAnswers, NewQuestions, Rest, WorkerReady
from swarmd.policy.parallel.question_queue import QuestionQueue
from swarmd.policy.parallel.worker import ProcessLost, WorkerProcess
from swarmd.types import Generation, Task


class Generators(ExitStack):
    """Implements `swarmd.protocols.Answers`. The end of a `with` block ends the generators.

    Unfinished answers are lost then. If one generator dies, all are ended. The daemon then restarts the
    trainer from its last checkpoint, as after a crash of the trainer itself.
    """

    def __init__(
        self,
        count: int,
        start: Callable[[int], WorkerProcess],
        flow: QuestionQueue,
        most: int | None,
    ) -> None:
        """Start `count` generators, without waiting for them.

        start: starts the generator with this number, counted from 0. flow: the questions and rollouts, with
        figures for the round's report. most: how many rollouts a round takes; None for all.
        """
        super().__init__()
        self.flow, self._most = flow, most
        self.working: set[int] = set()  # generators that have loaded their model
        self._resting: set[str] = set()  # the reasons why they rest
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._children = [start(number) for number in range(count)]
        self.pids = [child.pid for child in self._children]
        for number, child in enumerate(self._children):
            listener = threading.Thread(target=self._listen, args=(number, child), daemon=True)
            listener.start()
            # In reverse order: the process ends, and then its listener.
            self.callback(listener.join)
            self.callback(child.end)

    def collect(self) -> Sequence[tuple[Task, Generation]]:
        """Return finished rollouts without waiting, at most as many as a round takes."""
        with self._changed:
            taken = self.flow.collect(self._most)
            for number in self.working:
                self._top_up(number)
            return taken

    def wait(self, rollouts: int, seconds: float) -> bool:
        """Wait until `rollouts` are finished. Returns False if `seconds` pass first.

        Raises ProcessLost if a generator died, and SwarmdError if it reported why.
        """
        with self._changed:
            there = self._changed.wait_for(
                lambda: len(self.flow.finished) >= rollouts or self._failure, seconds
            )
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

    def _listen(self, number: int, child: WorkerProcess) -> None:
        """Handle a generator's messages until it ends."""
        try:
            while (message := child.receive()) is not None:
                with self._changed:
                    match message:
                        case WorkerReady():
                            self.working.add(number)
                        case FinishedAnswers(answers):
                            self.flow.answered(number, answers)
                            self._changed.notify_all()
                    self._top_up(number)
            failure: Exception = ProcessLost(
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

    def _top_up(self, number: int) -> None:
        if questions := self.flow.hand_out(number):
            self._children[number].send(NewQuestions(questions))
