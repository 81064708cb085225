"""A generator process: answers questions with the newest published weights.

It is started as `python -m swarmd.policy.parallel.generator FD`.
"""

from pathlib import Path

from swarmd.config.config import NodeConfig
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.policy.parallel.messages import Begin, FinishedAnswers, WorkerReady
from swarmd.policy.parallel.weight_sync import WeightReader
from swarmd.policy.parallel.worker import WorkerLink, run


def generate(begin: Begin, inside: WorkerLink) -> None:
    """Answer questions until the trainer ends."""
    config = NodeConfig.model_validate_json(begin.config)

    def between() -> int:
        inside.may_work.wait()
        return pickup()

    policy = LanguagePolicy.open(config, begin.seed, begin.sharing, between=between)
    pickup = WeightReader(Path(begin.folder), policy.trained)
    inside.send(WorkerReady())
    while True:
        asked = inside.questions(config.round.local)
        answers = policy.generate([text for _, text in asked], config.round.completions)
        inside.send(
            FinishedAnswers([(number, each) for (number, _), each in zip(asked, answers, strict=True)])
        )


if __name__ == "__main__":
    run(generate)
