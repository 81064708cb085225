"""Scoring load: an author within its quota sends rollouts that are expensive to score and teach nothing.

`pytest -s` prints the figures.

The author sends four frames a second, each with 64 rollouts of 64 completions, all wrong. None breaks a rule
of the wire format. The victim's member, round and verifier are real. The victim has no local questions, so
that all scored completions are the attacker's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from p2p.types import Reason
from swarmd.exchange import wire
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.sandbox.client import Verifier
from swarmd.trainer.round import run_round
from swarmd.types import Completion, Rollout, TaskRef
from tests.attacks.harness import Attack, show
from tests.attacks.learners import Swarm, settings

FRAMES = 4  # frames a second; a round lasts a second
SETTLED = 5  # rounds after which the author's quota is used up


@dataclass(frozen=True)
class Result:
    sent: float  # completions that the author sent in a round
    scored: float  # completions scored in a round, after the first SETTLED rounds
    seconds: float  # CPU seconds of the trainer for scoring in a round, without the verifier
    charged: int  # reports of the author as useless


def load(verifier: Verifier, rounds: int, each: int = wire.MAX_COMPLETIONS, seed: int = 1) -> Result:
    swarm = Swarm(verifier, seed)
    author = swarm.node(1).member
    learner = swarm.join(2, settings(round={"local": 0, "external": 4, "completions": 8}))
    member = learner.node.swarm.member  # type: ignore[attr-defined]
    counts: list[int] = []
    reward = learner.node.reward

    def counted(items: Sequence[tuple[TaskRef, Sequence[Completion]]]) -> Sequence[tuple[float, ...]]:
        counts[-1] += sum(len(completions) for _, completions in items)
        return reward(items)

    learner.node = replace(learner.node, reward=counted)
    wrong = tuple(Completion(f"<answer>wrong {n}</answer>", True) for n in range(each))
    seconds = []
    for t in range(1, rounds + 1):
        for frame in range(FRAMES):
            refs = (
                TaskRef("bf", (t * FRAMES + frame) * wire.MAX_ROLLOUTS + n) for n in range(wire.MAX_ROLLOUTS)
            )
            body = wire.encode([Rollout(ref, wrong, author.identity.peer_id) for ref in refs], t, "tiny")
            author.publish(wire.KIND, body)
        counts.append(0)
        seconds.append(run_round(t, learner.node).seconds["score"])
        swarm.clock.now += 1.0
    result = Result(
        FRAMES * wire.MAX_ROLLOUTS * each,
        fmean(counts[SETTLED:]),
        fmean(seconds[SETTLED:]),
        member.rejected[Reason.USELESS],
    )
    show(f"scoring, {rounds} rounds", result)
    return result


def test_a_useless_authors_completions_are_scored_less_and_less(verifier: Verifier) -> None:
    result = load(verifier, rounds=15)
    assert result.charged >= 4 and result.scored <= result.sent / 10


def attack(folder: Path, rounds: int = 60) -> dict[str, float]:
    with Verifier(TINY_9.name) as verifier:
        result = load(verifier, rounds)
    return {"scored_of_sent": result.scored / result.sent, "seconds_a_round": result.seconds}


ATTACK = Attack(attack, {"scored_of_sent": 0.1})
