"""Single answers: measures the effect of single-answer rollouts from a crowd of keys, honest or hostile.

`pytest -s` prints the figures.

A person's right answer has no group, so a node computes its advantage from the node's own success rate
(`experience.advantages.among_ours`). A single answer is therefore the cheapest rollout that other nodes train
on. The crowd knows all solutions, and each of its keys sends as many rollouts as an honest node asks
questions. For comparison, the same crowd sends whole groups.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import pytest

from p2p.types import PeerId
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.tasks.curriculum import TINY_9, Curriculum
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import CurriculumTasks
from swarmd.types import Completion, Rollout, Task, TaskRef
from tests.attacks.harness import Attack, show
from tests.attacks.learners import COMPLETIONS, LOCAL, Swarm, over_seeds, settings

# The first of the nine specialties that tiny-latent learns, because P ∨ Q is often right.
EASY = "propositional_logic"
NOBODY = "nobody"
MODEL = "tiny-latent"


def right(task: Task, tasks: CurriculumTasks) -> list[str]:
    return [f"<answer>{solution(tasks, task)}</answer>"]


def wrong(_task: Task, _tasks: CurriculumTasks) -> list[str]:
    return ["<answer>0 0</answer>"]


def group(task: Task, tasks: CurriculumTasks) -> list[str]:
    """Return one right answer, and wrong answers that give it an advantage."""
    return right(task, tasks) + wrong(task, tasks) * (COMPLETIONS - 1)


@dataclass(frozen=True)
class Manner:
    answers: Callable[[Task, CurriculumTasks], list[str]]
    specialties: Sequence[str] = ()  # empty: all specialties
    copies: bool = False  # whether to answer the tasks that other nodes answered


MANNERS: Mapping[str, Manner | None] = {
    NOBODY: None,
    "right": Manner(right),  # as from a crowd of honest people
    "wrong": Manner(wrong),
    "easy": Manner(right, [EASY]),
    "easy groups": Manner(group, [EASY]),
    "copies": Manner(right, copies=True),
    "copied groups": Manner(group, copies=True),
}
SINGLES = ("right", "wrong", "easy", "copies")


class Crowd:
    """A crowd of keys that share single answers or groups.

    each: rollouts of a key in a round; an honest node asks LOCAL questions.
    """

    def __init__(self, swarm: Swarm, manner: Manner, keys: int, each: int = LOCAL) -> None:
        self.each, self.manner, self.rng, self.tasks = (
            each,
            manner,
            random.Random(swarm.seed),
            CurriculumTasks(TINY_9, manner.specialties),
        )
        nodes = [swarm.node(100 + key) for key in range(keys)]
        self.exchanges = {node.member.identity.peer_id: node for node in nodes}
        self.names = set(self.exchanges)

    def act(self, t: int) -> None:
        for name, exchange in self.exchanges.items():
            heard = [rollout.ref for rollout in exchange.collect()[0] if rollout.author not in self.names]
            exchange.share([self.rollout(task, name) for task in self.asked(heard)], t)

    def asked(self, heard: Sequence[TaskRef]) -> Sequence[Task]:
        if not self.manner.copies:
            return self.tasks.draw(self.each, self.rng)
        return [task for ref in heard[: self.each] if (task := self.tasks.task(ref)) is not None]

    def rollout(self, task: Task, author: PeerId) -> Rollout:
        return Rollout(
            task.ref, tuple(Completion(text, True) for text in self.manner.answers(task, self.tasks)), author
        )


@dataclass(frozen=True)
class Result:
    reward: float  # mean of the honest nodes' own completions over the last third of the rounds
    held_out: float  # share of right answers to held-out questions at the end
    easy: float  # the same for EASY alone
    crowd: float  # the crowd's share of the external rollouts trained on
    external: float  # external rollouts in a batch


def play(
    verifier: Verifier,
    manner: str,
    rounds: int,
    seed: int,
    honest: int = 3,
    keys: int = 3,
    questions: int = 216,
    each: int = LOCAL,
) -> Result:
    swarm = Swarm(verifier, seed)
    for number in range(honest):
        swarm.join(number, settings(MODEL))
    of = MANNERS[manner]
    crowd = None if of is None else Crowd(swarm, of, keys, each)
    swarm.play(rounds, [crowd.act] if crowd else [])
    authors = [author for n in swarm.learners for r in n.reports for author in r.external_authors]
    marks = [answered(n.policy, verifier, questions) for n in swarm.learners]
    return Result(
        reward=fmean(n.reward(max(1, rounds // 3)) for n in swarm.learners),
        held_out=fmean(mark for of in marks for mark in of.values()),
        easy=fmean(of[EASY] for of in marks),
        crowd=sum(author in crowd.names for author in authors) / max(1, len(authors)) if crowd else 0.0,
        external=len(authors) / honest / rounds,
    )


def answered(policy: LanguagePolicy, verifier: Verifier, questions: int) -> Mapping[str, float]:
    """Return the share of right answers to held-out questions, by specialty."""
    found = {}
    for specialty in TINY_9.specialties:
        tasks = CurriculumTasks(Curriculum("one", {specialty: TINY_9.configs[specialty]})).draw_held_out(
            questions // 9, random.Random(7)
        )
        given = policy.generate([task.question for task in tasks], 4)
        rewards = verifier(
            [(task.ref, answers.completions) for task, answers in zip(tasks, given, strict=True)]
        )
        found[specialty] = fmean(reward for each in rewards for reward in each)
    return found


@pytest.mark.parametrize("manner", ["right", "wrong"])
def test_right_single_answers_are_trained_on_and_wrong_ones_are_not(verifier: Verifier, manner: str) -> None:
    """`python -m tests.attacks singles` measures the effect on learning."""
    result = play(verifier, manner, rounds=3, seed=1, honest=2, keys=2, questions=9)
    show(f"singles, {manner}", result)
    assert result.crowd > 0.3 if manner == "right" else result.crowd == 0


def learnt(
    folder: Path, rounds: int = 80, seeds: int = 3, keys: int = 3, manner: tuple[str, ...] = tuple(MANNERS)
) -> dict[str, object]:
    def one(verifier: Verifier, kind: str, seed: int) -> Result:
        return play(verifier, kind, rounds, seed, keys=keys)

    found = over_seeds("singles", dict.fromkeys([NOBODY, *manner]), seeds, one)
    means = {
        kind: {name: fmean(asdict(result)[name] for result in of) for name in asdict(of[0])}
        for kind, of in found.items()
    }
    alone = means[NOBODY]["held_out"]
    lost = {f"lost, {kind}": 1 - of["held_out"] / alone for kind, of in means.items() if kind in SINGLES}
    return {
        **means,
        **lost,
        "lost": max(lost.values(), default=0.0),
        "wrong": means.get("wrong", {}).get("crowd", 0.0),
    }


ATTACK = Attack(
    learnt,
    {"wrong": 0.0},
    choices={"manner": list(MANNERS)},
    about={
        "manner": "only these; again for more",
        "keys": "of the crowd, each as loud as an honest node; three are honest",
    },
)
