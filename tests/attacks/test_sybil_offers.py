"""A Sybil crowd in a swarm that offers and fetches rollouts.

The Sybils try to fill a node's fetches, or to displace other nodes' offers from its board.

All Sybils are in one network group.

The code is the product's: the victim's `p2p.member`, the board, the credit and the driver, over the memory
engine; offers are signed frames and blobs are fetched. The Sybils always offer first, and as much as an
author may; they hold every blob that they offer. `python -m tests.attacks sybil` plays this attack, too.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import pytest
import trio
import trio.testing

from p2p.blobs.blobs import BlobStore
from p2p.engines.memory import MemorySwarm
from p2p.envelope import seal
from p2p.identity import Identity
from p2p.types import Handlers, PeerId, Verdict
from swarmd.exchange import offers
from swarmd.exchange.events import Deliver, RoundBegan
from swarmd.tasks.curriculum import TINY_9
from swarmd.types import Completion, Rollout, TaskRef
from tests.attacks.gathering_node import WANTED, Node
from tests.attacks.harness import Shares, show
from tests.doubles import TOPIC, Clock, encoded

HONEST, OFFERED = 10, 8
ROUND = 30.0  # seconds
ROUNDS = 20


@dataclass
class Result(Shares):
    fetched: Counter[bool] = field(default_factory=Counter)  # number, by whether a Sybil offered it
    on_board: list[int] = field(default_factory=list)  # most honest offers on the board in each round

    @property
    def least_on_board(self) -> int:
        return min(self.on_board)


class Victim(Node):
    """A node that records the authors of the rollouts that it fetched."""

    authors: list[PeerId]

    def _receive(self, delivered: Deliver) -> None:
        super()._receive(delivered)
        self.authors.append(delivered.rollout.author)


class World:
    def __init__(self, sybils: int, seed: int) -> None:
        self.rng, self.clock, self.numbers = random.Random(seed), Clock(), itertools.count(1)
        self.swarm = MemorySwarm()
        self.honest = [Identity(self.rng.randbytes(32)) for _ in range(HONEST)]
        self.sybils = [Identity(self.rng.randbytes(32)) for _ in range(sybils)]
        self.stores = {who.peer_id: BlobStore() for who in [*self.honest, *self.sybils]}
        for name, store in self.stores.items():
            self.swarm.join(name, Handlers(lambda *_: Verdict.IGNORE, store.answer))
        me = Identity(b"v" * 32)
        self.victim = Victim(me, TOPIC, partial(self.swarm.join, me.peer_id), self.clock, self.rng)
        self.victim.authors = self.fetched = []
        for n, who in enumerate(self.honest):
            self.victim.member.reputation.met(who.peer_id, f"{20 + n}.1")
        for who in self.sybils:
            self.victim.member.reputation.met(who.peer_id, "99.1")

    def offer(self, who: Identity, count: int) -> None:
        text = self.rng.randbytes(200).hex()
        made = [
            Rollout(TaskRef("bf", next(self.numbers)), (Completion(f"{text} {n}", ended=True),), who.peer_id)
            for n in range(count)
        ]
        bodies, blobs = encoded(made, 1, "played", TINY_9.specialties)
        for blob in blobs:
            self.stores[who.peer_id].put(blob)
        for body in bodies:
            self.swarm.inject(
                seal(who, TOPIC.swarm_id, next(self.numbers), self.clock(), offers.KIND, body), who.peer_id
            )

    async def round(self, each: int, result: Result) -> None:
        self.victim.driver.put(RoundBegan(self.victim.market.board.round + 1, {}))
        for who in self.sybils:
            self.offer(who, each)
        on_board = 0
        for n, who in enumerate(self.rng.sample(self.honest, HONEST)):
            self.offer(who, OFFERED)
            await trio.testing.wait_all_tasks_blocked()
            on_board = max(
                on_board,
                sum(
                    item.author in {h.peer_id for h in self.honest}
                    for item in self.victim.market.board.offered.values()
                ),
            )
            for who_else in self.sybils if n == HONEST // 2 else ():  # again, halfway
                self.offer(who_else, each)
        await trio.testing.wait_all_tasks_blocked()
        his: set[PeerId] = {who.peer_id for who in self.sybils}
        fetched = [author in his for author in self.fetched]
        self.fetched.clear()
        result.fetched.update(fetched)
        result.shares.append(sum(fetched) / (2 * WANTED))
        result.on_board.append(on_board)
        self.clock.now += ROUND


def crowd(sybils: int = 100, each: int = 32, rounds: int = ROUNDS, seed: int = 1) -> Result:
    """Play the attack. each: offers that a Sybil makes twice a round; an honest node makes eight."""
    world, result = World(sybils, seed), Result()

    async def play() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.victim.driver.run, world.victim.member)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(rounds):
                await world.round(each, result)
            nursery.cancel_scope.cancel()

    trio.run(play, clock=trio.testing.MockClock(autojump_threshold=0))
    show(
        f"sybil, {sybils} that offer {2 * each} each round, against {HONEST} honest that offer {OFFERED}",
        result,
    )
    return result


@pytest.mark.slow
def test_a_crowd_of_sybils_does_not_dominate_a_nodes_fetches() -> None:
    result = crowd(rounds=10)
    assert result.mean <= 0.11  # not 0, because the Sybils offer first
    assert result.fetched.total() == 10 * WANTED and result.least_on_board >= 0.9 * HONEST * OFFERED - WANTED
