"""Keeps a member in the shards that `p2p.shards` places it in, and says the hellos that are due."""

import logging
from collections import deque
from collections.abc import Callable

import trio

from p2p.errors import StateUnwritable
from p2p.shards import HELLO, MAX_HELLO, QUESTION, Shards, decode_hello
from p2p.types import Engine, Envelope, PeerId, Unanswered

LOOK_EVERY = 5.0  # seconds
KEPT = 8  # bodies that wait until we know where to publish

log = logging.getLogger(__name__)


class Sharding:
    """shards: None where all travels in shard 0. seal: kind, body and shard to a frame for that shard."""

    def __init__(
        self, engine: Engine, shards: Shards | None, clock: Callable[[], float], seal: Callable[[str, bytes, int], bytes]
    ) -> None:
        self._engine, self._shards, self._clock, self._seal = engine, shards, clock, seal
        self._home: int | None = 0
        self._waiting: deque[tuple[str, bytes]] = deque(maxlen=KEPT)
        self.heard_at: float | None = None  # when a member was last heard; None: never

    @property
    def home(self) -> int | None:
        """The shard that we publish in; None where we do not know it yet."""
        return self._home

    @property
    def shards(self) -> int:
        """Into how many shards we take the swarm to be cut."""
        return self._shards.shards if self._shards is not None else 1

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while self._shards is not None:
                self.look()
                for peer in self._shards.whom([peer.id for peer in self._engine.peers()]):
                    nursery.start_soon(self._ask, peer, self._shards)
                await trio.sleep(LOOK_EVERY)

    async def _ask(self, peer: PeerId, shards: Shards) -> None:
        with trio.move_on_after(LOOK_EVERY):
            try:
                shards.answered(peer, await self._engine.request(peer, QUESTION, MAX_HELLO), self._clock())
            except Unanswered:
                return  # another is asked at the next look

    def answer(self, peer: PeerId, question: bytes) -> bytes:  # noqa: ARG002
        """To a newcomer's QUESTION: what we take the swarm to be, or nothing."""
        return self._shards.answer(self._clock()) if self._shards is not None else b""

    def look(self) -> None:
        """Where to be now, and whether it is our turn to say how large the swarm is."""
        if self._shards is None:
            return
        now = self._clock()
        placement = self._shards.look(now, company=len(self._engine.peers()))
        self._engine.subscribe(placement.listening)
        self._home = placement.home
        hello = self._shards.hello_due(now)
        try:
            while self._home is not None and self._waiting:
                self.publish(*self._waiting[0])
                self._waiting.popleft()  # not before: with a full disk it waits on
            if hello is not None:
                self._engine.publish(self._seal(HELLO, hello, 0))
        except StateUnwritable as error:  # a full disk has no sequence number to give; there will be other hellos
            log.warning("nothing was published: %s", error)

    def publish(self, kind: str, body: bytes) -> None:
        """In our home; a newcomer's newest wait until it knows where that is. Raises ValueError and StateUnwritable, as sealing does."""
        if self._home is None:
            self._waiting.append((kind, body))
        else:
            self._engine.publish(self._seal(kind, body, self._home), self._home)

    def heard(self, envelope: Envelope, shard: int) -> bool:
        """What was admitted counts for the swarm's size. True: it was a hello, and is for nobody else."""
        now = self._clock()
        if envelope.kind != HELLO:
            self.heard_at = now
            if self._shards is not None:
                self._shards.heard(envelope.author, shard, now)
            return False
        hello = decode_hello(envelope.body)
        if self._shards is not None and hello is not None:  # else of a later version, or nonsense: it says nothing
            self._shards.told(envelope.author, hello, now)
        return True

    def size(self) -> float | None:
        """How many nodes the swarm has, as far as we know; None where we do not count."""
        return self._shards.size(self._clock()) if self._shards is not None else None
