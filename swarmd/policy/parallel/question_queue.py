"""The queue between rounds and generators: questions out, rollouts back. Pure: no threads, no clock.

drawn -> at a generator -> finished -> taken by a round
                              |
                              +-- dropped, after fresher rollouts were taken
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from swarmd.types import Generation, Task

# A rollout is dropped after this many rounds took fresher ones instead.
MAX_PASSED_OVER = 8


class QuestionQueue:
    """Hands questions to generators and collects rollouts; neither side waits for the other.

    Each generator may have `ahead` unanswered questions. A round takes the rollouts that are finished. If the
    questions in flight and the finished rollouts together reach `enough`, no questions are handed out, since
    their answers would only be dropped.
    """

    def __init__(self, draw: Callable[[int], Sequence[Task]], ahead: int, enough: int) -> None:
        """Start with an empty queue.

        draw: draws the given number of tasks. ahead: maximum number of questions in flight per generator.
            enough: the total of questions in flight and finished rollouts at which no more questions are
            handed out.
        """
        self._draw, self._ahead, self._enough = draw, ahead, enough
        self._out: dict[int, dict[int, Task]] = {}  # generator -> id -> question in flight
        # Rollouts that a round could take now, oldest first. The number counts the rounds that had taken
        # rollouts when this one finished.
        self.finished: deque[tuple[Task, Generation, int]] = deque()
        self._takes = 0
        self._ids = 0
        self.overtaken = 0  # rollouts that were dropped
        self.tokens = 0  # tokens generated so far

    @property
    def in_flight(self) -> int:
        return sum(map(len, self._out.values()))

    def hand_out(self, generator: int) -> list[tuple[int, str]]:
        """Return new questions with their ids, to fill this generator's share."""
        out = self._out.setdefault(generator, {})
        wanted = max(0, min(self._ahead - len(out), self._enough - self.in_flight - len(self.finished)))
        asked = dict(enumerate(self._draw(wanted), self._ids))
        self._ids += wanted
        out.update(asked)
        return [(number, task.question) for number, task in asked.items()]

    def answered(self, generator: int, answers: Iterable[tuple[int, Generation]]) -> None:
        """Record a generator's finished answers."""
        for number, generation in answers:
            self.tokens += sum(map(len, generation.tokens.ids))
            self.finished.append((self._out[generator].pop(number), generation, self._takes))

    def collect(self, most: int | None) -> list[tuple[Task, Generation]]:
        """Take the newest finished rollouts, at most `most` (None: all); return them oldest first.

        The remaining rollouts may be taken later, until MAX_PASSED_OVER rounds have passed them over.
        """
        count = len(self.finished) if most is None else min(most, len(self.finished))
        taken = [self.finished.pop() for _ in range(count)]
        self._takes += 1
        while self.finished and self._takes - self.finished[0][2] >= MAX_PASSED_OVER:
            self.finished.popleft()
            self.overtaken += 1
        return [(task, answers) for task, answers, _ in reversed(taken)]
