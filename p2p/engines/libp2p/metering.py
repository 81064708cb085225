"""Rate limits for py-libp2p, by peer: messages, empty RPCs, gossip about messages, subscriptions, streams.

The library reads an RPC and then handles its contents without awaiting in between. So the peer that was read
last is the peer to charge, and each message is charged (`p2p.rate_limit`) before a task is started for it.
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

# The kinds of charged traffic.
MESSAGES, BROKEN, OTHER = "messages", "broken messages", "reads, pings or entries of gossip"
# Cost of a read. An RPC takes two or three reads, a large one a few more.
READ_COST = 1.0
# Cost of a subscription, or of an entry of gossip (IHAVE, IWANT, …).
ENTRY_COST = 10.0
# Cost of a message id in such an entry.
MESSAGE_ID_COST = 1.0
PING_COST = 30.0
# Cost of a stream over the limit.
REFUSED_STREAM_COST = 30.0
# Cost that a peer may cause, rate and burst: about 200 RPCs a second with an entry each, like the message
# limit.
COST_PER_S, COST_AT_ONCE = 3000.0, 12_000.0
# Lines of one negotiation: a greeting, and the versions of a protocol that the other side knows.
MAX_NEGOTIATION_LINES = 32
# Bytes of one line, as in go-libp2p and js-libp2p.
MAX_LINE_BYTES = 1024
# Streams that a peer may open, rate and burst: ten times as many as members need (docs/p2p.md).
STREAMS_PER_S, STREAMS_AT_ONCE = 20.0, 200.0
# All peers that come through one relay may together open this many times as many streams as one peer, because
# new keys are free there.
RELAYED_FACTOR = 5.0


async def read_line(reader: Any) -> bytes:
    """Read a line of a negotiation. Raises ParseError and IOException, like the library's function.

    The library's function accepts a line of any length from any node that connects.
    """
    line = await read_varint_prefixed_bytes_limited(reader, MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise ParseError("the line has no newline")
    return bytes(line[:-1])


# Patches the library, because it calls this function in many places.
multiselect_communicator.read_delim = read_line


class Negotiation(Multiselect):  # type: ignore[misc]  # the library is not typed for us
    """A negotiation that fails if the peer names too many protocols.

    The library would answer each name for ten seconds.
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
    """Return the cost of an RPC's control message."""
    named = sum(
        len(entry.messageIDs) for part in (control.ihave, control.iwant, control.idontwant) for entry in part
    )
    entries = (control.ihave, control.iwant, control.idontwant, control.graft, control.prune)
    return MESSAGE_ID_COST * named + ENTRY_COST * sum(map(len, entries))


def message_limits() -> RateLimit:
    """Make the limits for the messages of each connected peer."""
    return RateLimit(
        {
            MESSAGES: TokenBuckets(200.0, 600.0),
            BROKEN: TokenBuckets(1.0, 30.0),
            OTHER: TokenBuckets(COST_PER_S, COST_AT_ONCE),
        }
    )


class Meter:
    """Charges peers for the traffic that they send.

    cut_off: called with a peer that exceeded a limit, and the reason.
    """

    def __init__(
        self, rate_limit: RateLimit, clock: Callable[[], float], cut_off: Callable[[Any, str], None]
    ) -> None:
        self._rate_limit, self._clock, self._cut_off = rate_limit, clock, cut_off
        self._streams = TokenBuckets[str](STREAMS_PER_S, STREAMS_AT_ONCE)
        self._relayed = TokenBuckets[str](RELAYED_FACTOR * STREAMS_PER_S, RELAYED_FACTOR * STREAMS_AT_ONCE)

    def charge(self, peer: Any, amount: float = 1.0, what: str = OTHER) -> bool:
        """Charge the peer. Return False if it was banned already, or is banned now for exceeding a limit."""
        now = self._clock()
        if self._rate_limit.banned(str(peer), now):
            return False
        if not (paid := self._rate_limit.pay(str(peer), now, what, amount)):
            self._cut_off(peer, f"too many {what}")
        return paid

    def charge_stream(self, peer: Any, relay: str) -> bool:
        """Charge the peer for a stream that it opened.

        Returns False if the stream must be reset. A peer that keeps opening streams is cut off.

        relay: the address of the relay that the peer came through, or "".
        """
        now = self._clock()
        if self._streams.of(str(peer), now).wait(now) == 0 and (
            not relay or self._relayed.of(relay, now).wait(now) == 0
        ):
            return True
        self.charge(peer, REFUSED_STREAM_COST)
        return False

    async def serve_ping(self, stream: Any) -> None:
        """Answer pings at a limited rate; the library would answer any number."""
        await handle_ping(MeteredStream(stream, lambda peer: self.charge(peer, PING_COST)))
