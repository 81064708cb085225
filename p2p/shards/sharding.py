"""Keeps a member in the shards that `p2p.shards.shards` places it in, and asks connected members for the swarm's size."""

import logging
from collections import deque
from collections.abc import Callable, Collection

import trio

from p2p.errors import StateUnwritable
from p2p.netgroup import LOCAL, group_of
from p2p.shards.estimate import MAX_ESTIMATE
from p2p.shards.shards import Shards
from p2p.types import Envelope, P2pEngine, PeerId, PeerRequest, Unanswered

LOOK_EVERY = 5.0  # seconds
KEPT = 8  # bodies that wait until we know where to publish

log = logging.getLogger(__name__)


class Sharding:
    """shards: None where all travels in shard 0. seal: kind, body and shard to a frame for that shard. proved: whether an author was useful
    to us. kinds: of the frames that show that their author takes part; None: all.
    """

    def __init__(
        self,
        engine: P2pEngine,
        shards: Shards | None,
        clock: Callable[[], float],
        seal: Callable[[str, bytes, int], bytes],
        proved: Callable[[PeerId], bool],
        kinds: Collection[str] | None = None,
    ) -> None:
        self._engine, self._shards, self._clock, self._seal = engine, shards, clock, seal
        self._proved, self._kinds = proved, kinds
        self._home: int | None = 0
        self._waiting: deque[tuple[str, bytes]] = deque(maxlen=KEPT)
        self.heard_at: float | None = None  # when a member was last heard that we met or that was useful; None: never

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
                for peer in self._shards.whom(self._clock()):
                    nursery.start_soon(self._ask, peer, self._shards)
                await trio.sleep(LOOK_EVERY)

    async def _ask(self, peer: PeerId, shards: Shards) -> None:
        with trio.move_on_after(LOOK_EVERY):
            try:
                shards.answered(peer, await self._engine.request(peer, PeerRequest.SWARM_SIZE.message(), MAX_ESTIMATE), self._clock())
            except Unanswered:
                return  # another is asked at the next look

    def answer(self, peer: PeerId, question: bytes) -> bytes:  # noqa: ARG002
        """To a peer's SWARM_SIZE question: what we take the swarm to be, or nothing."""
        return self._shards.answer(self._clock()) if self._shards is not None else b""

    def look(self) -> None:
        """The shards to be in now."""
        if self._shards is None:
            return
        connected = {peer.id: _group(peer.address) for peer in self._engine.peers()}
        placement = self._shards.look(self._clock(), connected, {peer for peer in connected if self._proved(peer)})
        self._engine.subscribe(placement.listening)
        self._home = placement.home
        try:
            while self._home is not None and self._waiting:
                self.publish(*self._waiting[0])
                self._waiting.popleft()  # not before: with a full disk it waits on
        except StateUnwritable as error:  # a full disk has no sequence number to give
            log.warning("nothing was published: %s", error)

    def publish(self, kind: str, body: bytes) -> None:
        """In our home; a newcomer's newest wait until it knows where that is. Raises ValueError and StateUnwritable, as sealing does."""
        if self._home is None:
            self._waiting.append((kind, body))
        else:
            self._engine.publish(self._seal(kind, body, self._home), self._home)

    def heard(self, envelope: Envelope, shard: int) -> None:
        """It was admitted. An author that we never met and that was never useful counts for nothing: a new key costs nothing."""
        if self._kinds is not None and envelope.kind not in self._kinds:
            return
        if self._shards is None:
            self.heard_at = self._clock()
            return
        now = self._clock()
        if self._shards.heard(envelope.author, shard, now, proven=self._proved(envelope.author)):
            self.heard_at = now

    def size(self) -> float | None:
        """How many nodes the swarm has, as far as we know; None where we do not count."""
        return self._shards.size(self._clock()) if self._shards is not None else None


def _group(address: str) -> str:
    """The network group of a connected peer; one for all whose address is a relay's or not known."""
    if not address.startswith("/"):
        return LOCAL  # in this process
    return "" if "/p2p-circuit" in address else group_of(address) or ""
