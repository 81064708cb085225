"""Sybil crowd: one attacker as 100 peers against 10 honest nodes, to fill what a node trains on and to crowd out what the others send.

The code is the real one: `p2p.member` with inbox, reputation and queue, the exchange, `swarmd.trainer.round` with pool, sampler and caps.
Played are the policy (it learns nothing), the rewards (a text that says it is right is) and where peers are. The rules are the
attacker's: every Sybil is connected to the victim, never breaks a rule that could be seen, and sends more than the honest do. His texts
are correct and new (he has the answers: ReasoningGYM is open), copies of what honest nodes sent, or garbage; his network groups few or
many. He comes when the honest have trained together for CALM rounds; or he is patient, and was there from the first round as if honest.

Where it breaks, and the figures say so: patient Sybils earn standing with rollouts that really were useful. Then they are as good as
anyone, and what is left is the cap of a quarter of the choice for each network group: in one group they get one in eight of a batch,
with many groups what their number is worth. What they then send is still scored by us, and looked at by the gate.
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

from p2p.engines.memory import MemoryEngine, MemorySwarm
from p2p.envelope import seal
from p2p.identity import Identity
from p2p.types import Handlers, Peer, PeerId
from swarmd.config.config import NodeConfig
from swarmd.exchange import wire
from swarmd.exchange.rollout_exchange import RolloutExchange
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.source import CurriculumTasks
from swarmd.testing import TOPIC, Clock, PlayedPolicy, memory_member
from swarmd.trainer.node import build
from swarmd.trainer.round import run_round
from swarmd.types import Completion, Rollout, TaskRef
from tests.attacks import test_sybil_offers
from tests.attacks.harness import Attack, Shares, show, worst

HONEST, SYBILS = 10, 100
ROUND = 30.0  # seconds
CALM = 25  # rounds
ATTACKED = 30  # rounds
COMPLETIONS = 4


def texts(number: object, *, useful: bool) -> list[str]:
    return [f"{'right' if useful and n % 2 else 'wrong'} {number} {n}" for n in range(COMPLETIONS)]


def rewards(items: Sequence[tuple[TaskRef, Sequence[Completion]]]) -> Sequence[tuple[float, ...]]:
    return [tuple(float(c.text.startswith("right")) for c in completions) for _, completions in items]


class Placed(MemoryEngine):
    """A memory engine that says where its peers are."""

    def __init__(self, swarm: MemorySwarm, where: Mapping[PeerId, str], me: PeerId, handlers: Handlers) -> None:
        super().__init__(swarm, me, handlers)
        self.where = where

    def peers(self) -> Sequence[Peer]:
        return [Peer(peer, address, "inbound", 0.0) for peer, address in self.where.items()]


class Listened(RolloutExchange):
    """Remembers who was heard."""

    heard: Counter[PeerId]

    def collect(self) -> tuple[Sequence[Rollout], Mapping[str, int]]:
        rollouts, refused = super().collect()
        self.heard.update(rollout.author for rollout in rollouts)
        return rollouts, refused


@dataclass
class Result(Shares):
    external: list[int] = field(default_factory=list)  # rollouts of others in it
    sent: int = 0  # by honest nodes
    delivered: int = 0
    standing: int = 0  # Sybils that have earned it, at the end

    @property
    def delivery(self) -> float:
        return self.delivered / self.sent


class World:
    def __init__(self, groups: int, text: str, rate: int, seed: int, hidden: bool) -> None:
        self.rng, self.text, self.rate, self.clock = random.Random(seed), text, rate, Clock()
        self.honest = [Identity.from_seed(self.rng.randbytes(32)) for _ in range(HONEST)]
        self.sybils = [Identity.from_seed(self.rng.randbytes(32)) for _ in range(SYBILS)]
        where = {peer.peer_id: f"/ip4/{20 + n}.1.1.1/tcp/4001" for n, peer in enumerate(self.honest)}
        if not hidden:
            where |= {peer.peer_id: f"/ip4/{100 + n % groups}.1.1.1/tcp/4001" for n, peer in enumerate(self.sybils)}
        self.numbers, self.swarm, me = itertools.count(1), MemorySwarm(), Identity.from_seed(b"v" * 32)
        self.victim = memory_member(self.swarm, me, self.clock, engine=partial(Placed, self.swarm, where, me.peer_id))
        config = NodeConfig.model_validate({"round": {"completions": COMPLETIONS}, "gate": {"mode": "off"}})
        self.exchange = Listened(self.victim, "played", TINY_9)
        self.exchange.heard = Counter()
        self.said = itertools.count()
        policy = PlayedPolicy(lambda _: texts(next(self.said), useful=True))
        self.node = build(config, seed, me.peer_id, self.exchange, policy, rewards)
        self.tasks = CurriculumTasks(TINY_9)

    def send(self, author: Identity, ref: TaskRef, said: Sequence[str], result: Result | None = None) -> None:
        completions = tuple(Completion(text, ended=True) for text in said)
        body = wire.encode([Rollout(ref, completions, author.peer_id)], 1, "played")
        self.swarm.inject(seal(author, TOPIC.swarm_id, next(self.numbers), self.clock(), wire.KIND, body), author.peer_id)
        if result is not None:
            result.sent += 1

    def round(self, number: int, *, sybils: bool, result: Result) -> None:
        """All send, in a random order; then the victim's round."""
        made = [(task.ref, texts(next(self.numbers), useful=self.rng.random() < 0.5)) for task in self.tasks.draw(40, self.rng)]
        sending = [(self.honest[n % HONEST], n) for n in range(40)] + [(s, -1) for s in self.sybils * self.rate if sybils]
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
        result.shares.append(sum(author in his for author in report.external_authors) / (report.local + report.external))
        result.external.append(report.external)
        self.clock.now += ROUND


