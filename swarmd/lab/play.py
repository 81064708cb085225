"""One run of an experiment: the nodes of a setting with one seed, in one process, in virtual time.

The network is the memory engine. Each node has its own weights, optimizer, questions, pool, identity and
inbox, and runs the same code for round, exchange and policy as a real node. Nodes take turns, in a new order
each round; a node may collect rollouts that were shared earlier in the same round. Nodes offer their sets of
rollouts and fetch the chosen ones (`swarmd.exchange.virtual`); a setting may gossip whole sets instead.

`python -m swarmd.lab.play FOLDER SETTING SEED` plays one run of a results folder (`swarmd.lab.results`) and
prints a line for each round. An interrupted run starts again from the beginning.
"""

import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from p2p.engines.memory import MemorySwarm
from p2p.identity import Identity
from p2p.topic import Topic
from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.config.own_strategy import load_take
from swarmd.exchange.exchange import Exchange
from swarmd.exchange.swarm_id import curriculum_of, swarm_digest
from swarmd.exchange.virtual import VirtualNode
from swarmd.lab.experiment import BadExperiment, Evaluation, Experiment, Hostile, Setting
from swarmd.lab.parent_watch import run_program, tell_round
from swarmd.lab.results import MEMORY, Results, Run
from swarmd.lab.surroundings import MARK, HostilePeer, absences
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.protocols import Reward
from swarmd.tasks.curriculum import DrawnTasks
from swarmd.tasks.own_tasks import OwnCurriculum
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import CurriculumTasks, open_tasks
from swarmd.trainer.node import build
from swarmd.trainer.parts import RoundParts
from swarmd.trainer.round import run_round
from swarmd.types import RoundReport, Task

# Start time of every run by its nodes' clocks, in seconds since 1970.
EPOCH_S = 1_700_000_000.0
# Virtual seconds of a round.
ROUND_S = 5.0
# Sets up to this size are gossiped whole, if the setting gossips whole sets.
WHOLE_BYTES = 2**18
# The report of a node that is away.
NOTHING = RoundReport(round=0)
# The seed of the held-out questions, the same for every run.
QUESTIONS_SEED = 7


