"""Connections made for one question, and which of them to end. Pure; `now` is an argument."""

from collections.abc import Collection

from p2p.types import PeerId

IDLE = 60.0  # seconds without a question after which a connection made to ask is ended
VISITS = 32  # connections made to ask somebody, at most


class RequestConnections:
    """Connections made for a question, and when they were used last."""

    def __init__(self) -> None:
        self._used: dict[PeerId, float] = {}

    def begin(self, peer: PeerId, now: float) -> None:
        """We dialled it for a question."""
        self._used[peer] = now

    def used(self, peer: PeerId, now: float) -> None:
        if peer in self._used:
            self._used[peer] = now

    def prune(self, connected: Collection[PeerId], now: float) -> list[PeerId]:
        """Those to hang up on: idle, or more than we keep."""
        self._used = {peer: at for peer, at in sorted(self._used.items(), key=lambda item: item[1]) if peer in connected}
        idle = [peer for n, (peer, at) in enumerate(self._used.items()) if now - at > IDLE or n < len(self._used) - VISITS]
        for peer in idle:
            del self._used[peer]
        return idle
