"""Connections made for one question, and when to end them. Pure; `now` is an argument."""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from p2p.types import PeerId

# A connection made to ask ends after so long without a question: in a large swarm many wait for its place.
IDLE_S = 2.0
# The same for those that the library's DHT made.
DHT_IDLE_S = 60.0
# Connections made to ask somebody.
MAX_VISITS = 32


class RequestConnections:
    """Tracks connections made for a question, and when each may end."""

    def __init__(self) -> None:
        self._until: dict[PeerId, float] = {}
        self._asked: Counter[PeerId] = Counter()  # questions that run

    def begin(self, peer: PeerId, now: float, idle: float = IDLE_S) -> None:
        """Note that the peer was dialled for a question."""
        self._until[peer] = now + idle

    def used(self, peer: PeerId, now: float) -> None:
        """Note that the peer is asked, or has answered."""
        if peer in self._until:
            self._until[peer] = max(self._until[peer], now + IDLE_S)

    @contextmanager
    def asking(self, peer: PeerId) -> Iterator[None]:
        """Keep the connection from ending while a question to the peer runs."""
        self._asked[peer] += 1
        try:
            yield
        finally:
            self._asked[peer] -= 1
            if not self._asked[peer]:
                del self._asked[peer]

    def prune(self, connected: Collection[PeerId], now: float) -> list[PeerId]:
        """Return the peers to hang up on: idle, or more than we keep."""
        self._until = {
            peer: at
            for peer, at in sorted(self._until.items(), key=lambda item: item[1])
            if peer in connected
        }
        idle = [
            peer
            for n, (peer, until) in enumerate(self._until.items())
            if now > until or n < len(self._until) - MAX_VISITS
        ]
        idle = [peer for peer in idle if peer not in self._asked]
        for peer in idle:
            del self._until[peer]
        return idle
