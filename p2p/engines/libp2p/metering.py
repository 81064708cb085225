"""Rate limits for py-libp2p, by peer: messages, empty RPCs, gossip about messages, subscriptions, streams.

The library reads a stream and then, without awaiting in between, goes through what the RPC holds. So the peer
that was read last is the one to charge, and each message is charged (`p2p.rate_limit`) before there is a task
for it.
"""

from collections.abc import Callable
from typing import Any

from libp2p.exceptions import ParseError
from libp2p.host.ping import handle_ping
from libp2p.protocol_muxer import multiselect_communicator
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import DEFAULT_NEGOTIATE_TIMEOUT, Multiselect
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from p2p.engines.libp2p.streams import MeteredStream
from p2p.rate_limit import RateLimit, TokenBuckets

# What is charged for.
MESSAGES, BROKEN, OTHER = "messages", "broken messages", "reads, pings or entries of gossip"
# An RPC takes two or three reads, a large one a few more.
READ_COST = 1.0
# The cost of a subscription, or of an entry of gossip.
ENTRY_COST = 10.0
# The cost of a message id in such an entry.
MESSAGE_ID_COST = 1.0
PING_COST = 30.0
# The cost of a stream that was one too many.
REFUSED_STREAM_COST = 30.0
# What a peer may cost: some 200 RPCs a second with an entry each, as many as messages may come.
COST_PER_S, COST_AT_ONCE = 3000.0, 12_000.0
# A hello, and as many protocols as the other side knows for one thing.
MAX_NEGOTIATION_LINES = 32
# Bytes of each of them, as in go-libp2p and js-libp2p.
MAX_LINE_BYTES = 1024
# Streams that a peer may open: ten times what members need (docs/p2p.md).
STREAMS_PER_S, STREAMS_AT_ONCE = 20.0, 200.0
# All who come through one relay may open so many times as many, as a new key costs nothing there.
RELAYED_FACTOR = 5.0


async def read_line(reader: Any) -> bytes:
    """Read a line of a negotiation. Raises ParseError and IOException, as the library's own does.

    That one takes a line of any length, from whoever connects.
    """
    line = await read_varint_prefixed_bytes_limited(reader, MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise ParseError("a line without an end")
    return bytes(line[:-1])


# Replaced in the library, which negotiates in many places.
multiselect_communicator.read_delim = read_line


class Negotiation(Multiselect):  # type: ignore[misc]  # the library is not typed for us
    """Ends with the stream where a peer names too many protocols.

    The library would answer each, for ten seconds.
    """

    async def negotiate(self, communicator: Any, negotiate_timeout: int = DEFAULT_NEGOTIATE_TIMEOUT) -> Any:
        return await super().negotiate(_FewLines(communicator), negotiate_timeout)


class _FewLines:
    def __init__(self, communicator: Any) -> None:
        self._left = MAX_NEGOTIATION_LINES
        self.write, self._read = communicator.write, communicator.read

    async def read(self) -> str:
        self._left -= 1
        if self._left < 0:
            raise MultiselectCommunicatorError(f"names more than {MAX_NEGOTIATION_LINES} protocols")
        return str(await self._read())


def cost(control: Any) -> float:
    """Return what the control message of an RPC costs."""
    named = sum(
        len(entry.messageIDs) for part in (control.ihave, control.iwant, control.idontwant) for entry in part
    )
    entries = (control.ihave, control.iwant, control.idontwant, control.graft, control.prune)
    return MESSAGE_ID_COST * named + ENTRY_COST * sum(map(len, entries))


def message_limits() -> RateLimit:
    """Make the limits of what each connected peer may send us."""
    return RateLimit(
        {
            MESSAGES: TokenBuckets(200.0, 600.0),
            BROKEN: TokenBuckets(1.0, 30.0),
            OTHER: TokenBuckets(COST_PER_S, COST_AT_ONCE),
        }
    )


class Meter:
    """Charges peers for what they send.

    cut_off: called with a peer that has used up what it may send, and the reason.
    """

    def __init__(
        self, rate_limit: RateLimit, clock: Callable[[], float], cut_off: Callable[[Any, str], None]
    ) -> None:
        self._rate_limit, self._clock, self._cut_off = rate_limit, clock, cut_off
        self._streams = TokenBuckets[str](STREAMS_PER_S, STREAMS_AT_ONCE)
        self._relayed = TokenBuckets[str](RELAYED_FACTOR * STREAMS_PER_S, RELAYED_FACTOR * STREAMS_AT_ONCE)

    def charge(self, peer: Any, amount: float = 1.0, what: str = OTHER) -> bool:
        """Charge the peer for what it sent. Returns False where it is banned, perhaps from now on."""
        now = self._clock()
        if self._rate_limit.banned(str(peer), now):
            return False
        paid = self._rate_limit.pay(str(peer), now, what, amount)
        if not paid:
            self._cut_off(peer, f"too many {what}")
        return paid

    def charge_stream(self, peer: Any, relay: str) -> bool:
        """Charge the peer for a stream that it opened.

        Returns False where the stream is to be reset; a peer that goes on is cut off. relay: the relay it
        came through, or "".
        """
        now = self._clock()
        if self._streams.of(str(peer), now).wait(now) == 0 and (
            not relay or self._relayed.of(relay, now).wait(now) == 0
        ):
            return True
        self.charge(peer, REFUSED_STREAM_COST)
        return False

    async def serve_ping(self, stream: Any) -> None:
        """Answer pings at a limited rate; the library would answer as many as come."""
        await handle_ping(MeteredStream(stream, lambda peer: self.charge(peer, PING_COST)))
