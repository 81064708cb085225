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

from collections.abc import Callable

from judge.types import QuestionWindow
from swarmd.tasks import held_out

REVEAL_SECONDS = 5  # by then every ask that began before has its question
QUESTIONS = 1_000  # of a set; a peer that asks for more meets them again


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


