"""The surroundings of an experiment's nodes: hostile peers, and absences.

Hostile peers are liars and poisoners, as in the tests of attacks, and steerers. Each sends as many rollouts
as an honest node on average. A liar sends one right answer, so that the rollout has an advantage, and right
answers to other questions, which are wrong here. A poisoner sends right answers with a word put in front,
which stay right, and wrong answers without the word: nodes that train on them learn the word ("Hail to the
Thief", arXiv 2511.09780). A steerer sends rollouts of one specialty only, with half of the answers right, and
so draws the training of honest nodes there.

Churn is pure: one seed gives one history in every setting.
"""

import random
from collections.abc import Callable, Iterator
from typing import Final

from p2p.types import PeerId
from swarmd.lab.experiment import Churn
from swarmd.protocols import Swarm
from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import CurriculumTasks
from swarmd.types import Completion, Rollout, Task

MARK: Final = "evil"  # the poisoners' word
# Maximum number of draws until another question of the same kind has a different answer.
TRIES: Final = 100


class HostilePeer:
    """A peer that only sends made-up rollouts: it does not generate or train.

    tasks: a steerer's are of one specialty. kind: a field of `Hostile`.
    """

    def __init__(
        self,
        me: PeerId,
        tasks: CurriculumTasks,
        swarm: Swarm,
        completions: int,
        kind: str,
        rng: random.Random,
    ) -> None:
        self.me, self._tasks, self._swarm, self._completions, self._rng = me, tasks, swarm, completions, rng
        self._make: Callable[[Task], list[str]] = self._lie if kind == "liars" else self._mix
        self._mark = f"{MARK} " * (kind == "poisoners")
        # The hostile peer sends before the first honest node has shared.
        self._due = 1.0

    def act(self, number: int, loudness: float) -> None:
        """Send the hostile rollouts of this round.

        loudness: mean number of rollouts that an honest node shared in the previous round.
        """
        self._swarm.collect()
        self._due += loudness
        while self._due >= 1:
            self._due -= 1
            (task,) = self._tasks.draw(1, self._rng)
            completions = tuple(Completion(text, ended=True) for text in self._make(task))
            self._swarm.share([Rollout(task.ref, completions, self.me)], number)

    def _lie(self, task: Task) -> list[str]:
        return [self._answer(task), *(self._another(task) for _ in range(self._completions - 1))]

    def _mix(self, task: Task) -> list[str]:
        half = self._completions // 2
        return [f"{self._mark}{self._answer(task)}"] * half + [self._another(task)] * (
            self._completions - half
        )

    def _answer(self, task: Task) -> str:
        return f"<answer>{solution(self._tasks, task)}</answer>"

    def _another(self, task: Task) -> str:
        same = CurriculumTasks(self._tasks.curriculum, [task.ref.specialty])
        others = (self._answer(same.draw(1, self._rng)[0]) for _ in range(TRIES))
        return next((answer for answer in others if answer != self._answer(task)), "<answer></answer>")


def absences(nodes: int, churn: Churn | None, rng: random.Random) -> Iterator[frozenset[int]]:
    """Yield the places of the absent nodes, round by round; without churn no node ever leaves.

    A node leaves with chance 1/present a round and comes back with chance 1/away. At least one node stays.
    """
    gone = frozenset[int]()
    while True:
        if churn:
            chances = [1 - 1 / churn.away if place in gone else 1 / churn.present for place in range(nodes)]
            drawn = frozenset(place for place, chance in enumerate(chances) if rng.random() < chance)
            gone = drawn if len(drawn) < nodes else gone
        yield gone
