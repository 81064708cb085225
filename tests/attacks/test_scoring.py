"""Scoring load: an author within its quota sends rollouts that cost much to score and teach nothing.

`pytest -s` prints the figures.

Four frames a second, in each 64 rollouts of 64 completions, every one wrong. Nothing of it breaks a rule of
the wire. The victim is real: its member, its round and its verifier; only its own questions are left out, so
that the count is of the attacker's work.
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

FRAMES = 4  # a second, and a round lasts one
SETTLED = 5  # rounds after which his quota is used up


@dataclass(frozen=True)
class Result:
    sent: float  # completions a round
    scored: float  # of them, once it has settled
    seconds: float  # CPU seconds that a round spent on that, without the verifier's
    charged: int  # reports


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
        member.reports[Reason.USELESS],
    )
    show(f"scoring, {rounds} rounds", result)
    return result


def test_useless_authors_are_scored_less_and_less(verifier: Verifier) -> None:
    result = load(verifier, rounds=15)
    assert result.charged >= 4 and result.scored <= result.sent / 10


def attack(folder: Path, rounds: int = 60) -> dict[str, float]:
    with Verifier(TINY_9.name) as verifier:
        result = load(verifier, rounds)
    return {"scored_of_sent": result.scored / result.sent, "seconds_a_round": result.seconds}


ATTACK = Attack(attack, {"scored_of_sent": 0.1})
