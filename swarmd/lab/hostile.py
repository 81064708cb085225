"""Hostile peers of an experiment.

Liars and poisoners, as in the tests of attacks, each as loud as an honest node is on average.

liar      one right answer, so that the rollout has an advantage, and right answers to other questions, which
are wrong here.
poisoner  right answers with a word put in front, which stay right, and clean wrong ones: the word is learnt
by whoever trains on them
          ("Hail to the Thief", arXiv 2511.09780).
"""

import random
from collections.abc import Callable
from typing import Final

from p2p.types import PeerId
from swarmd.protocols import Swarm
from swarmd.tasks.grading import solution
from swarmd.tasks.source import CurriculumTasks
from swarmd.types import Completion, Rollout, Task

MARK: Final = "evil"  # the poison
TRIES: Final = 100  # draws of another question of the same kind with another answer


class HostilePeer:
    """Answers nothing and trains on nothing; sends rollouts it made up."""

    def __init__(
        self,
        me: PeerId,
        tasks: CurriculumTasks,
        swarm: Swarm,
        completions: int,
        poisons: bool,
        rng: random.Random,
    ) -> None:
        self.me, self._tasks, self._swarm, self._completions, self._rng = me, tasks, swarm, completions, rng
        self._make: Callable[[Task], list[str]] = self._poison if poisons else self._lie
        # The hostile peer is present before the first honest one.
        self._due = 1.0

    def act(self, number: int, loudness: float) -> None:
        """Send what a hostile peer sends in this round.

        loudness: rollouts that an honest node shared in the round before, on average.
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

    def _poison(self, task: Task) -> list[str]:
        half = self._completions // 2
        return [f"{MARK} {self._answer(task)}"] * half + [self._another(task)] * (self._completions - half)

    def _answer(self, task: Task) -> str:
        return f"<answer>{solution(self._tasks, task)}</answer>"

    def _another(self, task: Task) -> str:
        """Return the right answer to another question of the same specialty."""
        same = CurriculumTasks(self._tasks.curriculum, [task.ref.specialty])
        others = (self._answer(same.draw(1, self._rng)[0]) for _ in range(TRIES))
        return next((answer for answer in others if answer != self._answer(task)), "<answer></answer>")
