"""Flags connections whose bytes exceed the useful traffic. Pure; the byte counts are arguments.

p2pd reports good messages only; the kernel counts all bytes of each connection. A neighbour hands on each
message at most once, so it sends no more than all messages that came, all answers to us, and some gossip and
routing. What is beyond that is junk of some kind.
"""

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

# Bytes a second that need no explanation: gossip, routing, questions, what is relayed; and the messages that
# p2pd received and dropped. It queues 32, and a neighbour in whose mesh we are not sends all those of a
# heartbeat at once. (`libp2p` lets a peer send 200 messages a second.)
BYTES_PER_S = 256 * 1024.0
# A second of 10,000 messages, and what came and was not counted yet.
BURST_BYTES = 2 * 1024 * 1024.0
# What comes with a message: its signature and names, three heartbeats of gossip about it, lower layers.
OVERHEAD_BYTES = 600

Connection = TypeVar("Connection", bound=Hashable)


class Unexplained(Generic[Connection]):
    """Tracks what each connection owes: the bytes it brought that nothing explains, less BYTES_PER_S.

    A debt is at most BURST_BYTES, and at least -BURST_BYTES.
    """

    def __init__(self) -> None:
        self._owed: dict[Connection, float] = {}  # bytes, at the last look
        self._brought: Mapping[Connection, int] = {}  # in all, at the last look
        self._allowed = 0.0  # bytes allowed to each since then
        self._most = 0.0  # an upper bound of what any connection owes by now, new ones included

    def passed(self, seconds: float, brought: int, explained: int) -> bool:
        """Note that all connections brought `brought` bytes in `seconds`, `explained` of them useful.

        Returns whether to call `over`: some connection may be over its limit, or so much was allowed since
        that a new one would have much credit.
        """
        allowed = explained + BYTES_PER_S * seconds
        self._allowed += allowed
        self._most = max(0.0, self._most + brought - allowed)
        return self._most > BURST_BYTES or self._allowed > BURST_BYTES / 4

    def over(self, brought: Mapping[Connection, int]) -> list[Connection]:
        """Return the connections over the limit, and forget what they owe.

        brought: by connection, the bytes since it began, of all there are.
        """
        owed = {
            each: self._owed.get(each, 0.0) + size - self._brought.get(each, 0) - self._allowed
            for each, size in brought.items()
        }
        found = [each for each, size in owed.items() if size > BURST_BYTES]
        self._owed = {each: max(-BURST_BYTES, size) for each, size in owed.items() if each not in found}
        self._brought, self._allowed, self._most = dict(brought), 0.0, max([0.0, *self._owed.values()])
        return found
