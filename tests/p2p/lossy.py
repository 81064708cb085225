"""A swarm in memory that loses some frames and delivers some twice."""

import random

from p2p.engines.memory import MemoryEngine, MemorySwarm
from p2p.types import Handlers, PeerId


class LossySwarm(MemorySwarm):
    """Loses and duplicates frames. loss, duplicate: probability for each frame and receiver."""

    def __init__(self, seed: int, loss: float, duplicate: float) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.weights = (loss, (1 - loss) * (1 - duplicate), (1 - loss) * duplicate)

    def join(self, me: PeerId, handlers: Handlers) -> MemoryEngine:
        return _LossyEngine(self, me, handlers)


class _LossyEngine(MemoryEngine):
    swarm: LossySwarm

    def hear(self, frame: bytes, sender: PeerId | None) -> None:
        (copies,) = self.swarm.rng.choices((0, 1, 2), self.swarm.weights)
        for _ in range(copies):
            super().hear(frame, sender)
