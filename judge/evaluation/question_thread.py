"""Makes questions in a thread of its own.

While a task plug-in is slow, or hangs, everything else is answered.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from judge import config
from judge.errors import BUSY, FAULT, Refused
from judge.evaluation.questions import WindowQuestions
from judge.logs import survived
from judge.types import QuestionWindow
from swarmd.tasks.held_out import Regenerating
from swarmd.tasks.own import NoQuestion
from swarmd.tasks.sandbox.client import VerifierFailed
from swarmd.tasks.source import CurriculumTasks
from swarmd.types import Task, TaskRef

log = logging.getLogger("judge")


class QuestionThread:
    """Used from one event loop.

    Its `curriculum` and `task` are those of the tasks it is made of, until it is closed.
    """

    def __init__(self, tasks: Regenerating) -> None:
        self.curriculum, self._tasks = tasks.curriculum, tasks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="questions")
        self.waiting, self._closed = 0, False

    def task(self, ref: TaskRef) -> Task | None:
        """Make the task.

        Raises NoQuestion once the thread is closed: a question may try many references, each for seconds.
        """
        if self._closed:
            raise NoQuestion("the judge stops")
        return self._tasks.task(ref)

    async def make(self, questions: WindowQuestions, window: QuestionWindow, index: int) -> None:
        """Make this question in the thread. Raises Refused."""
        if self.waiting >= config.QUESTIONS_BACKLOG:
            raise Refused(BUSY)
        self.waiting += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, questions.task, window, index)
        except (NoQuestion, VerifierFailed):
            log.exception("cannot make a question")
            raise Refused(FAULT) from None
        finally:
            self.waiting -= 1

    async def make_ahead_forever(
        self, questions: WindowQuestions, following: Callable[[], QuestionWindow]
    ) -> None:
        """Make the questions of the open window and the next before they are needed.

        One may take 70 ms, and when a window opens nearly every peer needs one that nobody had before. Own
        tasks are made when they are asked for: their plug-in may fail.
        """
        while isinstance(self._tasks, CurriculumTasks):
            pause = config.EXPIRE_SECONDS
            with survived("making questions"):
                if missing := questions.missing(following()):
                    await self.make(questions, *missing)
                    pause = config.AHEAD_SECONDS
            await asyncio.sleep(pause)

    async def close(self) -> None:
        """Make no more. Waits for the reference that is under way."""
        self._closed = True
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
