"""Swarms of tiny models in one process, for attacks on learning.

Members, rounds, verifier and updates are real; only time is simulated.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from p2p.engines.memory import MemorySwarm
from p2p.identity import Identity
from swarmd.config.config import NodeConfig
from swarmd.exchange.virtual import VirtualNode
from swarmd.experience.batch import BatchBuilder
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import CurriculumTasks
from swarmd.trainer.node import build
from swarmd.trainer.parts import RoundParts
from swarmd.trainer.round import run_round
from swarmd.types import Rollout, RoundReport, Scored
from tests.attacks.harness import show
from tests.doubles import Clock, gossip, memory_node

ROUND = 30.0  # seconds that a round lasts on the members' clock
LOCAL, EXTERNAL, COMPLETIONS = 4, 4, 8


def settings(model: str = "tiny", **sections: dict[str, object]) -> NodeConfig:
    """Return a node's usual settings for these tests; `sections` override them."""
    rounds = {"local": LOCAL, "external": EXTERNAL, "completions": COMPLETIONS}
    return NodeConfig.model_validate(
        {"model": {"name": model, "device": "cpu", "threads": 1}, "round": rounds, **sections}
    )


class OneByOne(VirtualNode):
    """A node that gossips each rollout whole, in a separate frame."""

    def share(self, rollouts: Sequence[Rollout], round_number: int) -> None:
        super().share([], round_number)
        for rollout in rollouts:
            gossip(self.member, [rollout], round_number)


R = TypeVar("R")


def over_seeds(
    name: str, kinds: Iterable[str], seeds: int, play: Callable[[Verifier, str, int], R]
) -> dict[str, list[R]]:
    """Play each kind with each seed; show and return the outcomes."""
    found: dict[str, list[R]] = {kind: [] for kind in kinds}
    with Verifier(TINY_9.name) as verifier:
        for seed in range(1, seeds + 1):
            for kind, results in found.items():
                results.append(play(verifier, kind, seed))
                show(f"{name}, seed {seed}, {kind}", results[-1])
    return found


@dataclass
class Learner:
    """An honest node and the reports of its rounds."""

    node: RoundParts
    policy: LanguagePolicy
    reports: list[RoundReport] = field(default_factory=list)
    # CPU seconds in which this process chose the node's batches, the gate's checks included.
    choosing: float = 0.0

    def reward(self, last: int) -> float:
        """Return the mean reward of the node's completions over the last `last` rounds."""
        return fmean(r.reward_mean or 0.0 for r in self.reports[-last:])

    @property
    def external(self) -> int:
        return sum(r.external for r in self.reports)

    @property
    def seconds(self) -> float:
        """Return the CPU seconds of all the node's rounds, without the verifier's process."""
        return sum(sum(r.seconds.values()) for r in self.reports)

    @property
    def gated(self) -> Counter[str]:
        return sum((Counter(r.gated) for r in self.reports), Counter())


@dataclass(frozen=True, kw_only=True)
class _Timed(BatchBuilder):
    """Adds the CPU time of building batches to `learner.choosing`; calls `swarm.batches` with each batch."""

    learner: Learner
    swarm: "Swarm"

    def __call__(self, local: Sequence[Scored], rng: random.Random) -> Sequence[Scored]:
        begun = time.process_time()
        batch = super().__call__(local, rng)
        self.learner.choosing += time.process_time() - begun
        self.swarm.batches(batch)
        return batch


@dataclass
class Swarm:
    """Members of one MemorySwarm. Each joins with a different number, from which its seed is derived."""

    verifier: Verifier
    seed: int
    memory: MemorySwarm = field(default_factory=MemorySwarm)
    clock: Clock = field(default_factory=Clock)
    learners: list[Learner] = field(default_factory=list)
    rounds: int = 0  # rounds played so far
    # Called with every batch that is trained on.
    batches: Callable[[Sequence[Scored]], None] = lambda batch: None

    def node(self, number: int, config: NodeConfig | None = None) -> OneByOne:
        identity = Identity(f"{self.seed} {number}".encode().ljust(32, b"."))
        node = memory_node(self.memory, identity, self.clock, config=config, node=OneByOne)
        assert isinstance(node, OneByOne)
        return node

    def join(self, number: int, config: NodeConfig, start: Path | None = None) -> Learner:
        """Add a learner. start: folder of a saved policy; None: the published model."""
        node, seed = self.node(number, config), 1000 * self.seed + number
        policy = LanguagePolicy.open(config, seed)
        if start is not None:
            policy.restore(start)
        learner = Learner(
            build(config, seed, node.member.identity.peer_id, node, policy, self.verifier, time.process_time),
            policy,
        )
        learner.node = replace(
            learner.node, build_batch=_Timed(**vars(learner.node.build_batch), learner=learner, swarm=self)
        )
        self.learners.append(learner)
        return learner

    def play(self, rounds: int, others: Sequence[Callable[[int], None]] = ()) -> None:
        """Play rounds. others: actions of members that do not learn, called before each learners' round."""
        for _ in range(rounds):
            self.rounds += 1
            for act in others:
                act(self.rounds)
            for learner in self.learners:
                learner.reports.append(run_round(self.rounds, learner.node))
            self.clock.now += ROUND


def completions(policy: LanguagePolicy, questions: int, samples: int, seed: int = 0) -> list[str]:
    """Return a policy's answers to held-out questions, sampled at the policy's temperature."""
    tasks = CurriculumTasks(TINY_9).draw_held_out(questions, random.Random(seed))
    return [
        c.text for g in policy.generate([task.question for task in tasks], samples) for c in g.completions
    ]
