"""Rate limits for py-libp2p's pubsub, by peer: messages, empty RPCs, gossip about messages, subscriptions.

The library reads a stream and then, without awaiting in between, goes through what the RPC holds. So the peer that was read last is the
one to charge, and each message is charged (`p2p.rate_limit`) before there is a task for it.
"""

from collections.abc import Callable
from typing import Any

from p2p.rate_limit import RateLimit

AHEAD = 65536  # bytes
READ = 1.0  # an RPC takes two or three reads, a large one a few more
ITEM = 10.0  # a subscription, or an entry of gossip
NAMED = 1.0  # a message id in such an entry
RATE, BURST = 3000.0, 12_000.0  # of these, a second: some 200 RPCs with an entry each, as many as messages may come


class MeteredStream:
    """A stream of the library, read in large pieces: the library would read the length of each message byte by byte. on_read: called with
    the peer after each of these reads.
    """

    def __init__(self, stream: Any, on_read: Callable[[Any], object]) -> None:
        self._stream, self._on_read = stream, on_read
        self._ahead = b""

    async def read(self, n: int | None = None) -> bytes:
        if not self._ahead:
            self._ahead = bytes(await self._stream.read(AHEAD))
        self._on_read(self._stream.muxed_conn.peer_id)
        data, self._ahead = (self._ahead, b"") if n is None else (self._ahead[:n], self._ahead[n:])
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def cost(control: Any) -> float:
    """What the control message of an RPC costs."""
    named = sum(len(entry.messageIDs) for part in (control.ihave, control.iwant, control.idontwant) for entry in part)
    entries = (control.ihave, control.iwant, control.idontwant, control.graft, control.prune)
    return NAMED * named + ITEM * sum(map(len, entries))


class Meter:
    """cut_off: called with a peer that has used up what it may send, and the reason."""

    def __init__(self, rate_limit: RateLimit, clock: Callable[[], float], cut_off: Callable[[Any, str], None]) -> None:
        self._rate_limit, self._clock, self._cut_off = rate_limit, clock, cut_off
        self._talk = RateLimit(rate=RATE, burst=BURST)

    def charge_messages(self, peer: Any, *, frames: float = 1.0, broken: bool = False) -> bool:
        """Charge it for messages. False: it is banned, perhaps from now on."""
        now = self._clock()
        if self._rate_limit.banned(str(peer), now):
            return False
        paid = self._rate_limit.pay(str(peer), now, frames=frames, broken=broken)
        if not paid:
            self._cut_off(peer, "too many messages, or too many broken ones")
        return paid

    def charge_other(self, peer: Any, amount: float) -> bool:
        """Charge it for what is no message. False: the same."""
        now = self._clock()
        if self._rate_limit.banned(str(peer), now):
            return False
        paid = self._talk.pay(str(peer), now, frames=amount)
        if not paid:
            self._rate_limit.ban(str(peer), now, self._rate_limit.ban_seconds)
            self._cut_off(peer, "too much that is no message")
        return paid
