"""A node as the daemon builds it, but without a trainer.

It shares rollouts that are too large to be gossiped whole, and gathers other nodes' rollouts.

`Node` runs over any p2p engine. The program `python -m tests.attacks.gathering_node` writes JSON lines:
{"up": [addresses], "id": peer id}; {"peers": [ids]} when the connected peers change; and after each round
{"round": n, "at": seconds since the epoch, "got": external rollouts received in the round, "set_aside":
authors, "missed": failed fetches so far, "cpu": seconds}. It leaves the swarm at the end of its input.
"""

import argparse
import contextlib
import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio
from msgspec import structs

from p2p.identity import Identity
from p2p.member import Member
from p2p.topic import Topic
from p2p.types import Envelope, Handlers, P2pEngine, PeerId
from swarmd.config.config import RoundConfig
from swarmd.exchange.driver import Driver
from swarmd.exchange.events import Deliver, RoundBegan, Share
from swarmd.exchange.exchange import Exchange
from swarmd.exchange.market import Market
from swarmd.experience.strategies import SharingSettings
from swarmd.tasks.curriculum import TINY_9
from swarmd.types import Completion, Rollout, TaskRef
from testbed.probe import build_engine, lines, options, say

WANTED, SHARED = 4, 8  # rollouts a round
BYTES = 4096  # of one rollout
MAX_AGE = 2  # rounds


class Node:
    """An honest node without a trainer. clock: seconds since the epoch."""

    def __init__(
        self,
        identity: Identity,
        topic: Topic,
        build_engine: Callable[[Handlers], P2pEngine],
        clock: Callable[[], float],
        rng: random.Random,
        folder: Path | None = None,
        near: PeerId = "",
        late: float = 0.0,
    ) -> None:
        """near, late: frames that a peer other than `near` forwards are handled `late` seconds later."""
        self.identity, self._rng, self._near, self._late = identity, rng, near, late
        self._nursery: trio.Nursery | None = None
        self.got = 0  # rollouts received in this round
        self._numbers = itertools.count(rng.randrange(10**8))  # of tasks
        self.round = 0
        self.member = Member(
            identity,
            topic,
            build_engine,
            sequence=itertools.count(int(clock() * 1000)),
            clock=clock,
            admitted=self._admitted,
            folder=folder,
        )
        settings = RoundConfig(external=WANTED, max_age=MAX_AGE)
        exchange = Exchange(TINY_9, settings, SharingSettings(), "played", rng)
        self.driver = Driver(exchange, self._receive, print)

    @property
    def id(self) -> PeerId:
        return self.identity.peer_id

    async def run(self, seconds: float, ended: Callable[["Node"], None]) -> None:
        """Play rounds of about this many seconds until cancelled. Call `ended` at the end of each round."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self.driver.run, self.member)
            while True:
                self.share()
                await trio.sleep(seconds * self._rng.uniform(0.8, 1.2))
                self.round += 1
                ended(self)
                self.got = 0
                self.driver.put(RoundBegan(self.round + 1, {}))

    def share(self, count: int = SHARED) -> None:
        def text() -> str:
            return self._rng.randbytes(BYTES // 16).hex()

        def rollout() -> Rollout:
            return Rollout(
                TaskRef(self._rng.choice(TINY_9.specialties), next(self._numbers)),
                tuple(Completion(text(), True) for _ in range(8)),
                self.id,
            )

        self.driver.put(Share(tuple(rollout() for _ in range(count)), self.round))

    def _admitted(self, envelope: Envelope) -> None:
        if not self._late or envelope.via == self._near:
            self.driver.admitted(envelope)
        elif self._nursery is not None:
            self._nursery.start_soon(self._hear_late, envelope)

    async def _hear_late(self, envelope: Envelope) -> None:
        await trio.sleep(self._late)
        self.driver.admitted(envelope)

    def _receive(self, _delivered: Deliver) -> None:
        self.got += 1

    @property
    def market(self) -> Market:
        return self.driver.exchange.market


async def run(given: argparse.Namespace) -> None:
    identity = Identity.load_or_create(given.folder / "key")
    topic = Topic(given.swarm, given.digest)
    node = Node(
        identity,
        topic,
        partial(build_engine, given, identity),
        time.time,
        random.Random(identity.peer_id),
        given.folder,
        given.near,
        given.late,
    )

    def ended(node: Node) -> None:
        told = structs.asdict(node.market.figures())
        counts = {name: told[name] for name in ("set_aside", "missed")}
        say(round=node.round, at=time.time(), got=node.got, **counts, cpu=time.process_time())

    async def tell() -> None:
        peers: list[PeerId] = []
        while True:
            if (now := sorted(peer.id for peer in node.member.peers())) != peers:
                say(peers=now)
                peers = now
            await trio.sleep(0.2)

    async with trio.open_nursery() as nursery:
        say(up=list(await nursery.start(node.member.run)), id=identity.peer_id)
        nursery.start_soon(tell)
        nursery.start_soon(node.run, given.every, ended)
        with contextlib.suppress(trio.BrokenResourceError):
            async for _ in lines():
                pass
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = options("tests.attacks.gathering_node", "a node that trains nothing")
    parser.add_argument("--every", type=float, default=5.0, help="mean length of a round, in seconds")
    parser.add_argument(
        "--near", default="", help="peer id; frames that other peers forward are handled late"
    )
    parser.add_argument("--late", type=float, default=0.0, help="delay of those frames, in seconds")
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
