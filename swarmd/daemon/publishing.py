"""Publishes what the trainer shares, when the node's pace allows it (`swarmd.exchange.pacing`)."""

import random
import time
from collections.abc import Callable

import trio

from p2p.errors import StateUnwritable
from p2p.member import Member
from p2p.types import Envelope
from swarmd.exchange.pacing import Heard, Outgoing, Pacing

# How often to check whether what waits may be sent.
TURN_EVERY_S = 1.0


class Publisher:
    """Sends what the trainer shares when the pace allows it.

    target: offers a second of the whole swarm. max_age: `round.max_age`. talk: told once when nothing can be
    sent.
    """

    def __init__(
        self, member: Member, target: float, max_age: int, rng: random.Random, talk: Callable[[str], None]
    ) -> None:
        self._member, self._talk = member, talk
        self.heard = Heard()
        self._pacing = Pacing(self.heard, rng, target)
        self._outgoing = Outgoing(self._pacing, max_age)
        self._cannot_share = False  # whether the full disk has been reported

    async def run(self) -> None:
        """Send what waits, until cancelled."""
        while True:
            await trio.sleep(TURN_EVERY_S)
            self._send()

    def hear(self, envelope: Envelope) -> None:
        """Count a frame of others."""
        self.heard.offer(envelope.author, envelope.group, time.monotonic())

    def publish(self, kind: str, body: bytes) -> None:
        """Send a body now, or when it is our turn while it is worth something."""
        self._outgoing.put(kind, body)
        self._send()

    def next_round(self) -> None:
        """Record that one of our rounds is over."""
        self._outgoing.next_round()

    def document(self) -> dict[str, float | None]:
        """Return the status: the mean seconds between two offers; None where the pace is free."""
        return {"every": self._pacing.every}

    def _send(self) -> None:
        """Seal and send what waits.

        On a full disk no sequence number can be reserved: nothing is sent, and the operator is told once.
        """
        while (message := self._outgoing.pop(time.monotonic())) is not None:
            try:
                self._member.publish(*message)
            except StateUnwritable as error:
                if not self._cannot_share:
                    self._talk(f"sharing is off for now: {error}")
                self._cannot_share = True
            else:
                self._cannot_share = False
