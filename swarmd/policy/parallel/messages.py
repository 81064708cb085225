"""Messages between the trainer and its workers, one type each; `worker.Channel` transfers them.

A worker is a process with its own copy of the model: a generator answers questions, a further trainer
computes a share of each update. End of file means that the other end has ended. A worker then exits at once;
it holds nothing that must be saved.
"""

import msgspec

from swarmd.policy.training.packing import Row
from swarmd.types import Generation


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# Trainer to worker.


class Begin(_Message, frozen=True):
    """The first message, which configures the worker."""

    config: str  # NodeConfig as JSON
    seed: int  # seed of its sampling
    folder: str  # the folder in which weights are published
    sharing: int  # number of this run's processes on its device, including itself


class NewQuestions(_Message, frozen=True):
    """Questions for a generator's queue."""

    questions: list[tuple[int, str]]  # id, text


class Rest(_Message, frozen=True):
    """Pause between two tokens, or continue."""

    resting: bool


class Join(_Message, frozen=True):
    """Load the policy saved in this folder, and join the other trainers."""

    state: str  # folder of a saved policy
    # The file through which the process group meets; each meeting has a new file.
    meeting: str
    rank: int
    size: int


class UpdateShare(_Message, frozen=True):
    """This worker's share of one step that all trainers take together."""

    rows: list[Row]
    check: bool  # whether to return a digest of the weights


# Worker to trainer.


class WorkerReady(_Message, frozen=True):
    """The model is loaded, or the process group is joined."""


class FinishedAnswers(_Message, frozen=True):
    answers: list[tuple[int, Generation]]  # id and generation; the tokens record their versions


class Stepped(_Message, frozen=True):
    updates: int  # the number of updates that led to its weights
    digest: int | None  # digest of the weights, if it was requested


class Fatal(_Message, frozen=True):
    """The worker cannot continue, and a restart would not help."""

    message: str
    exit_code: int


Message = Begin | NewQuestions | Rest | Join | UpdateShare | WorkerReady | FinishedAnswers | Stepped | Fatal
