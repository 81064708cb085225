"""Watchdog: tells a stuck trainer from a slow one. Pure.

There are two signs. First, silence: a separate thread of the trainer's process sends a message every few
seconds, even if the training loop hangs (`link.Alive`). Without messages, the process is stopped or the
machine is overloaded. Second, a hanging loop: no round has ended for many times the duration of its slowest
recent round.

Time is added up from check to check, at most MAX_COUNTED_S for each. So the time while the whole machine, and
with it the daemon, was suspended does not count.
"""

from collections import deque

from swarmd import link
from swarmd.state.status import NodeState, Trouble
from swarmd.terminal import duration_words

# Maximum number of seconds that one check may add.
MAX_COUNTED_S = 2.0


# Limits in seconds, and in multiples of the slowest recent round. Both must be exceeded.
# Seconds of silence until the process counts as stuck, and until it is killed.
SILENT_S, SILENT_END_S = 15.0, 300.0
# Replaces SILENT_S until the first round has ended, because imports block every thread of a process.
IMPORTING_S = 300.0
# Seconds without the end of a round until it counts as stuck, and until it is killed.
HANGING_S, HANGING_END_S = 300.0, 1800.0
HANGING_ROUNDS, HANGING_END_ROUNDS = 5.0, 20.0


class Stuck(Trouble, frozen=True):
    hopeless: bool = False  # whether the trainer has to be killed and restarted


class Watchdog:
    """Watches the trainers of one daemon, one after the other.

    pace: `round.pace`, the seconds that the training loop may rest between two rounds.
    """

    def __init__(self, pace: float = 0.0) -> None:
        self._pace = pace
        self._rounds: deque[float] = deque(maxlen=20)  # seconds of each of the last rounds
        self._looked = 0.0
        self.started(0.0)

    def started(self, now: float) -> None:
        """Reset the state for a trainer process that starts now."""
        self._looked = now
        self._silent = self._without_round = 0.0  # seconds
        self._played = self._resting = False
        self._state: NodeState | None = None  # the trainer's state, as it reports it; None: no message yet

    def note_sent(self, message: link.ToTrainer) -> None:
        """Record a message to the trainer.

        While the trainer rests for the CPU share it ends no round, and does not report that rest as a state.
        """
        if isinstance(message, link.Pause | link.Resume):
            self._resting = isinstance(message, link.Pause)

    def note_received(self, message: link.ToDaemon) -> None:
        self._silent, self._state = 0.0, self._state or NodeState.STARTING
        match message:
            case link.TrainerState(state):
                self._state = state
            case link.RoundDone():
                self._played = True
                self._rounds.append(self._without_round)
                self._without_round = 0.0

    def check(self, now: float) -> Stuck | None:
        """Return why the trainer is stuck now, or None. Call it about once a second."""
        passed, self._looked = min(MAX_COUNTED_S, max(0.0, now - self._looked)), now
        self._silent += passed
        if self._state is NodeState.TRAINING and not self._resting:
            self._without_round += passed
        return self._silence() or self._hanging()

    def _silence(self) -> Stuck | None:
        slowest = max(self._rounds, default=0.0)
        patience = SILENT_S if self._played else IMPORTING_S
        if self._silent < patience:
            return None
        end = max(SILENT_END_S, HANGING_ROUNDS * slowest, 2 * patience)
        return Stuck(
            "the trainer's process does not answer: it is stopped (SIGSTOP, a debugger), or the machine is"
            " out of memory or overloaded",
            "let it go on with `kill -CONT`, close other programs, or use a smaller model; after"
            f" {duration_words(end)} without a word it is killed and starts again",
            self._state is not None and self._silent >= end,
        )

    def _hanging(self) -> Stuck | None:
        slowest = max(self._rounds, default=0.0)
        enough = self._pace + max(HANGING_S, HANGING_ROUNDS * slowest)
        if not self._rounds or self._without_round < enough:
            return None
        end = self._pace + max(HANGING_END_S, HANGING_END_ROUNDS * slowest)
        return Stuck(
            f"no round has ended for over {duration_words(enough)}; the slowest of late took {slowest:.1f} s",
            f"look into trainer.log; after {duration_words(end)} without a round it is killed and starts"
            " again",
            self._without_round >= end,
        )
