"""Windows of time, each with a fixed set of held-out questions to which the judge committed before. Pure.

Rules
1. A window's seed is made, and its commitment published, one window before it opens. Only the first, and the first after the judge was
   down for longer than a window, open when they are made.
2. The open window is the newest that ever opened, whatever the clock does later. So no question of a seed that was told is asked again.
3. Where the clock was far ahead and was set back, a new window follows the open one, a window's length from now. What had been published
   for a far date is passed over.
4. The seed is told when a newer window has been open for REVEAL_SECONDS and no question of this one is open.
swarmd/tasks/held_out.py has the commitment, and which questions a seed gives.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2p.types import PeerId
from swarmd.tasks import held_out
from swarmd.types import Task

REVEAL_SECONDS = 5  # by then every ask that began before has its question
QUESTIONS = 1_000  # of a set; a peer that asks for more meets them again
REMEMBERED_PEERS = 10_000


@dataclass(frozen=True, slots=True)
class QuestionWindow:
    terms: held_out.Terms
    seed: bytes
    published: float  # seconds since 1970, by the judge's clock
    opened: float | None = None
    revealed: float | None = None

    @property
    def number(self) -> int:
        return self.terms.number

    @property
    def commitment(self) -> str:
        return held_out.commitment(self.terms, self.seed)

    def told(self) -> dict[str, Any]:
        """For everyone: with its seed when that is revealed, and not before."""
        terms = {"number": self.number, "opens": self.terms.opens, "closes": self.terms.closes, "questions": self.terms.questions}
        seed = None if self.revealed is None else self.seed.hex()
        times = {"published": self.published, "opened": self.opened, "revealed": self.revealed}
        return {**terms, "commitment": self.commitment, **times, "seed": seed}


def dated_ahead(window: QuestionWindow, now: float, seconds: int) -> bool:
    """It was published by a clock that was ahead by more than a window's length, and has been set back."""
    return window.published > now + seconds


def due(
    newest: QuestionWindow | None, now: float, seconds: int, curriculum: str, seeds: Callable[[], bytes], alone: bool = True
) -> list[QuestionWindow]:
    """The windows to add now, so that one is open and the next is published. `newest`: of those there are.

    `alone`: no other judge makes windows too. Two whose clocks differ so much would add one after another for ever.
    """
    added: list[QuestionWindow] = []
    last = newest.terms if newest else None
    if newest is not None and alone and dated_ahead(newest, now, seconds):
        opens = int(now) + seconds
        return [QuestionWindow(held_out.Terms(curriculum, newest.number + 1, opens, opens + seconds, QUESTIONS), seeds(), now)]
    while last is None or last.opens <= now:
        opens = int(now) if last is None or last.closes <= now else last.closes
        last = held_out.Terms(curriculum, last.number + 1 if last else 1, opens, opens + seconds, QUESTIONS)
        added.append(QuestionWindow(last, seeds(), now))
    return added


@dataclass(frozen=True, slots=True)
class Drawn:
    """A question, and what anyone needs to see later that it was not chosen: its window, and the peer's place in the set."""

    task: Task
    window: QuestionWindow
    place: int


class WindowQuestions:
    """Gives each peer its next question of the open window. What is forgotten here is still in the store, see `ask_from`."""

    def __init__(self, tasks: held_out.Regenerating, window: QuestionWindow, remembered: int = REMEMBERED_PEERS) -> None:
        self._tasks, self._remembered = tasks, remembered
        self._made: dict[int, dict[int, Task]] = {}  # of each window: at most a set of them
        self.open(window)

    def open(self, window: QuestionWindow) -> None:
        """Ask questions of this window from now on."""
        self.window = window
        self._made = {window.number: self._made.get(window.number, {})}
        self._places: OrderedDict[PeerId, int] = OrderedDict()

    def ask_from(self, peer: PeerId, window: int | None, asked: int) -> None:
        """The peer was asked so many questions of this window, as the store has it."""
        if window == self.window.number:
            self._places[peer] = max(asked, self._places.get(peer, 0))

    def __call__(self, peer: PeerId) -> Drawn:
        """Raises NoQuestion, VerifierFailed."""
        place, window = self._places.get(peer, 0), self.window
        task = self.task(window, self._next(peer))
        self._places[peer] = place + 1
        self._places.move_to_end(peer)
        while len(self._places) > self._remembered:
            self._places.popitem(last=False)
        return Drawn(task, window, place)

    def unmade(self, peer: PeerId) -> tuple[QuestionWindow, int] | None:
        """The peer's next question, where it is not made yet."""
        index = self._next(peer)
        return None if index in self._made[self.window.number] else (self.window, index)

    def _next(self, peer: PeerId) -> int:
        return held_out.place_in_set(self.window.seed, peer, self._places.get(peer, 0), self.window.terms.questions)

    def missing(self, following: QuestionWindow) -> tuple[QuestionWindow, int] | None:
        """A question of the open window, or else of the following one, that is not made yet."""
        for window in (self.window, following):
            made = self._made.setdefault(window.number, {})
            if len(made) < window.terms.questions:
                return window, next(index for index in range(window.terms.questions) if index not in made)
        return None

    def task(self, window: QuestionWindow, index: int) -> Task:
        """A question of the window, from any thread. It is made the first time. Raises NoQuestion, VerifierFailed."""
        made = self._made.setdefault(window.number, {})
        if index not in made:
            made[index] = held_out.question(self._tasks, window.seed, index)
        return made[index]
