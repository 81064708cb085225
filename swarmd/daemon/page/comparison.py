"""Makes the trainer answer a question with today's weights and with its first ones: "Try it" on the page."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import trio

from swarmd import link
from swarmd.errors import SwarmdError

# Seconds. The trainer answers between rounds, and a round of a large model may take this long.
ANSWER_TIMEOUT_S: Final = 900.0


class Comparison:
    """Answers "compare" of the control API. Simultaneous callers get the same answer.

    why_not: returns why the trainer cannot answer now; "" if it can.
    """

    def __init__(self, tell: Callable[[link.ToTrainer], None], why_not: Callable[[], str]) -> None:
        self._tell, self._why_not = tell, why_not
        self._answer: link.ComparedAnswers | None = None
        self._answered: trio.Event | None = None

    async def on_compare(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if why := self._why_not():
            raise SwarmdError(why)
        if self._answered is None:
            self._answered = trio.Event()
            self._tell(link.CompareRequest())
        answered = self._answered
        with trio.move_on_after(ANSWER_TIMEOUT_S):
            await answered.wait()
        if self._answer is None or not answered.is_set():
            if self._answered is answered:
                self._answered = None
            raise SwarmdError("The trainer did not answer in time. Ask again after its round.")
        return {"schema": 1, **msgspec.to_builtins(self._answer)}

    def ask_again(self) -> None:
        """Repeat an unanswered request to a trainer that was restarted."""
        if self._answered is not None:
            self._tell(link.CompareRequest())

    def answer(self, answer: link.ComparedAnswers) -> None:
        self._answer = answer
        if self._answered is not None:
            self._answered.set()
            self._answered = None
