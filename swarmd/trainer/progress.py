"""Reports to the daemon how far a long round is."""

from collections.abc import Callable, Mapping

from swarmd.state.status import StageProgress
from swarmd.types import STAGES

# Rounds shorter than this are not reported, in seconds.
QUIET_S = 2.0
# Minimum seconds between two messages.
EVERY_S = 1.0
# From this share of a stage on, the speed of the stage itself predicts the remaining time better than the
# last round does.
SURE_SHARE = 0.25


class RoundProgress:
    """Follows a round from stage to stage, and reports its progress at most once a second.

    The round says which stage begins; the engine and the learner say how much of it is done.
    """

    def __init__(self, tell: Callable[[StageProgress], object], clock: Callable[[], float]) -> None:
        """Follow rounds.

        clock: seconds that the node computed; pauses do not count.
        """
        self._tell, self._clock = tell, clock
        self._stage = ""
        self._began = self._entered = self._told = 0.0
        # Seconds that each stage of the last round took; empty before the first round.
        self.before: Mapping[str, float] = {}

    def begin(self) -> None:
        """Begin a round."""
        self._began = self._entered = self._clock()

    def enter(self, stage: str) -> None:
        """Begin a stage; "" between two stages."""
        now, self._stage = self._clock(), stage
        if stage:
            # After a stage of a second or more, the next one is reported at once.
            self._told -= EVERY_S * (now - self._entered >= EVERY_S)
            self._entered = now
            self.done(0, 0, 0.0)

    def done(self, done: int, of: int, share: float) -> None:
        """Note how much of the stage is done.

        Args:
            done: answers that are finished in it.
            of: answers in all; 0: not counted.
            share: of the stage's work, 0 to 1.
        """
        now = self._clock()
        if self._stage and now - self._began >= QUIET_S and now - self._told >= EVERY_S:
            self._told = now
            self._tell(StageProgress(self._stage, done, of, self._left(now - self._entered, share)))

    def _left(self, spent: float, share: float) -> float | None:
        """Estimate the seconds left: of this stage by its share, of later stages by the last round."""
        stages = [*STAGES]
        later = sum(self.before.get(stage, 0.0) for stage in stages[stages.index(self._stage) + 1 :])
        known = self.before.get(self._stage)
        # The first step of answering takes long, because it reads the questions.
        if share > (0.0 if known is None else SURE_SHARE):
            return spent / share - spent + later
        return None if known is None else max(0.0, known - spent) + later
