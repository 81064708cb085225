"""Hostile nodes of the simulation. Their frames pass every admission check; they misbehave later."""

import itertools
import random
from collections.abc import Mapping

import msgspec

from benchmarks.network.simulation.network import (
    EPOCH,
    SWARM_ID,
    Act,
    Arrived,
    Asked,
    Event,
    Frame,
    Join,
    Link,
    LookAround,
    Network,
    Node,
)
from benchmarks.network.simulation.nodes import CHARACTERS, LOCAL_ROLLOUTS
from benchmarks.network.simulation.scenarios import Attack
from p2p.blobs.blobs import ID_BYTES, MISSING, BlobStore
from p2p.envelope import seal
from p2p.identity import Identity
from swarmd.exchange import offers
from swarmd.tasks.curriculum import SAPO_9, TRAINING_TASKS
from swarmd.types import Completion, Rollout, TaskRef

_Item = tuple[int, int, int, bytes]  # specialty, n, bytes, id: docs/wire.md


class Hostile(Node):
    """A hostile node that takes a turn about every `every` seconds and holds no blob."""

    every = 60.0

    def __init__(self, network: Network, identity: Identity, link: Link, number: int) -> None:
        super().__init__(network, identity, link)
        self.rng = random.Random(f"hostile {network.seed} {number}")
        self._numbers = itertools.count(1)
        network.hostile.add(self.id)

    def take(self, event: Event) -> None:
        match event:
            case Arrived(frame):
                self.hear(frame)
            case Asked():
                self.answer(event)
            case LookAround():
                self.looked()
            case Join():
                self.network.join(self)
                self._next()
            case Act():
                self.act()
                self._next()

    def hear(self, frame: Frame) -> None:
        """Handle another node's frame."""

    def answer(self, asked: Asked) -> None:
        self.network.reply(self, asked, MISSING)

    def act(self) -> None:
        """Take a turn."""

    def publish(self, body: bytes, identity: Identity | None = None) -> None:
        """Sign an offer and gossip it. identity: the signing key; by default the node's own."""
        body = offers.addressed(body, self.link.address)
        now, number = EPOCH + self.network.now, next(self._numbers)
        frame = seal(identity or self.identity, SWARM_ID, number, now, offers.KIND, body)
        self.network.gossip(self, frame, honest=False)

    def invented(self, count: int) -> bytes:
        """Return an offer of blobs that do not exist."""
        return _offer(
            [
                (
                    self.rng.randrange(9),
                    self.rng.randrange(TRAINING_TASKS),
                    1500,
                    self.rng.randbytes(ID_BYTES),
                )
                for _ in range(count)
            ]
        )

    def _next(self) -> None:
        self.network.at(self.network.now + self.every * self.rng.uniform(0.9, 1.1), self, Act())


class Copier(Hostile):
    """Offers each other node's rollouts as its own."""

    def hear(self, frame: Frame) -> None:
        if frame.envelope.author not in self.network.hostile:
            self.publish(offers.join([frame.envelope.body])[0])


class Flooder(Hostile):
    """Sends more offers than an author's quota allows, of blobs that do not exist."""

    every = 1 / 8

    def act(self) -> None:
        self.publish(self.invented(8))


class Silent(Hostile):
    """Offers as often as an honest node on a quiet topic, and never answers a question."""

    def act(self) -> None:
        self.publish(self.invented(LOCAL_ROLLOUTS))

    def answer(self, asked: Asked) -> None:
        """Never answer the question."""


class Liar(Hostile):
    """Serves its blobs, but they hold other tasks than its offers named."""

    def __init__(self, network: Network, identity: Identity, link: Link, number: int) -> None:
        super().__init__(network, identity, link, number)
        self._store = BlobStore()

    def act(self) -> None:
        texts = (Completion(self.rng.randbytes(CHARACTERS // 2).hex(), True),) * 2
        rollouts = [
            Rollout(TaskRef(SAPO_9.specialties[0], self.rng.randrange(TRAINING_TASKS - 1)), texts, self.id)
            for _ in range(LOCAL_ROLLOUTS)
        ]
        blobs = [(each.ref, offers.packed_rollout(each, 1, "simulated")) for each in rollouts]
        named = [(ref, blob) for ref, blob in blobs if blob is not None]
        for _, blob in named:
            self._store.put(blob.data)
        self.publish(_offer([(1, ref.n, blob.size, blob.id) for ref, blob in named]))

    def answer(self, asked: Asked) -> None:
        self.network.reply(self, asked, self._store.answer(asked.asker.id, asked.ask.question))


class Crowd(Hostile):
    """One machine that every two seconds offers blobs that do not exist, each time under a new key."""

    every = 2.0

    def act(self) -> None:
        newcomer = Identity(self.rng.randbytes(32))
        self.network.hostile.add(newcomer.peer_id)
        self.publish(self.invented(LOCAL_ROLLOUTS), newcomer)


ATTACKS: Mapping[Attack, type[Hostile]] = {
    "copier": Copier,
    "flooder": Flooder,
    "silent": Silent,
    "liar": Liar,
    "crowd": Crowd,
}


def _offer(items: list[_Item]) -> bytes:
    """Encode an offer as docs/wire.md defines it."""
    specialties, ns, sizes, ids = zip(*items, strict=True)
    return msgspec.msgpack.encode([1, 1, specialties, ns, sizes, b"".join(ids)])
