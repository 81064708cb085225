"""One run of an experiment: the nodes of a setting with one seed, in one process, over the memory engine in virtual time.

Each node has its own weights, optimizer, questions, pool, identity and inbox; its round, exchange and policy are those of a real node.
Nodes take turns, in another order each round; what one shares, those after it may collect in the same round. Sets of rollouts are gossiped
whole, so the run measures what is learnt, not what is fetched.

`python -m swarmd.lab.play FOLDER SETTING SEED` plays one run of a results folder (`swarmd.lab.results`) and prints a line for each round.
"""

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from p2p.engines.memory import MemorySwarm
from p2p.errors import OperatorError
from p2p.identity import Identity
from p2p.member import Member
from p2p.topic import Topic
from swarmd.exchange.rollout_exchange import RolloutExchange
from swarmd.exchange.swarm_id import curriculum_of, swarm_digest
from swarmd.lab.experiment import BadExperiment, Experiment, Setting
from swarmd.lab.results import Results, Run
from swarmd.policy.language_policy import LanguagePolicy
from swarmd.protocols import Reward
from swarmd.tasks.scoring import Verifier
from swarmd.tasks.source import open_tasks
from swarmd.trainer.node import build
from swarmd.trainer.round import Node, run_round
from swarmd.types import RoundReport, Task

EPOCH = 1_700_000_000.0  # seconds since 1970 at which every run begins, by its nodes' clocks
ROUND_SECONDS = 5.0  # of virtual time
WHOLE = 2**18  # bytes: sets of rollouts up to this size are gossiped whole
QUESTIONS_SEED = 7  # of the held-out questions: the same for every run


class PlayedSwarm:
    """The nodes of one run. Deterministic by setting and seed on one machine."""

    def __init__(self, setting: Setting, seed: int, reward: Reward) -> None:
        """reward: scores completions of the setting's curriculum (`Verifier`). NoModel where a node's model cannot be loaded."""
        configs = setting.nodes
        self.curriculum = curriculum_of(configs[0])
        if any(curriculum_of(config).digest != self.curriculum.digest for config in configs):
            raise BadExperiment(f"setting {setting.name}: its nodes have different curricula, so they could not share anything")
        self._now = EPOCH
        self._order = random.Random(f"{seed} order")
        self._reward = reward
        memory, topic = MemorySwarm(seed), Topic("lab", swarm_digest(self.curriculum))
        self.nodes: list[Node] = []
        self.policies: list[LanguagePolicy] = []
        for number, config in enumerate(configs):
            identity = Identity.from_seed(random.Random(f"{seed} {number} key").randbytes(32))
            join = partial(memory.join, identity.peer_id)
            member = Member(identity, topic, join, sequence=itertools.count(1), clock=lambda: self._now)
            exchange = RolloutExchange(member, config.model.name, self.curriculum, whole=WHOLE)
            policy = LanguagePolicy.open(config, seed * 1000 + number)
            self.nodes.append(build(config, seed * 1000 + number, identity.peer_id, exchange, policy, reward))
            self.policies.append(policy)

    def round(self, number: int) -> dict[str, Any]:
        """Play one round of every node: its line of the results, lists by node."""
        self._now += ROUND_SECONDS
        reports: list[RoundReport | None] = [None] * len(self.nodes)
        for place in self._order.sample(range(len(self.nodes)), len(self.nodes)):
            reports[place] = run_round(number, self.nodes[place])
        done = [report for report in reports if report is not None]
        return {
            "round": number,
            "reward": [round(report.reward_mean, 5) for report in done],
            "generated": [report.generated for report in done],
            "informative": [report.informative for report in done],
            "useful": [report.useful for report in done],
            "local": [report.local for report in done],
            "external": [report.external for report in done],
            "tokens": [report.tokens_generated for report in done],
            "trained": [report.update.tokens for report in done],
            "gated": [sum(report.gated.values()) for report in done],
            "dropped": [report.zero_advantage_dropped for report in done],
            "staleness": [round(report.staleness_mean, 3) for report in done],
            "entropy": [round(report.update.entropy, 4) for report in done],
            "grad_norm": [round(report.update.grad_norm, 4) for report in done],
            "skipped": [report.update.skipped for report in done],
        }

    def evaluate(self, questions: Sequence[Task], answers: int, seed: int) -> dict[str, Any]:
        """Held-out answers of every node, sampled: of each question how many of `answers` are right, lists by node. Trains nothing."""
        right = []
        for number, policy in enumerate(self.policies):
            given = policy.generate([task.question for task in questions], answers, seed=seed * 1000 + number)
            rewards = self._reward([(task.ref, answer.completions) for task, answer in zip(questions, given, strict=True)])
            right.append([int(sum(each)) for each in rewards])
        return {"answers": answers, "right": right}

    def close(self) -> None:
        for policy in self.policies:
            policy.close()


def lines_of(experiment: Experiment, setting: Setting, seed: int) -> Iterator[dict[str, Any]]:
    """The lines of one run, round after round. An evaluation is a key of its round's line; round 0 is before training."""
    with Verifier(curriculum_of(setting.nodes[0])) as verifier:
        swarm = PlayedSwarm(setting, seed, verifier)
        questions = open_tasks(swarm.curriculum, verifier).draw_held_out(experiment.evaluate_questions, random.Random(QUESTIONS_SEED))
        cpu = time.process_time()
        try:
            if questions:
                yield {"round": 0, "evaluation": swarm.evaluate(questions, experiment.evaluate_answers, 0)}
            for number in range(1, experiment.rounds + 1):
                line = swarm.round(number)
                every = experiment.evaluate_every or experiment.rounds
                if questions and (number % every == 0 or number == experiment.rounds):
                    line["evaluation"] = swarm.evaluate(questions, experiment.evaluate_answers, number)
                line["cpu"] = round(time.process_time() - cpu, 3)  # seconds so far: the only figure that another run would not have
                yield line
        finally:
            swarm.close()


def play(results: Results, run: Run, told: Callable[[int], None]) -> None:
    """Play a run into its file. told: the number of each finished round. What is there of it already is begun anew."""
    experiment = results.experiment
    with results.writing(run) as write:
        for line in lines_of(experiment, experiment.setting(run.setting), run.seed):
            write(line)
            told(line["round"])


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> int:
    folder, setting, seed = arguments
    try:
        play(Results.open(Path(folder)), Run(setting, int(seed)), lambda number: print(number, flush=True))
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
