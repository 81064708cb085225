"""Sybil crowd: one attacker acts as 100 peers against 10 honest nodes, to fill a node's batches and to
displace the other nodes' rollouts.

The code is the product's: `p2p.member` with inbox, reputation and queue, the exchange, `swarmd.trainer.round`
with pool, sampler and caps. The test simulates the policy (it learns nothing), the rewards (a text is right
if it says so) and the peers' addresses. Every Sybil is connected to the victim, breaks no rule visibly, and
sends more than an honest node. Its texts are correct and new (the answers are public in ReasoningGYM), copies
of honest nodes' rollouts, or garbage. The Sybils are in few or many network groups, or on one machine of the
honest nodes' local network, or the victim never learns their addresses.

The attacker's share follows from its addresses: each of its network groups gets as much as an honest node,
and one group never gets more than a quarter of a choice. The figures show the limits of this defence: an
attacker with as many network groups as the honest nodes has half of the external rollouts. Each node still
scores these rollouts itself, and the gate checks them.
"""

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest

from p2p.engines.memory import MemorySwarm
from p2p.envelope import seal
from p2p.identity import Identity
from p2p.types import PeerId
from swarmd.config.config import NodeConfig
from swarmd.exchange import wire
from swarmd.exchange.virtual import VirtualNode
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.source import CurriculumTasks
from swarmd.trainer.node import build
from swarmd.trainer.round import run_round
from swarmd.types import Completion, Rollout, TaskRef
from tests.attacks import test_sybil_offers
from tests.attacks.harness import Attack, Shares, show, worst
from tests.doubles import TOPIC, Clock, memory_node
from tests.p2p.admission.test_reputation import Placed
from tests.played import PlayedPolicy

HONEST, SYBILS = 10, 100
ROUND = 30.0  # seconds
ROUNDS = 30
# Addresses of the Sybils: one machine on the honest nodes' local network; addresses that the victim never
# learns.
LAN, HIDDEN = "lan", "unknown"
COMPLETIONS = 4


def texts(number: object, *, useful: bool) -> list[str]:
    return [f"{'right' if useful and n % 2 else 'wrong'} {number} {n}" for n in range(COMPLETIONS)]


def rewards(items: Sequence[tuple[TaskRef, Sequence[Completion]]]) -> Sequence[tuple[float, ...]]:
    return [tuple(float(c.text.startswith("right")) for c in completions) for _, completions in items]


class Listened(VirtualNode):
    """A node that counts the rollouts it received, by author."""

    heard: Counter[PeerId]

    def collect(self) -> tuple[Sequence[Rollout], Mapping[str, int]]:
        rollouts, refused = super().collect()
        self.heard.update(rollout.author for rollout in rollouts)
        return rollouts, refused


@dataclass
class Result(Shares):
    external: list[int] = field(default_factory=list)  # other nodes' rollouts in each batch
    sent: int = 0  # frames that honest nodes sent
    delivered: int = 0

    @property
    def delivery(self) -> float:
        return self.delivered / self.sent


