"""Simulates the phantom crowd attack: one node with many free keys sends empty frames and lies about the size of the swarm."""

import random

from p2p.envelope import seal
from p2p.identity import Identity
from p2p.shards.estimate import Estimate, encode_estimate
from swarmd.lab.simulation.gossip import Message
from swarmd.lab.simulation.node import EPOCH
from swarmd.lab.simulation.swarm import SimulatedSwarm

KIND = "presence"  # unknown to all nodes


class Crowd:
    """Acts from now on, until `end`. every: seconds between two frames."""

    def __init__(self, swarm: SimulatedSwarm, keys: int, *, every: float = 0.1, size: int = 300, shards: int = 42) -> None:
        self._swarm, self._every = swarm, every
        rng = random.Random(keys)
        self._phantoms = [Identity.from_seed(rng.randbytes(32)) for _ in range(keys)]
        self._node = swarm.intruder(encode_estimate(Estimate(size, shards)))
        self._sent, self._over = 0, False
        swarm.events.after(every, self._send)

    def end(self) -> None:
        self._over = True
        self._swarm.gossip.stop(self._node.number)

    def _send(self) -> None:
        if self._over:
            return
        swarm, phantom = self._swarm, self._phantoms[self._sent % len(self._phantoms)]
        self._sent += 1
        now = swarm.events.now
        frame = seal(phantom, self._node.swarm_id, self._sent, EPOCH + now, KIND, b"")
        swarm.gossip.publish(Message(frame, 0, self._node.number, "crowd", now))
        swarm.events.after(self._every, self._send)
