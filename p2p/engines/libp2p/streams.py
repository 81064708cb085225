"""Wrappers of py-libp2p's streams: TCP, circuits, metered streams, requests."""

import contextlib
import ipaddress
import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import trio
from libp2p.connection_types import ConnectionType
from libp2p.custom_types import TProtocol
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.id import ID
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from p2p.engines.request_response import CHUNK_BYTES, Broken, KeptStreams, Responder
from p2p.engines.traffic import Line, RateGate, Traffic, line_of_host
from p2p.topic import ASK
from p2p.types import PeerId, Unanswered

PROTOCOL = TProtocol(ASK)

# Both lines of the negotiation (multistream-select) are sent together with the question, and compared with
# the lines that come back. This takes one round trip instead of three.
GREETING = b"".join(bytes([len(line)]) + line for line in (b"/multistream/1.0.0\n", ASK.encode() + b"\n"))

# The size of one read of a metered stream.
READ_BYTES = 65536

# Timeout of a TCP dial.
CONNECT_TIMEOUT_S = 5.0

# A connection waits at its gate once for this many reads, because a wait for each would cost more than the
# read itself.
READS_AT_A_TIME = 100

# Whether this task writes a frame of this node. Such a frame is sent before all other bytes.
own_frame: ContextVar[bool] = ContextVar("own_frame", default=False)


class CountedSocket:
    """A TCP stream of the library that counts its bytes, and reads no faster than the limit.

    stranger: whether the other side connected to us.
    """

    def __init__(self, stream: Any, traffic: Traffic, stranger: bool = False) -> None:
        self._stream, self._traffic = stream, traffic
        self._remote: tuple[str, int] | None = stream.get_remote_address()
        if self._remote is None:
            # The library knows only IPv4 addresses. The connection may already be closed.
            with contextlib.suppress(OSError):
                host, port = stream.stream.socket.getpeername()[:2]
                # If the node listens only at ::, IPv4 peers appear as IPv4-mapped IPv6 addresses.
                inner = ipaddress.IPv6Address(host).ipv4_mapped if ":" in host else None
                self._remote = str(inner or host), port
        self._line = line_of_host((self._remote or ("",))[0], id(self), stranger)
        # Time of the last bytes; infinite while our rate limit keeps us from reading.
        self.heard_at = trio.current_time()

    async def read(self, n: int | None = None) -> bytes:
        data = bytes(await self._stream.read(n))
        self._traffic.count(down=len(data))
        self.heard_at = math.inf
        await self._traffic.read(len(data), self._line)
        self.heard_at = trio.current_time()
        return data

    async def write(self, data: bytes) -> None:
        self._traffic.count(up=len(data))
        await self._stream.write(data)

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return the host and port of the other end."""
        return self._remote

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class CountedTcp(TCP):  # type: ignore[misc]  # the library is not typed for us
    """Makes `CountedSocket`s for dials, with a timeout. `LimitedNetwork` makes them for inbound connections.

    Without a timeout the library waits as long as the system does, two minutes. Its DHT cancels such a dial
    earlier, and so never learns that the peer is gone.
    """

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    async def _dial_resolved(self, *args: Any, **options: Any) -> Any:
        with trio.move_on_after(CONNECT_TIMEOUT_S):
            connection = await super()._dial_resolved(*args, **options)
            connection.stream = CountedSocket(connection.stream, self._traffic)
            return connection
        raise OpenConnectionError(f"no answer in {CONNECT_TIMEOUT_S:g} s")


class Circuit(RawConnection):  # type: ignore[misc]
    """A connection through a relay: a stream to the relay, which forwards the bytes.

    The address of the other end is unknown.
    """

    def __init__(self, stream: Any, initiator: bool, relay: PeerId) -> None:
        self.address = f"/p2p/{relay}/p2p-circuit"
        stream.muxed_stream.paid = True
        super().__init__(stream, initiator, ConnectionType.RELAYED, [Multiaddr(self.address)])

    def get_remote_address(self) -> None:
        return None

    @property
    def line(self) -> Line:
        """The circuit's path in shared rates. All circuits through one relay count as one machine."""
        return Line(self.stream.muxed_conn.line.group, self.address, "", not self.is_initiator)

    async def read(self, n: int | None = None) -> bytes:
        """Read, and wait at the gate for strangers.

        The connection to the relay does not wait there, because we dialled it, but the peer behind it is a
        stranger.
        """
        data = bytes(await super().read(n))
        if self.line.stranger:
            await self.stream.muxed_conn.traffic.strangers.wait(len(data), self.line.path)
        return data

    async def close(self) -> None:
        # A reset, unlike a close, never waits for the relay.
        await self.stream.reset()


