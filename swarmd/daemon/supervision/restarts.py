"""Decides how long to wait before a dead trainer is restarted, and when to give up. Pure."""

from dataclasses import dataclass

# Give up after this many deaths without progress between them.
HOPELESS_DEATHS = 5


@dataclass(frozen=True)
class Death:
    """The unexpected end of a child process."""

    cause: str
    count: int  # deaths in a row, this one included
    backoff: float  # seconds before the next start
    again: bool = False  # the second death in a row with this cause, which a restart cannot cure

    @property
    def hopeless(self) -> bool:
        return self.again or self.count >= HOPELESS_DEATHS


class Deaths:
    """Counts deaths in a row without progress between them."""

    def __init__(self) -> None:
        self._furthest = self._count = 0
        self._lasting = ""

    def progress(self, reached: int) -> None:
        """Record how far the work has come. Beyond the furthest point so far, the count of deaths restarts.

        So a child that resumes from a checkpoint and always dies at the same place is not restarted forever.
        """
        if reached > self._furthest:
            self._furthest, self._count = reached, 0

    def died(self, cause: str, *, lasting: bool = False) -> Death:
        """Record a death and return when to restart.

        The first restart is immediate, because one killed process says nothing about the next. The wait
        doubles with each later death.

        lasting: whether the same cause will probably come again, like an error while the model is loaded.
        """
        again = lasting and cause == self._lasting
        self._count, self._lasting = self._count + 1, cause if lasting else ""
        return Death(cause, self._count, 0.0 if self._count == 1 else 2.0 ** (self._count - 1), again)