class World:
    def __init__(self, groups: int | str, text: str, rate: int, seed: int) -> None:
        self.rng, self.text, self.rate, self.clock = random.Random(seed), text, rate, Clock()
        self.honest = [Identity(self.rng.randbytes(32)) for _ in range(HONEST)]
        self.sybils = [Identity(self.rng.randbytes(32)) for _ in range(SYBILS)]
        home = "192.168.1.{}" if groups == LAN else "{}.1.1.1"
        where = {peer.peer_id: f"/ip4/{home.format(20 + n)}/tcp/4001" for n, peer in enumerate(self.honest)}
        if groups != HIDDEN:
            many = groups if isinstance(groups, int) else 1
            where |= {
                peer.peer_id: f"/ip4/{home.format(100 + n % many)}/tcp/4001"
                for n, peer in enumerate(self.sybils)
            }
        self.numbers, self.swarm, me = itertools.count(1), MemorySwarm(), Identity(b"v" * 32)
        config = NodeConfig.model_validate({"round": {"completions": COMPLETIONS}, "gate": {"mode": "off"}})
        engine = partial(Placed, self.swarm, where, [], me.peer_id)
        node = memory_node(self.swarm, me, self.clock, config=config, engine=engine, node=Listened)
        assert isinstance(node, Listened)
        self.exchange, self.victim = node, node.member
        self.exchange.heard = Counter()
        self.said = itertools.count()
        policy = PlayedPolicy(lambda _: texts(next(self.said), useful=True))
        self.node = build(config, seed, me.peer_id, self.exchange, policy, rewards)
        self.tasks = CurriculumTasks(TINY_9)

    def send(self, author: Identity, ref: TaskRef, said: Sequence[str], result: Result | None = None) -> None:
        completions = tuple(Completion(text, ended=True) for text in said)
        body = wire.encode([Rollout(ref, completions, author.peer_id)], 1, "played")
        self.swarm.inject(
            seal(author, TOPIC.swarm_id, next(self.numbers), self.clock(), wire.KIND, body), author.peer_id
        )
        if result is not None:
            result.sent += 1

    def round(self, number: int, result: Result) -> None:
        """Let all authors send, in a random order; then play the victim's round."""
        made = [
            (task.ref, texts(next(self.numbers), useful=self.rng.random() < 0.5))
            for task in self.tasks.draw(40, self.rng)
        ]
        sending = [(self.honest[n % HONEST], n) for n in range(40)] + [
            (s, -1) for s in self.sybils * self.rate
        ]
        refs = iter(self.tasks.draw(len(sending), self.rng))
        for author, n in self.rng.sample(sending, len(sending)):
            if n >= 0:
                self.send(author, *made[n], result)
            elif self.text == "copied":
                self.send(author, *self.rng.choice(made))
            else:
                self.send(author, next(refs).ref, texts(next(self.numbers), useful=self.text == "correct"))
        before = sum(self.exchange.heard[a.peer_id] for a in self.honest)
        report = run_round(number, self.node)
        result.delivered += sum(self.exchange.heard[a.peer_id] for a in self.honest) - before
        his = {a.peer_id for a in self.sybils}
        result.shares.append(
            sum(author in his for author in report.external_authors) / (report.local + report.external)
        )
        result.external.append(report.external)
        self.clock.now += ROUND


def crowd(
    groups: int | str = 100, text: str = "correct", rate: int = 8, *, seed: int = 1, rounds: int = ROUNDS
) -> Result:
    """Play the attack. groups: number of network groups of the Sybils, or LAN or HIDDEN.

    rate: rollouts that each Sybil sends in a round; an honest node sends four.
    """
    world, result = World(groups, text, rate, seed), Result()
    for number in range(1, rounds + 1):
        world.round(number, result)
    show(
        f"sybil, {SYBILS} against {HONEST} honest, {text} text, {rate} rollouts a round each, groups"
        f" {groups}",
        result,
    )
    return result


def fair(groups: int) -> float:
    """Return the fair share of a batch for `groups` hostile groups; half of the batch is external."""
    return groups / (HONEST + groups) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "groups, text, rate, rounds",
    [(1, "correct", 8, 8), (LAN, "correct", 40, 4), (4, "copied", 8, 24), (1, "garbage", 8, 8)],
)
def test_a_crowd_gets_only_its_groups_share_and_displaces_nobody(
    groups: int | str, text: str, rate: int, rounds: int
) -> None:
    result = crowd(groups, text, rate, rounds=rounds)
    assert result.mean <= fair(groups if isinstance(groups, int) else 1) + 0.06
    assert result.delivery >= 0.99
    assert fmean(result.external) > 3  # the batch is no smaller than usual


def test_authors_of_unknown_groups_get_at_most_half_of_a_choice() -> None:
    assert crowd(HIDDEN, rounds=6).most <= 0.25


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [crowd(2, "correct", 2, rounds=2) for _ in range(2)]
    assert runs[0] == runs[1]


def attack(folder: Path, seed: int = 1, rounds: int = ROUNDS) -> dict[str, float]:
    few = {
        (groups, text): crowd(groups, text, seed=seed, rounds=rounds)
        for groups in (1, 4)
        for text in ("correct", "copied", "garbage")
    }
    few[LAN, "correct"] = crowd(LAN, "correct", 40, seed=seed, rounds=rounds)
    many = {groups: crowd(groups, seed=seed, rounds=rounds) for groups in (64, HIDDEN)}
    offers = {f"offers of {count}": test_sybil_offers.crowd(count, seed=seed) for count in (100, 300)}
    over = {
        f"{groups} {text}": result.mean - fair(groups if isinstance(groups, int) else 1)
        for (groups, text), result in few.items()
    }
    return {
        "share_over_fair": max(over.values()),
        "share_of_offers": worst(offers, "mean"),
        "honest_lost": 1 - min(result.delivery for result in few.values()),
        **{f"share_of_a_batch, groups {groups}": result.mean for groups, result in many.items()},
    }


ATTACK = Attack(attack, {"share_over_fair": 0.06, "share_of_offers": 0.11, "honest_lost": 0.01})
