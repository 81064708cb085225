"""Oversized: one author's rollouts have more completions, since caps count rollouts but a loss counts tokens.

`pytest -s` prints the figures.

The author sends as many rollouts as an honest node, but each has eight times as many completions. Half of
them are right and half wrong, all are text that the model might write, and all tasks have the same answer. So
nodes that train on them learn to give this answer to every question. Rollouts with the usual number of
completions do less harm; the difference comes from the number of tokens.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import pytest

from p2p.types import PeerId
from swarmd.exchange.wire import MAX_COMPLETIONS
from swarmd.tasks.answers import GradeReason
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import CurriculumTasks
from swarmd.types import Completion, Rollout, Scored, Task
from tests.attacks.harness import Attack, show
from tests.attacks.learners import COMPLETIONS, LOCAL, Swarm, completions, over_seeds, settings
from tiny_models.evaluation import grade_text

DRAWN = 400  # tasks drawn to find tasks that share one answer


class Oversized:
    """A member that sends `LOCAL` rollouts a round, each with `count` completions."""

    def __init__(self, swarm: Swarm, number: int, many: int) -> None:
        self.tasks, self.rng, self.many = CurriculumTasks(TINY_9), random.Random(number), many
        self.node = swarm.node(number)
        self.id = self.node.member.identity.peer_id
        drawn = [(task, solution(self.tasks, task)) for task in self.tasks.draw(DRAWN, self.rng)]
        counts = Counter((task.ref.specialty, answer) for task, answer in drawn)
        (self.specialty, self.answer), _ = counts.most_common(1)[0]
        self.wrong = sorted(
            {
                answer
                for task, answer in drawn
                if task.ref.specialty == self.specialty and answer != self.answer
            }
        )

    def act(self, t: int) -> None:
        for _ in range(LOCAL):
            task = self.task()
            right, half = Completion(f"<answer>{self.answer}</answer>", True), self.many // 2
            wrong = [
                Completion(f"<answer>{self.rng.choice(self.wrong)}</answer>", True)
                for _ in range(self.many - half)
            ]
            self.node.share([Rollout(task.ref, (*(right,) * half, *wrong), self.id)], t)

    def task(self) -> Task:
        """Return another task that has the common answer."""
        while True:
            (task,) = self.tasks.draw(1, self.rng)
            if task.ref.specialty == self.specialty and solution(self.tasks, task) == self.answer:
                return task


@dataclass
class Weights:
    """The sums of weights in all batches, by author."""

    swarm: Swarm
    rollouts: Counter[PeerId] = field(default_factory=Counter)
    completions: Counter[PeerId] = field(default_factory=Counter)
    tokens: Counter[PeerId] = field(default_factory=Counter)

    def __call__(self, batch: Sequence[Scored]) -> None:
        chat = self.swarm.learners[0].policy._chat
        for scored in batch:
            author = scored.rollout.author
            self.rollouts[author] += 1
            self.completions[author] += len(scored.rollout.completions)
            self.tokens[author] += sum(len(chat.encode(c, 16)) for c in scored.rollout.completions)


@dataclass(frozen=True)
class Result:
    reward: float  # mean of the honest nodes' own completions over the last third of the rounds
    held_out: float  # pass@1 at the end
    of_external: float  # the author's share of the external rollouts
    of_rollouts: float  # the author's share of the batches, by rollouts
    of_completions: float
    of_tokens: float  # the author's share of the loss


def play(
    verifier: Verifier,
    authors: int,
    many: int,
    rounds: int,
    honest: int = 3,
    seed: int = 1,
    questions: int = 60,
) -> Result:
    swarm = Swarm(verifier, seed)
    for number in range(honest):
        swarm.join(number, settings())
    weights = swarm.batches = Weights(swarm)
    his = [Oversized(swarm, 99 + n, many) for n in range(authors)]
    swarm.play(rounds, [one.act for one in his])
    names = {one.id for one in his}
    external = [author for n in swarm.learners for r in n.reports for author in r.external_authors]
    return Result(
        reward=fmean(n.reward(max(1, rounds // 3)) for n in swarm.learners),
        held_out=fmean(pass_at_1(swarm, questions)) if questions else 0.0,
        of_external=sum(author in names for author in external) / max(1, len(external)),
        of_rollouts=sum(weights.rollouts[name] for name in names) / weights.rollouts.total(),
        of_completions=sum(weights.completions[name] for name in names) / weights.completions.total(),
        of_tokens=sum(weights.tokens[name] for name in names) / weights.tokens.total(),
    )


def pass_at_1(swarm: Swarm, questions: int, samples: int = 4) -> Iterator[float]:
    """Yield each honest node's pass@1 on held-out tasks."""
    source = CurriculumTasks(TINY_9)
    tasks = source.draw_held_out(questions, random.Random(0))
    for learner in swarm.learners:
        texts = completions(learner.policy, questions, samples)
        yield fmean(
            grade_text(source, tasks[i // samples], text) is GradeReason.CORRECT
            for i, text in enumerate(texts)
        )


@pytest.mark.slow
def test_longer_rollouts_get_no_larger_share_of_a_batch(verifier: Verifier) -> None:
    """A short run; `python -m tests.attacks oversized` also measures the effect on learning."""
    result = play(verifier, authors=1, many=MAX_COMPLETIONS, rounds=6, honest=2, questions=0)
    show("oversized", result)
    assert result.of_external > 0.3 and result.of_completions <= 1.01 * result.of_rollouts


def attack(folder: Path, rounds: int = 60, seeds: int = 3) -> dict[str, float]:
    kinds = {
        "nobody attacks": (0, 0),
        "one author, 8": (1, COMPLETIONS),
        "one author, 64": (1, MAX_COMPLETIONS),
    }

    def one(verifier: Verifier, kind: str, seed: int) -> Result:
        return play(verifier, *kinds[kind], rounds, seed=seed)

    found = over_seeds("oversized", kinds, seeds, one)
    clean, small, large = (fmean(result.reward for result in results) for results in found.values())
    more = max(result.of_tokens / result.of_rollouts for result in found["one author, 64"])
    return {"reward_lost": 1 - large / clean, "lost_to_size": 1 - large / small, "tokens_over_rollouts": more}


ATTACK = Attack(attack, {"lost_to_size": 0.05, "tokens_over_rollouts": 1.0})
