"""Flags connections whose bytes exceed the useful traffic. Pure; the byte counts are arguments.

p2pd reports only good messages, while the kernel counts all bytes of each connection. An honest neighbour
sends each message at most once. So it sends no more bytes than all messages and answers that we got from
anyone, plus some gossip and routing. All bytes beyond that are junk.
"""

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

# Bytes a second of each connection that need no explanation: gossip, routing, questions, relayed bytes, and
# messages that p2pd received but dropped. (It queues 32 messages, and a neighbour outside the mesh sends all
# messages of a heartbeat at once.) For comparison: `libp2p` lets a peer send 200 messages a second.
BYTES_PER_S = 256 * 1024.0
# One second of 10,000 messages, and bytes that came but are not counted yet.
BURST_BYTES = 2 * 1024 * 1024.0
# Overhead of a message: its signature and names, three heartbeats of gossip about it, lower layers.
OVERHEAD_BYTES = 600

Connection = TypeVar("Connection", bound=Hashable)


class Unexplained(Generic[Connection]):
    """Tracks the debt of each connection: its unexplained bytes, less BYTES_PER_S.

    The debt stays between -BURST_BYTES and BURST_BYTES; a connection above that is reported by `over`.
    """

    def __init__(self) -> None:
        self._owed: dict[Connection, float] = {}  # debt in bytes, at the last call of `over`
        self._brought: Mapping[Connection, int] = {}  # bytes so far, at the last call of `over`
        self._allowed = 0.0  # bytes allowed to each connection since that call
        self._most = 0.0  # upper bound of any connection's debt now, including new connections

    def passed(self, seconds: float, brought: int, explained: int) -> bool:
        """Note that all connections brought `brought` bytes in `seconds`, of which `explained` were useful.

        Returns whether to call `over`: a connection may be over its limit, or so many bytes were allowed
        since the last call that a new connection would have too much credit.
        """
        allowed = explained + BYTES_PER_S * seconds
        self._allowed += allowed
        self._most = max(0.0, self._most + brought - allowed)
        return self._most > BURST_BYTES or self._allowed > BURST_BYTES / 4

    def over(self, brought: Mapping[Connection, int]) -> list[Connection]:
        """Return the connections over the limit, and cancel their debt.

        brought: for every connection, its bytes since it began.
        """
        owed = {
            each: self._owed.get(each, 0.0) + size - self._brought.get(each, 0) - self._allowed
            for each, size in brought.items()
        }
        found = [each for each, size in owed.items() if size > BURST_BYTES]
        self._owed = {each: max(-BURST_BYTES, size) for each, size in owed.items() if each not in found}
        self._brought, self._allowed, self._most = dict(brought), 0.0, max([0.0, *self._owed.values()])
        return found