def crowd(
    groups: int = 100, text: str = "correct", rate: int = 8, *, patient: bool = False, hidden: bool = False, seed: int = 1,
    calm: int = CALM, attacked: int = ATTACKED,
) -> Result:  # fmt: skip
    """rate: rollouts that each Sybil sends in a round; the honest send four. hidden: the victim never learns where the Sybils are."""
    world = World(groups, text, 4 if patient else rate, seed, hidden)
    for number in range(1, calm + 1):
        world.round(number, sybils=patient, result=Result())
    world.rate, result = rate, Result()
    for number in range(calm + 1, calm + attacked + 1):
        world.round(number, sybils=True, result=result)
    reputation = world.victim.reputation
    result.standing = sum(reputation.settled(world.clock()) and reputation.established(s.peer_id, world.clock()) for s in world.sybils)
    whence = "unknown" if hidden else groups
    show(f"sybil, {SYBILS} against {HONEST} honest, {text} text, {rate} rollouts a round each, groups {whence}, patient {patient}", result)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("groups, text, rate", [(100, "correct", 8), (4, "copied", 8), (1, "garbage", 8), (100, "correct", 40)])
def test_a_crowd_that_comes_gets_no_more_than_a_sixth_of_any_batch_and_crowds_nobody_out(groups: int, text: str, rate: int) -> None:
    result = crowd(groups, text, rate, calm=CALM, attacked=6)
    assert result.most <= 0.15 and result.mean <= 0.125
    assert result.delivery >= 0.99
    assert fmean(result.external) > 3  # and the batch is no smaller for it


@pytest.mark.slow
def test_a_patient_crowd_in_one_group_gets_no_more_than_its_share() -> None:
    result = crowd(1, "correct", 8, patient=True, attacked=6)
    assert result.standing == SYBILS and result.most <= 0.15 and result.delivery >= 0.99


def test_the_same_seed_is_the_same_run() -> None:
    runs = [crowd(2, "correct", 2, calm=2, attacked=2) for _ in range(2)]
    assert runs[0] == runs[1]


def attack(folder: Path, seed: int = 1, attacked: int = ATTACKED) -> dict[str, float]:
    """attacked: rounds of the attack."""
    play = partial(crowd, seed=seed, attacked=attacked)
    came = {f"{kind}, groups {many}": play(many, kind) for many in (1, 4, 100) for kind in ("correct", "copied", "garbage")}
    came["correct, 40 rollouts a round"] = play(100, "correct", 40)
    patient = {f"patient, groups {many}": play(many, patient=True) for many in (1, 4, 100)}
    patient["patient, groups unknown"] = play(100, patient=True, hidden=True)
    offers = {f"offers of {many}": test_sybil_offers.crowd(many, seed=seed) for many in (100, 300)}
    return {
        "share_of_a_batch": max(worst(came, "most"), worst(offers, "most")),
        "share_mean": max(worst(came, "mean"), worst(offers, "mean")),
        "honest_lost": 1 - min(result.delivery for result in came.values()),
        **{f"share_of_a_batch, {name}": result.most for name, result in patient.items()},
    }


ATTACK = Attack(attack, {"share_of_a_batch": 0.15, "honest_lost": 0.01}, about={"attacked": "rounds of the attack"})
