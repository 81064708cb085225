"""A swarm inside one process, for tests and the lab. `publish` delivers at once, without an event loop."""

from collections.abc import Collection, Sequence

import trio

from p2p.topic import Topic
from p2p.types import MAX_QUESTION_BYTES, Handlers, P2pEngine, Peer, PeerId, Started, Unanswered


class MemorySwarm:
    """Delivers each frame to all other members, or after `partition` to members of the same island."""

    def __init__(self) -> None:
        self.members: dict[PeerId, MemoryEngine] = {}
        self._island: dict[PeerId, int] = {}

    def join(self, me: PeerId, handlers: Handlers) -> "MemoryEngine":
        """Add a member. It replaces a member with the same id, like a restarted node."""
        return MemoryEngine(self, me, handlers)

    def partition(self, *islands: Collection[PeerId]) -> None:
        """Split the members into islands. Frames no longer pass between islands.

        Members that are not named form another island. Without arguments, all members are joined again.
        """
        self._island = {peer: number for number, island in enumerate(islands, 1) for peer in island}

    def inject(self, frame: bytes, sender: PeerId | None = None) -> None:
        """Send raw bytes to all members except `sender`, like a hostile peer."""
        for receiver in list(self.members):
            if receiver != sender and (sender is None or self._connected(sender, receiver)):
                self.members[receiver].hear(frame, sender)

    def _connected(self, a: PeerId, b: PeerId) -> bool:
        return self._island.get(a, 0) == self._island.get(b, 0)


class MemoryEngine(P2pEngine):
    """Implements `P2pEngine`. It is a member of the swarm from construction until `leave`."""

    def __init__(self, swarm: MemorySwarm, me: PeerId, handlers: Handlers) -> None:
        self.swarm, self.me, self.handlers = swarm, me, handlers
        # Banned for good, because this engine has no clock.
        self._shut_out: set[PeerId] = set()
        swarm.members[me] = self

    async def run(self, task_status: Started = trio.TASK_STATUS_IGNORED) -> None:
        # The member may have left before.
        self.swarm.members.setdefault(self.me, self)
        task_status.started(self.addresses())
        try:
            await trio.sleep_forever()
        finally:
            self.leave()

    def leave(self) -> None:
        if self.swarm.members.get(self.me) is self:
            del self.swarm.members[self.me]

    def hear(self, frame: bytes, sender: PeerId | None) -> None:
        if sender not in self._shut_out:
            self.handlers.deliver(frame, sender)

    def publish(self, frame: bytes) -> None:
        if self.swarm.members.get(self.me) is self:
            self.swarm.inject(frame, self.me)

    async def request(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return self.ask(peer, question, limit)

    def ask(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        """Do the same as `request`, without an event loop."""
        other = self.swarm.members.get(peer)
        if other is None or peer == self.me or not self.swarm._connected(self.me, peer):
            raise Unanswered(f"{peer} is not connected")
        if len(question) > MAX_QUESTION_BYTES or self.me in other._shut_out or peer in self._shut_out:
            raise Unanswered(f"{peer} hung up")
        if len(answer := other.handlers.answer(self.me, question)) > limit:
            raise Unanswered(f"{peer}: answer too large: {len(answer):,} bytes (limit {limit:,})")
        return answer

    def shut_out(self, peer: PeerId, seconds: float) -> None:  # noqa: ARG002
        self._shut_out.add(peer)

    def heard_nearby(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Do nothing: everybody knows everybody here."""

    def told_of(self, peer: PeerId, address: str) -> None:
        """Do nothing: everybody knows everybody here."""

    def peers(self) -> Sequence[Peer]:
        return [
            Peer(peer, f"memory:{peer}", "outbound" if str(self.me) < str(peer) else "inbound", 0.0)
            for peer in self.swarm.members
            if peer != self.me and self.swarm._connected(self.me, peer)
        ]

    def connected(self) -> Collection[PeerId]:
        return [peer.id for peer in self.peers()]

    def present(self, topic: Topic) -> int:  # noqa: ARG002
        """Count all other members, because a memory swarm has only one topic."""
        return len(self.peers())

    def addresses(self) -> Sequence[str]:
        return [f"/memory/{self.me}/p2p/{self.me}"]
