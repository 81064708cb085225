"""The queue between rounds and generators: questions out, rollouts back. Pure: no threads, no clock.

drawn -> at a generator -> finished -> taken by a round
                              |
                              +-- overtaken by fresher ones
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from swarmd.types import Generation, Task

# A rollout is dropped after so many rounds that took fresher ones.
MAX_PASSED_OVER = 8


class QuestionQueue:
    """Questions out, rollouts back, and neither side waits for the other.

    A generator has `ahead` questions in hand, a round takes what is finished. Only where `enough` are on
    their way or finished, and none is taken, is nothing more asked: it would be generated to be thrown away.
    """

    def __init__(self, draw: Callable[[int], Sequence[Task]], ahead: int, enough: int) -> None:
        """Start with an empty queue.

        draw: returns so many more tasks. ahead: questions in flight that each generator may have. enough:
            questions in flight and finished at which no more are handed out.
        """
        self._draw, self._ahead, self._enough = draw, ahead, enough
        self._out: dict[int, dict[int, Task]] = {}  # generator -> id -> its question
        # Oldest first, each with the number of rounds that had taken rollouts before.
        self._finished: deque[tuple[Task, Generation, int]] = deque()
        self._takes = 0
        self._ids = 0
        self.overtaken = 0  # rollouts that were finished and never taken
        self.tokens = 0  # generated so far

    @property
    def finished(self) -> int:
        """Return how many rollouts a round could take now."""
        return len(self._finished)

    @property
    def in_flight(self) -> int:
        return sum(map(len, self._out.values()))

    def hand_out(self, generator: int) -> list[tuple[int, str]]:
        """Return questions with their ids until this generator has enough again."""
        out = self._out.setdefault(generator, {})
        wanted = max(0, min(self._ahead - len(out), self._enough - self.in_flight - len(self._finished)))
        asked = dict(enumerate(self._draw(wanted), self._ids))
        self._ids += wanted
        out.update(asked)
        return [(number, task.question) for number, task in asked.items()]

    def answered(self, generator: int, answers: Iterable[tuple[int, Generation]]) -> None:
        """Record what a generator finished."""
        for number, generation in answers:
            self.tokens += sum(map(len, generation.tokens.ids))
            self._finished.append((self._out[generator].pop(number), generation, self._takes))

    def collect(self, most: int | None) -> list[tuple[Task, Generation]]:
        """Take the freshest finished rollouts, oldest of them first, at most `most` (None: all).

        The others may be taken later, until they were passed over MAX_PASSED_OVER times.
        """
        count = len(self._finished) if most is None else min(most, len(self._finished))
        taken = [self._finished.pop() for _ in range(count)]
        self._takes += 1
        while self._finished and self._takes - self._finished[0][2] >= MAX_PASSED_OVER:
            self._finished.popleft()
            self.overtaken += 1
        return [(task, answers) for task, answers, _ in reversed(taken)]
