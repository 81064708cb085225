"""Holds what a node would share until its pace allows it (`swarmd.exchange.pacing`).

Pure; `now` is an argument. What waits is of the last `max_age` rounds, as old as others would still train on.
When the time has come, one offer carries as much of it as fits, the newest first; what is older is never
offered, and nobody misses it. A set that is gossiped whole is not joined to others: the newest goes, and
takes the place of an offer.
"""

from collections import deque

from swarmd.exchange import offers
from swarmd.exchange.pacing import Pacing

Message = tuple[str, bytes]  # kind and body


class Outgoing:
    """The messages that wait. max_age: rounds of ours (`round.max_age`)."""

    def __init__(self, pacing: Pacing, max_age: int) -> None:
        self._pacing = pacing
        # What waits, by round, the oldest first
        self._rounds: deque[list[Message]] = deque([[]], maxlen=max_age)

    def put(self, kind: str, body: bytes) -> None:
        """Add a message of the round that runs."""
        self._rounds[-1].append((kind, body))

    def next_round(self) -> None:
        self._rounds.append([])

    def take(self, now: float) -> Message | None:
        """Remove and return the next message to send now; it counts as sent.

        None: nothing waits, or it is not time. Call it until it returns None.
        """
        # The newest round first
        waiting = [message for messages in reversed(self._rounds) for message in messages]
        if not waiting or not self._pacing.may_send(now):
            return None
        self._pacing.sent(now)
        for messages in self._rounds:
            messages.clear()
        kind, body = waiting[0]
        if kind.partition("-")[0] != offers.KIND:
            return kind, body
        first, *rest = offers.join([other for other_kind, other in waiting if other_kind == kind])
        self._rounds[-1] += [(kind, other) for other in rest]
        return kind, first