class PacedReads:
    """Wraps a connection, above or below Noise, to limit its reads a second.

    gate: shared by all connections of the machine at the other end.
    """

    def __init__(self, connection: Any, gate: RateGate) -> None:
        self._connection, self._gate, self._left = connection, gate, 0

    async def read(self, n: int | None = None) -> bytes:
        await self._wait()
        return bytes(await self._connection.read(n))

    async def read_msg(self) -> bytes:
        await self._wait()
        return bytes(await self._connection.read_msg())

    async def _wait(self) -> None:
        if not self._left:
            await self._gate.wait(READS_AT_A_TIME)
            self._left = READS_AT_A_TIME
        self._left -= 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class MeteredStream:
    """A stream of the library that is read in large pieces.

    The library would read the length of each message byte by byte from the connection; here these reads come
    from a buffer.

    on_read: called with the peer for each of the library's reads.
    """

    def __init__(self, stream: Any, on_read: Callable[[Any], object]) -> None:
        self._stream, self._on_read = stream, on_read
        self._ahead = b""

    async def read(self, n: int | None = None) -> bytes:
        if not self._ahead:
            self._ahead = await self._more()
        self._on_read(self._stream.muxed_conn.peer_id)
        data, self._ahead = (self._ahead, b"") if n is None else (self._ahead[:n], self._ahead[n:])
        return data

    async def _more(self) -> bytes:
        return bytes(await self._stream.read(READ_BYTES))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


async def end(stream: Any, well: bool = False) -> None:
    """Close a stream of the library if `well`, else reset it. Never fails and cannot be cancelled."""
    with trio.CancelScope(shield=True), contextlib.suppress(Exception):
        # The stream may already have ended.
        await (stream.close() if well else stream.reset())


class IncomingStream:
    """Implements `ByteStream` on a stream of the library."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def read(self) -> bytes:
        try:
            return bytes(await self._stream.read(CHUNK_BYTES))
        except StreamEOF:
            return b""
        except Exception as error:
            # The stream was reset or its connection closed. Each layer of the library raises a different
            # exception.
            raise Broken(repr(error)) from None

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.write(data)
        except Exception as error:
            # As in `read`.
            raise Broken(repr(error)) from None

    async def end(self, well: bool) -> None:
        await end(self._stream, well)


class OutgoingStream(IncomingStream):
    """A stream that we opened; its negotiation is sent together with the first question.

    Implements `ByteStream`.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._greeting, self._expected = GREETING, GREETING

    async def write(self, data: bytes) -> None:
        greeting, self._greeting = self._greeting, b""
        await super().write(greeting + data)

    async def read(self) -> bytes:
        data = await super().read()
        while data and self._expected:
            length = min(len(data), len(self._expected))
            if data[:length] != self._expected[:length]:
                raise Broken("does not know the protocol")
            self._expected, data = self._expected[length:], data[length:]
            if not data:
                data = await super().read()
        return data


def serve(responder: Responder) -> Callable[[Any], Awaitable[None]]:
    """Return the handler of incoming question streams."""

    async def handler(stream: Any) -> None:
        incoming, well = IncomingStream(stream), False
        try:
            muxed = stream.muxed_conn
            well = await responder.serve(PeerId(str(muxed.peer_id)), incoming, muxed.line)
        finally:
            await incoming.end(well)

    return handler


class Libp2pRequests:
    """Asks each question in a separate task, so that a cancelled caller need not wait for the stream to end.

    reach: as in `KeptStreams`.
    """

    def __init__(
        self, network: Any, reach: Callable[[PeerId], Awaitable[bool]], nursery: trio.Nursery
    ) -> None:
        self._network, self._nursery = network, nursery
        self._streams = KeptStreams(reach, self._new)

    async def ask(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        """Ask a peer. Raises Unanswered."""
        asked, outcome = trio.CancelScope(), list[bytes | str]()
        done = trio.Event()

        async def run() -> None:
            try:
                with asked:
                    outcome.append(await self._streams.ask(peer, question, limit))
            except Unanswered as error:
                outcome.append(str(error))
            finally:
                done.set()

        self._nursery.start_soon(run)
        try:
            await done.wait()
        finally:
            asked.cancel()
        answer = outcome[0] if outcome else f"{peer}: the engine stopped"
        if isinstance(answer, str):
            raise Unanswered(answer)
        return answer

    async def _new(self, peer: PeerId) -> OutgoingStream:
        try:
            return OutgoingStream(await self._network.new_stream(ID.from_string(peer)))
        except Exception as error:
            # The connection has ended. Each layer of the library raises a different exception.
            raise Broken(repr(error)) from None