class PlayedSwarm:
    """The nodes of one run. On one machine a run depends on setting and seed alone."""

    def __init__(
        self, setting: Setting, seed: int, reward: Reward, network: MemorySwarm | None = None,
        node: Callable[..., VirtualNode] = VirtualNode, places: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        """Build the nodes of one setting.

        Args:
            reward: scores completions of the setting's curriculum (`Verifier`).
            places: of the nodes that are played here; None for all.

        Raises:
            NoModel: a node's model cannot be loaded.
        """
        configs = setting.nodes
        self.curriculum = curriculum_of(configs[0])
        curricula = [curriculum_of(config) for config in configs]
        if any(one.scoring != self.curriculum.scoring for one in curricula):
            names = ", ".join(sorted({one.name for one in curricula}))
            raise BadExperiment(
                f"setting {setting.name}: its nodes have different curricula or rewards ({names}); a run has"
                " one. Set swarm.curriculum and tasks.reward in [base]."
            )
        if setting.hostile != Hostile() and isinstance(self.curriculum, OwnCurriculum):
            raise BadExperiment(
                f"setting {setting.name}: hostile peers know no right answers to own tasks. Leave"
                " `hostile` out."
            )
        self._now = EPOCH_S
        self._order = random.Random(f"{seed} order")
        self._reward = reward
        self._memory, self._topic, self._seed = (
            network or MemorySwarm(),
            Topic("lab", swarm_digest(self.curriculum)),
            seed,
        )
        self._node = node
        self._places = sorted(range(len(configs)) if places is None else places)
        self.ids = [self._identity(number).peer_id for number in range(len(configs))]
        self.cpu = [0.0] * len(configs)  # CPU seconds of each node's rounds so far
        self._absences = absences(len(configs), setting.churn, random.Random(f"{seed} absences"))
        self._loudness = 0.0  # rollouts that a node shared in the last round, on average
        self.nodes: list[RoundParts] = []
        self.policies: list[LanguagePolicy] = []
        self._joined: list[VirtualNode] = []
        for number in self._places:
            config = configs[number]
            load_take(config.sharing.take)
            joined = self._join(number, config, whole=setting.whole)
            policy = LanguagePolicy.open(config, seed * 1000 + number)
            self.nodes.append(build(config, seed * 1000 + number, self.ids[number], joined, policy, reward))
            self._joined.append(joined)
            self.policies.append(policy)
        kinds = [kind for kind, count in setting.hostile for _ in range(count)]
        self.hostile = [
            HostilePeer(
                self._identity(number).peer_id,
                CurriculumTasks(
                    self.curriculum, self.curriculum.specialties[:1] if kind == "steerers" else ()
                ),
                self._join(number, configs[0], whole=setting.whole),
                self.nodes[0].completions,
                kind,
                random.Random(f"{self._seed} {number} hostile"),
            )
            for number, kind in enumerate(kinds, len(configs))
        ]

    def _identity(self, number: int) -> Identity:
        return Identity(random.Random(f"{self._seed} {number} key").randbytes(32))

    def _join(self, number: int, config: NodeConfig, *, whole: bool) -> VirtualNode:
        identity, rng = self._identity(number), random.Random(f"{self._seed} {number} offers")
        exchange = Exchange(
            self.curriculum, config.round, config.sharing, config.model.name, rng, WHOLE_BYTES if whole else 0
        )
        return self._node(
            exchange, identity, self._topic, partial(self._memory.join, identity.peer_id), lambda: self._now
        )

    def round(self, number: int) -> dict[str, Any]:
        """Play one round of every node. Returns its line of the results, with lists by node."""
        self._now += ROUND_S
        gone = next(self._absences)
        self._memory.partition(*({self.ids[place]} for place in sorted(gone)))
        for peer in self.hostile:
            peer.act(number, self._loudness)
        reports = self._reports(number, gone)
        self._loudness = sum(report.informative for report in reports) / len(reports)
        return line_of(number, reports, {peer.me for peer in self.hostile})

    def _reports(self, number: int, gone: Collection[int]) -> Sequence[RoundReport]:
        """Play the round of every node that is not gone, and return the reports of all nodes."""
        reports: list[RoundReport] = [NOTHING] * len(self.nodes)
        for place in self._order.sample(range(len(self.nodes)), len(self.nodes)):
            if place not in gone:
                self._joined[place].pass_rates = self.nodes[place].sharing.pass_rates
                begun = time.process_time()
                reports[place] = run_round(number, self.nodes[place])
                self.cpu[place] += time.process_time() - begun
        return reports

    def evaluate(
        self, questions: Sequence[Task], wanted: Evaluation, seed: int, scored: Reward | None = None
    ) -> dict[str, Any]:
        """Sample every node's answers to held-out questions; return how many are right.

        The lists are by node, then by question. Nothing is trained. scored: decides which answers are right,
        if nodes have different rewards.
        """
        right, marked = [], []
        for number, policy in zip(self._places, self.policies, strict=True):
            given = policy.generate(
                [task.question for task in questions],
                wanted.answers,
                observe=self.nodes[0].tasks.observer([task.ref for task in questions]),
                seed=seed * 1000 + number,
                temperature=wanted.temperature,
            )
            rewards = (scored or self._reward)(
                [(task.ref, answer.completions) for task, answer in zip(questions, given, strict=True)]
            )
            right.append([sum(reward >= 1 for reward in each) for each in rewards])
            marked.append(
                sum(MARK in completion.text for answer in given for completion in answer.completions)
            )
        return {"answers": wanted.answers, "right": right} | ({"marked": marked} if self.hostile else {})

    def close(self) -> None:
        for policy in self.policies:
            policy.close()


def line_of(number: int, reports: Sequence[RoundReport], hostile: Collection[PeerId]) -> dict[str, Any]:
    line: dict[str, Any] = {
        "round": number,
        # A node that is present and asks no question has reward 0; an absent one has None.
        "reward": [None if report == NOTHING else round(report.reward_mean or 0.0, 5) for report in reports],
        "generated": [report.generated for report in reports],
        "informative": [report.informative for report in reports],
        "in_form": [report.answers and report.answers.in_form for report in reports],
        "updates": [report.updates for report in reports],
        "useful": [report.useful for report in reports],
        "local": [report.local for report in reports],
        "external": [report.external for report in reports],
        "tokens": [report.tokens.generated for report in reports],
        "trained": [report.tokens.trained for report in reports],
        "gated": [sum(report.gated.values()) for report in reports],
        "unfit": [sum(report.unfit.values()) for report in reports],
        "dropped": [report.zero_advantage_dropped for report in reports],
        "off_policy": [round(report.off_policy.mean, 3) for report in reports],
        "staleness": [round(report.staleness.mean, 3) for report in reports],
        # Entropy is measured on the trained tokens.
        "entropy": [round(report.entropy or 0.0, 4) if report.tokens.trained else None for report in reports],
        "grad_norm": [round(report.grad_norm or 0.0, 4) for report in reports],
        "skipped": [report.skipped for report in reports],
    }
    if hostile:
        line["hostile"] = [sum(author in hostile for author in report.external_authors) for report in reports]
    return line


def held_out(tasks: DrawnTasks, wanted: Evaluation) -> Sequence[Task]:
    """Draw the questions of an evaluation. Raises ConfigError if the curriculum lacks a specialty."""
    rng, asked = random.Random(QUESTIONS_SEED), tasks.curriculum.asked(wanted.specialties)
    drawn: list[Task] = []
    while missing := wanted.questions - len(drawn):
        drawn += [task for task in tasks.draw_held_out(missing, rng) if task.ref.specialty in asked]
    return drawn


def lines_of(
    experiment: Experiment, setting: Setting, seed: int,
    made: Callable[[Setting, int, Reward], PlayedSwarm] = PlayedSwarm,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Play one run and yield its lines, one a round.

    An evaluation is a key of its round's line; round 0 is before training.
    """
    curriculum = curriculum_of(setting.nodes[0])
    with ExitStack() as stack:
        verifier = scored = stack.enter_context(Verifier(curriculum))
        if curriculum.own_reward:
            scored = stack.enter_context(Verifier(replace(curriculum, own_reward=None)))
        swarm = made(setting, seed, verifier)
        wanted = experiment.evaluation
        questions = held_out(open_tasks(swarm.curriculum, verifier), wanted)
        try:
            if questions:
                yield {"round": 0, "evaluation": swarm.evaluate(questions, wanted, 0, scored)}
            for number in range(1, experiment.rounds + 1):
                line = swarm.round(number)
                every = wanted.every or experiment.rounds
                if questions and (number % every == 0 or number == experiment.rounds):
                    line["evaluation"] = swarm.evaluate(questions, wanted, number, scored)
                # CPU time is the only figure that differs when the run is played again.
                line["cpu"] = [round(seconds, 3) for seconds in swarm.cpu]
                yield line
        finally:
            swarm.close()


def play(
    results: Results, run: Run, told: Callable[[int], None],
    made: Callable[[Setting, int, Reward], PlayedSwarm] = PlayedSwarm, engine: str = MEMORY,
) -> None:  # fmt: skip
    """Play a run and write its file. Raises BadResults if it is not comparable with the folder's other runs.

    told: called with the number of each finished round.
    """
    experiment = results.experiment
    # Own tasks, rewards and strategies may have been changed since the earlier runs were played.
    results.resume(experiment, engine)
    with results.writing(run) as append:
        for line in lines_of(experiment, experiment.setting(run.setting), run.seed, made):
            append(line)
            told(line["round"])


def main(folder: str, setting: str, seed: str) -> None:
    play(Results.open(Path(folder)), Run(setting, int(seed)), tell_round)


if __name__ == "__main__":
    run_program(main)
