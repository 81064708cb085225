"""A further trainer process (rank above 0), which computes its shard of each step and takes rank 0's step.

It is started as `python -m swarmd.policy.parallel.further_trainer FD`.
"""

import logging
import sys
from pathlib import Path

from swarmd.config.config import NodeConfig
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.parallel.data_parallel import combine, digest, join
from swarmd.policy.parallel.messages import Begin, Join, Stepped, UpdateShare, WorkerReady
from swarmd.policy.parallel.worker import ProcessLost, WorkerLink, run

log = logging.getLogger(__name__)


def train(begin: Begin, inside: WorkerLink) -> None:
    """Take steps until the trainer ends."""
    policy = LanguagePolicy.open(NodeConfig.model_validate_json(begin.config), begin.seed, begin.sharing)
    learner = policy.learner
    inside.send(WorkerReady())
    while True:
        match inside.messages.get():
            case Join(state, meeting, rank, size):
                policy.restore(Path(state))
                join(meeting, rank, size, policy.device.type)
                inside.send(WorkerReady())
            case UpdateShare(rows, check):
                learner.step(rows, combine)
                inside.send(Stepped(learner.updates, digest(learner) if check else None))


if __name__ == "__main__":
    try:
        run(train)
    except ProcessLost as lost:
        # Rank 0 loses the connection, too, and ends.
        log.warning("another trainer is lost: %s", lost)
        sys.exit(1)
