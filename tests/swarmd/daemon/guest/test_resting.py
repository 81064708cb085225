"""Computing can rest before every token and every micro-batch, with the built-in engine."""

from itertools import pairwise
from typing import Any

from swarmd.config.config import NodeConfig
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.types import Completion, PeerId, Rollout, Scored, TaskRef


def policy_of(**train: Any) -> tuple[LanguagePolicy, list[int]]:
    sections: dict[str, Any] = {"model": {"device": "cpu"}, "train": train}
    rests: list[int] = []
    config = NodeConfig.model_validate(sections)
    return LanguagePolicy.open(config, 1, rest=lambda: rests.append(len(rests))), rests


def test_generation_can_rest_before_every_token() -> None:
    policy, rests = policy_of()
    (answers,) = policy.generate(["1 + 1 = ?"], 4)
    assert len(rests) >= max(map(len, answers.tokens.ids)) > 2
    policy.close()


def test_training_can_rest_before_every_micro_batch() -> None:
    policy, rests = policy_of(micro_batch_tokens=1, kl_every=0)
    texts = tuple(Completion(f"<answer>{n}</answer>", True) for n in range(4))
    batch = [Scored(Rollout(TaskRef("bf", 1), texts, PeerId("p")), "1 + 1 = ?", (1.0, 0.0, 0.0, 0.0), 1)]
    policy.update(batch)
    assert len(rests) == 5  # one for each row, and one before them
    policy.stepping(lambda learner, rows: learner.step(rows, lambda *_: None)).update(batch)
    assert len(rests) == 6
    assert all(later == before + 1 for before, later in pairwise(rests))
