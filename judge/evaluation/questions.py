"""The questions of a window, in a different order for each peer; a separate thread generates them.

So requests are served even if a task plug-in is slow or hangs.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from judge import config
from judge.errors import BUSY, FAULT, Refused
from judge.logs import log
from judge.types import QuestionWindow
from p2p.latest import Latest
from p2p.types import PeerId
from swarmd.tasks import held_out
from swarmd.tasks.own_tasks import NoQuestion
from swarmd.tasks.sandbox.client import VerifierFailed
from swarmd.types import Task, TaskRef


@dataclass(frozen=True, slots=True)
class Drawn:
    """A question.

    Window and place prove that the judge followed the peer's order and did not pick the question.
    """

    task: Task
    window: QuestionWindow
    place: int


class WindowQuestions:
    """Gives each peer its next question of the open window. Used from one event loop.

    A peer's place that was evicted here is read from the store again, see `ask_from`.
    """

    def __init__(
        self, tasks: held_out.Regenerating, window: QuestionWindow, remembered: int = config.REMEMBERED_PEERS
    ) -> None:
        self.curriculum, self._tasks, self._remembered = tasks.curriculum, tasks, remembered
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="questions")
        self.waiting, self._closed = 0, False
        self.open(window)

    def open(self, window: QuestionWindow) -> None:
        """Ask questions of this window from now on."""
        self.window = window
        # The generated questions of each window, at most one set per window.
        self._made: dict[int, dict[int, Task]] = {window.number: {}}
        self._places: Latest[PeerId, int] = Latest(self._remembered)

    def ask_from(self, peer: PeerId, window: int | None, asked: int) -> None:
        """Note how many questions of this window the peer was asked, according to the store."""
        if window == self.window.number:
            self._places[peer] = max(asked, self._places.get(peer, 0))

    def __call__(self, peer: PeerId) -> Drawn:
        """Draw the peer's next question. Raises NoQuestion, VerifierFailed."""
        place, window = self._places.get(peer, 0), self.window
        task = self._question(window, self._next(peer))
        self._places[peer] = place + 1
        return Drawn(task, window, place)

    async def make(self, peer: PeerId) -> bool:
        """Generate the peer's next question in the thread; return False if it exists. Raises Refused."""
        window, index = self.window, self._next(peer)
        if index in self._made[window.number]:
            return False
        if self.waiting >= config.QUESTIONS_BACKLOG:
            raise Refused(BUSY)
        self.waiting += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._question, window, index)
        except (NoQuestion, VerifierFailed):
            log.exception("cannot make a question")
            raise Refused(FAULT) from None
        finally:
            self.waiting -= 1
        return True

    def _next(self, peer: PeerId) -> int:
        return held_out.place_in_set(
            self.window.seed, peer, self._places.get(peer, 0), self.window.terms.questions
        )

    def _question(self, window: QuestionWindow, index: int) -> Task:
        """Return a question of the window, generated on first use. Raises NoQuestion, VerifierFailed."""
        made = self._made.setdefault(window.number, {})
        if index not in made:
            made[index] = held_out.question(self, window.seed, index)
        return made[index]

    def task(self, ref: TaskRef) -> Task | None:
        """Make a task, for `held_out.question`.

        Raises NoQuestion once this is closed: one question may try many references, each for seconds.
        """
        if self._closed:
            raise NoQuestion("the judge is stopping")
        return self._tasks.task(ref)

    async def close(self) -> None:
        """Generate no more questions. Waits for the task that is being generated."""
        self._closed = True
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
