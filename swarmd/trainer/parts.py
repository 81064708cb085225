"""The parts of a round, already built. `trainer/node.py` builds the parts of a trainer."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from p2p.types import PeerId
from swarmd.experience.batch import BatchBuilder, Fitting
from swarmd.experience.outliers import Gate
from swarmd.experience.pool import Pool
from swarmd.experience.replay_schedule import ReplaySchedule
from swarmd.experience.strategies import Sharing
from swarmd.experience.usefulness import UselessRollouts
from swarmd.protocols import Answers, Policy, Reward, Swarm
from swarmd.tasks.curriculum import DrawnTasks
from swarmd.trainer.answer_limits import AnswerLimits
from swarmd.types import Scored, Tokens


@dataclass(frozen=True, kw_only=True)
class ReceivingParts:
    """The parts that score external rollouts and put them into the pool.

    Used by a trainer, and by a program that takes part by `import swarmd`.
    """

    me: PeerId
    tasks: DrawnTasks
    reward: Reward
    swarm: Swarm
    pool: Pool
    batch_rng: random.Random
    external: int = 4  # J
    completions: int = 8  # L
    sharing: Sharing = field(default_factory=Sharing)  # strategies of sharing, sampling and weighting
    useless: UselessRollouts = field(default_factory=UselessRollouts)  # counts each author's useless rollouts


@dataclass(frozen=True, kw_only=True)
class RoundParts(ReceivingParts):
    """Everything that `run_round` uses.

    The parts have mutable state, but the references to them never change.
    """

    policy: Policy
    build_batch: BatchBuilder
    task_rng: random.Random  # a separate stream, so that received rollouts never affect the drawn questions
    clock: Callable[[], float]  # seconds, any epoch
    questions: int = 4  # I
    limits: AnswerLimits = field(default_factory=AnswerLimits)  # on the tokens of this node's own answers
    resample: int = 0  # maximum number of attempts to replace questions without advantage
    trains: bool = True  # False: a frozen policy that answers and shares
    # Updates a round; one, unless replay is on.
    schedule: ReplaySchedule = field(default_factory=ReplaySchedule)
    # Computes log-probabilities of first use, for rollouts that replay reuses.
    remember: Callable[[Sequence[Scored]], Sequence[Tokens]] | None = None
    # The filter for rollouts that the model cannot be trained on; None: no filter.
    fitting: Fitting | None = None
    # The filter for outliers; None: every rollout with an advantage may be trained on.
    gate: Gate | None = None
    generators: Answers | None = None  # None: a round generates its own answers
    enter: Callable[[str], object] = lambda _: None  # called with each stage that begins, and "" when it ends
