"""py-libp2p's network with limits on connections, streams and buffers, and with clean ends of connections."""

import contextlib
import logging
import struct
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import trio
from libp2p.custom_types import TProtocol
from libp2p.network import swarm
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.connection import swarm_connection
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.net_stream import NetStream
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux import yamux
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_SYN,
    HEADER_SIZE,
    MAX_MESSAGE_SIZE,
    PROTOCOL_ID,
    TYPE_PING,
    YAMUX_HEADER_FORMAT,
    Yamux,
    YamuxStream,
)
from libp2p.utils.address_validation import has_public_ipv6, is_relay_address

from p2p.address import parse_endpoint
from p2p.admission.dials import Dials
from p2p.admission.host_bans import HostBans
from p2p.admission.inbound_slots import InboundSlots
from p2p.engines.libp2p.streams import Circuit, CountedSocket, PacedReads, own_frame
from p2p.engines.traffic import UNKNOWN_LINE, Line, RateGate, Traffic, line_of_host
from p2p.netgroup import LOCAL, NAME, group_of, group_of_host
from p2p.types import PeerId

MUXERS = {TProtocol(PROTOCOL_ID): Yamux}
# Maximum bytes of data in one yamux frame.
MAX_PAYLOAD_BYTES = MAX_MESSAGE_SIZE - HEADER_SIZE
# Bytes that are read before a window update is sent.
WITHHELD_BYTES = 64 * 1024
# Timeout of a write on a connection.
WRITE_TIMEOUT_S = 10.0
# Timeout of a stream's wait for its window. It is longer because the other side may have a rate limit.
WINDOW_TIMEOUT_S = 30.0
# Maximum bytes of replies that wait to be written; a reply has 12 bytes.
MAX_OWED_BYTES = 64 * 1024
# Maximum unread bytes of one connection: 64 full windows.
MAX_BUFFERED_BYTES = 16 << 20
# Maximum unread bytes of all connections, not counting one full window of each, and seconds between two
# counts.
MAX_UNREAD_BYTES, WINDOW_BYTES, UNREAD_EVERY_S = 48 << 20, 256 * 1024, 0.1
# Maximum number of a connection's streams that have not ended on both sides. The library forgets ended
# streams in 90 s.
MAX_HALF_CLOSED_STREAMS = 1024
# Reads (Noise messages and parts of yamux frames) from all connections of one machine. An empty frame takes
# us 0.015 ms, a message of one byte 0.06 ms. Seven nodes that share at once cause about 700 reads a second.
READS_PER_S = 2000.0
# Timeout to close a listener. Normally it closes at once.
CLOSE_TIMEOUT_S = 5.0
# If two connections to a peer are made within this time, both sides may have dialled in good faith.
SIMULTANEOUS_S = 5.0

log = logging.getLogger(__name__)


class _Nothing(bytearray):
    """A stream buffer that discards all bytes."""

    def extend(self, _: Iterable[Any], /) -> None:
        pass


class WindowedStream(YamuxStream):  # type: ignore[misc]  # the library is not typed for us
    """A stream that waits for the rate limit and has a fixed window, with few window updates.

    The library sends a window update after every read, so three frames for each small message. Here an update
    is sent after WITHHELD_BYTES. The window stays at 256 KiB, which is enough. The library doubles it with
    the first reads, up to 16 MiB, so that a peer could make us buffer 16 MiB.
    """

    # Set for a stream that carries a circuit, because its bytes have already waited for the rate limit.
    paid = False
    _unacknowledged = 0  # bytes read since the last window update

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._whole = trio.Lock()

    async def write(self, data: bytes) -> None:
        """Write all data without bytes of other tasks in between. Wait for the rate limit before each frame.

        The lock is needed because the library writes recent messages to a new neighbour while another task
        sends to it. The wait is before the frame is made, so nothing must be undone if the wait is cancelled
        or the stream ends. Frames without data do not wait: they are few, and the other side may time out on
        them.
        """
        async with self._whole:
            at = 0
            while at < len(data):
                piece = data[at : at + min(MAX_PAYLOAD_BYTES, await self._room())]
                if not self.paid:
                    await self.conn.traffic.send(HEADER_SIZE + len(piece), self.conn.line, own_frame.get())
                await super().write(piece)
                at += len(piece)

    async def _room(self) -> int:
        """Wait until the window is open, and return its size in bytes. Raises MuxedStreamError on a timeout.

        The library's timeout is five seconds, too short for a peer with a rate limit.
        """
        # Seconds between two checks of the window. It grows, so that many streams with a closed window do not
        # keep us busy.
        pause = 0.01
        with trio.move_on_after(WINDOW_TIMEOUT_S):
            while self.send_window <= 0 and not (self.closed or self.send_closed):
                await trio.sleep(pause)
                pause = min(2 * pause, 0.2)
            # 1 if the stream is closed: the library then raises the error.
            return max(1, int(self.send_window))
        raise MuxedStreamError(f"no room in the stream for {WINDOW_TIMEOUT_S:g} s")

    async def reset(self) -> None:
        await super().reset()
        self.drop()

    def drop(self) -> None:
        """Discard all received and future bytes of this stream, because we have ended it.

        The library would keep them for a minute after a reset, and after a close until the other side closes,
        too. One connection could leave 16 MiB.
        """
        if self.stream_id in self.conn.stream_buffers:
            self.conn.stream_buffers[self.stream_id] = _Nothing()

    async def _auto_tune_and_send_window_update(self, *, bytes_read: int = 0) -> None:
        self._unacknowledged += bytes_read
        if self._unacknowledged >= WITHHELD_BYTES:
            increment, self._unacknowledged = self._unacknowledged, 0
            self.recv_window += increment
            await self.send_window_update(increment)


class EndingStream(NetStream):  # type: ignore[misc]
    """A stream whose close cannot be cancelled.

    If a lookup is cancelled, the library closes its streams in the cancelled scope. So they would stay open
    and use up the connection's 256 places.
    """

    async def close(self) -> None:
        with trio.CancelScope(shield=True):
            await super().close()
        self.muxed_stream.drop()


# Patches the library, which makes its streams itself.
yamux.YamuxStream, swarm_connection.NetStream = WindowedStream, EndingStream
# Removes a cache. The library looks only once whether the machine has IPv6, so a node that starts before its
# network would never dial IPv6 addresses.
swarm.has_public_ipv6 = has_public_ipv6.__wrapped__


class Muxer(Yamux):  # type: ignore[misc]
    """Yamux whose writes cannot be cancelled, and whose reader never waits for a write.

    - A write that is cancelled half way, or after Noise has counted it, would break the whole connection.
    - The reader sends replies (the ACK of a stream, the answer to a ping). If it waited for these writes, two
      nodes would deadlock once both write more than the connection buffers: neither would read. So another
      task writes the replies.
    """

    def __init__(
        self, *args: Any, traffic: Traffic | None = None, line: Line = UNKNOWN_LINE, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.traffic, self.line = traffic or Traffic(), line
        self.traffic.muxers.add(self)
        self._patience = WRITE_TIMEOUT_S if _circuit_below(self.secured_conn) is None else WINDOW_TIMEOUT_S
        self._reader: trio.lowlevel.Task | None = None
        self._owed, self._paying = bytearray(), False  # replies, and whether a task is writing them
        self._turn = trio.Lock()

    async def handle_incoming(self) -> None:
        self._reader = trio.lowlevel.current_task()
        await super().handle_incoming()

    async def _write_frame(self, data: bytes) -> None:
        """Write a frame, or queue it if it is the reader's reply. Raises MuxedConnUnavailable."""
        if trio.lowlevel.current_task() is not self._reader:
            # Queued replies go first, so that the ACK of a stream comes before its data.
            owed, self._owed = self._owed, bytearray()
            await self._write(bytes(owed + data))
            return
        if len(self._owed) > MAX_OWED_BYTES:
            await self._give_up("the peer reads nothing")
        self._owed += data
        if not self._paying and self._nursery is not None:
            self._paying = True
            self._nursery.start_soon(self._pay)
        await trio.lowlevel.checkpoint()

    async def _pay(self) -> None:
        with contextlib.suppress(Exception):
            # On an exception the connection is closed, which the reader notices. Take the bytes without an
            # await before the write: other tasks take them too, and an empty Noise message would mean the end
            # of the connection.
            while self._owed:
                owed, self._owed = self._owed, bytearray()
                await self._write(bytes(owed))
        self._paying = False

    async def _write(self, frames: bytes) -> None:
        """Write these frames with a timeout.

        The timeout starts when it is their turn, so it does not include earlier writes or the wait for the
        rate limit.
        """
        with trio.CancelScope(shield=True):
            async with self._turn:
                with trio.move_on_after(self._patience):
                    await super()._write_frame(frames)
                    return
        await self._give_up("the peer reads nothing")

    @property
    def unread(self) -> int:
        """Return the number of received bytes that were not read yet."""
        return sum(map(len, self.stream_buffers.values()))

    async def _read_data_body(self, length: int) -> bytes:
        """Read data. Raises MuxedConnUnavailable if the peer sends more than its windows allow.

        The library only logs such an excess and keeps the bytes.
        """
        unread = length + self.unread
        if unread > MAX_BUFFERED_BYTES:
            await self._give_up("the peer exceeds its windows")
        now = trio.current_time()
        if unread > WINDOW_BYTES and now - self.traffic.added_up_at > UNREAD_EVERY_S:
            self.traffic.added_up_at = now
            await self._end_the_largest()
        return bytes(await super()._read_data_body(length))

    async def _end_the_largest(self) -> None:
        """If all connections together have too many unread bytes, end one of them.

        It is the connection with the most unread bytes, in the machine and network group with the most.
        """
        left = Counter[tuple[Hashable, ...]]()
        for muxer in self.traffic.muxers:
            more = max(0, muxer.unread - WINDOW_BYTES)
            left.update({muxer.line[:level]: more for level in range(4)})
        if left[()] > MAX_UNREAD_BYTES:
            largest = max(self.traffic.muxers, key=lambda one: [left[one.line[:level]] for level in range(4)])
            self.traffic.muxers.discard(largest)
            with contextlib.suppress(MuxedConnUnavailable):
                await largest._give_up("too many unread bytes")

    async def accept_stream(self) -> Any:
        """Accept a stream. Raises MuxedConnUnavailable, also if the peer never ends its streams.

        The library keeps streams that only we have ended.
        """
        if len(self.streams) > MAX_HALF_CLOSED_STREAMS:
            await self._give_up("the peer never ends its streams")
        return await super().accept_stream()

    def _finalize_stream_locked(self, stream: Any, *, fully_closed: bool) -> None:
        """Forget an ended stream, and wake its reader, which the library would leave waiting for ever."""
        waited_for = self.stream_events.get(stream.stream_id)
        super()._finalize_stream_locked(stream, fully_closed=fully_closed)
        if waited_for is not None and stream.stream_id not in self.stream_events:
            waited_for.set()

    def _sweep_stale_streams(self, now: float | None = None) -> int:
        """Also drop the events of streams that are gone, which the library keeps for their readers."""
        for gone in self.stream_events.keys() - self.streams.keys():
            del self.stream_events[gone]
        return int(super()._sweep_stale_streams(now))

    async def ping(self) -> None:
        """Send a ping, without waiting for the rate limit or the answer."""
        await self._write_frame(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_PING, FLAG_SYN, 0, 0))

    async def _give_up(self, why: str) -> NoReturn:
        """End the connection and all its streams by closing its socket. Raises MuxedConnUnavailable."""
        await self.secured_conn.conn.read_writer.close()
        raise MuxedConnUnavailable(why)


class MuxerChoice(MuxerMultistream):  # type: ignore[misc]
    """Makes `Muxer`s; the library would make its own Yamux, even if it is given another class."""

    def __init__(self, muxers: Any, traffic: Traffic) -> None:
        super().__init__(muxers)
        self._traffic = traffic
        self._gates: WeakValueDictionary[str, RateGate] = WeakValueDictionary()  # by machine or relay

    async def new_conn(self, conn: Any, peer_id: Any) -> Any:
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        through = _circuit_below(conn)
        line = (
            line_of_host(remote_host(conn), peer_id, not conn.is_initiator)
            if through is None
            else through.line._replace(connection=peer_id)
        )
        gate = self._gates.setdefault(line.machine, RateGate(READS_PER_S))
        conn.conn = PacedReads(conn.conn, gate)
        conn = PacedReads(conn, gate)
        return self._annotate_connection(
            Muxer(conn, peer_id, is_initiator=conn.is_initiator, traffic=self._traffic, line=line),
            conn,
            protocol,
        )


class LimitedNetwork(swarm.Swarm):  # type: ignore[misc]
    """Limits inbound connections and dials of unproved addresses, and ends connections at once.

    Our discovery makes outbound connections, not the library. Dials are limited (`Dials`) because peers can
    name a victim's address.

    shut_out: whether a peer is banned.

    Attributes:
        vouches: whether a peer has answered at an address, or the operator named it.
    """

    def __init__(
        self,
        *args: Any,
        traffic: Traffic,
        shut_out: Callable[[str], bool],
        host_bans: HostBans,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.traffic, self._shut_out, self._host_bans = traffic, shut_out, host_bans
        self.auto_connector = _NoAutoConnector(swarm=self)
        self.slots = InboundSlots()
        self.vouches: Callable[[PeerId, str], bool] = lambda *_: False
        self._dials = Dials()

    async def _dial_addr_single_attempt(self, addr: Any, peer_id: Any, *source: Any) -> Any:
        """Dial an address. Raises SwarmException if the address is unproved and its block over the limit."""
        endpoint = parse_endpoint(str(addr).partition("/p2p/")[0])
        vouched = self.vouches(PeerId(str(peer_id)), str(endpoint))
        if not vouched and not self._dials.begin(endpoint, trio.current_time()):
            raise SwarmException(f"{addr} is not dialled: too many unanswered dials in its network block")
        connection = await super()._dial_addr_single_attempt(addr, peer_id, *source)
        if not vouched and endpoint is not None:
            self._dials.proved(endpoint, trio.current_time())
        return connection

    async def _handle_inbound_connection(self, read_write_closer: Any, maddr: Any) -> None:
        """Serve an inbound connection until it ends, and then free its slot.

        The library never frees slots of inbound connections, and refuses all after the 160th.
        """
        read_write_closer = CountedSocket(read_write_closer, self.traffic, stranger=True)
        host, muxed = (read_write_closer.get_remote_address() or ("",))[0], None
        now = trio.current_time()
        admitted = self._host_bans.admits(host, now)
        leaving = self.slots.take(read_write_closer, host, now) if admitted else read_write_closer
        try:
            if leaving is read_write_closer:
                return
            if leaving is not None:
                await leaving.close()
            muxed = await self.upgrade_inbound_raw_conn(RawConnection(read_write_closer, False), maddr)
            self.slots.held[read_write_closer].peer = muxed.peer_id
            while (
                not muxed.event_closed.is_set()
                and not self._shut_out(str(muxed.peer_id))
                and any(connection.muxed_conn is muxed for connection in self.get_connections())
            ):
                with trio.move_on_after(10.0):
                    await muxed.event_closed.wait()
        except Exception as error:
            # The peer did not prove its id, or lost its slot meanwhile.
            log.debug("an inbound connection failed: %r", error)
        finally:
            self.slots.held.pop(read_write_closer, None)
            if muxed is not None and self._shut_out(str(muxed.peer_id)):
                self._host_bans.count(PeerId(str(muxed.peer_id)), host, trio.current_time())
            with contextlib.suppress(Exception), trio.CancelScope(shield=True):
                # The connection may already be closed.
                await read_write_closer.close()

    async def new_stream(self, peer_id: Any) -> Any:
        """Open a stream. If the peer is not connected, dial it only at internet addresses.

        The library dials a peer that is not connected, and its DHT opens streams to any peers that other
        nodes name. So an attacker could make us connect to programs on our machine or in our local network.
        Therefore the peer's local addresses are removed first, and also names, which may lead to local
        addresses. They are kept if all our connections are local. Our discovery does not use this method to
        dial.
        """
        if peer_id in self.peerstore.peer_data_map and not self.get_connections(peer_id):
            known = self.peerstore.peer_data_map[peer_id].addrs
            if {group_of_host(remote_host(one)) for one in direct(self.get_connections())} - {LOCAL}:
                known[:] = [
                    address
                    for address in known
                    if "/tcp/" not in (text := str(address))
                    or is_relay_address(address)
                    or group_of(text) not in (None, LOCAL, NAME)
                ]
        return await super().new_stream(peer_id)

    def kept(self, connections: Sequence[Any], peer_id: Any) -> Any:
        """Choose which of several connections to a peer is kept and used for new streams.

        - Direct connections are preferred to those through relays.
        - A later connection is preferred, because it means that the peer lost the earlier one (a change of
          network, a loss of power). The library would prefer the earlier one, which has more streams.
        - If two were made within SIMULTANEOUS_S, both sides dialled. Then both keep the one that the peer
          with the larger id dialled. If that one is dead, the other side dials again.
        """
        those = direct(connections) or connections
        last = max(connection._created_at for connection in those)
        late = [connection for connection in those if last - connection._created_at <= SIMULTANEOUS_S]
        wanted = "outbound" if str(self.get_peer_id()) > str(peer_id) else "inbound"
        return max(
            late, key=lambda connection: (connection.direction.name.lower() == wanted, connection._created_at)
        )

    _select_connection = kept

    async def _open_stream_on_connection(self, *args: Any) -> Any:
        """Open a stream, with a timeout.

        A caller cannot cancel this. Otherwise the stream would keep one of the connection's 256 places for
        good.
        """
        with trio.CancelScope(deadline=trio.current_time() + WRITE_TIMEOUT_S, shield=True):
            return await super()._open_stream_on_connection(*args)
        raise SwarmException("no stream could be opened")

    async def close_peer(self, peer_id: Any) -> None:
        """Close the peer's sockets first; the library would first send a goodbye, which may block."""
        for connection in self.get_connections(peer_id):
            await close_socket(connection)
        await super().close_peer(peer_id)

    async def close_sockets(self) -> None:
        """End all connections and listeners.

        Cancelling the library closes no sockets, so peers would see us connected until this process ends. It
        also leaves the listeners open, which run in system tasks. After a restart there would be two
        listeners on one port, and every second peer would reach the dead one.
        """
        for connection in self.get_connections():
            await close_socket(connection)
        with trio.CancelScope(deadline=trio.current_time() + CLOSE_TIMEOUT_S, shield=True):
            for listener in list(self.listeners.values()):
                await listener.close()


def circuit(connection: Any) -> Circuit | None:
    """Return the circuit that carries a connection; None if the connection is direct.

    connection: a connection of the network or of the muxer, or a stream.
    """
    return _circuit_below(getattr(connection, "muxed_conn", connection).secured_conn)


def direct(connections: Iterable[Any]) -> list[Any]:
    """Return the connections that do not go through a relay."""
    return [connection for connection in connections if circuit(connection) is None]


def _circuit_below(secured: Any) -> Circuit | None:
    raw = getattr(secured.conn.read_writer, "read_write_closer", None)
    return raw if isinstance(raw, Circuit) else None


def remote(connection: Any) -> tuple[str, int]:
    """Return the host and port of the other end, ("", 0) if the library does not know them."""
    found = getattr(getattr(connection, "muxed_conn", connection), "get_remote_address", lambda: None)()
    return (str(found[0]), int(found[1])) if found is not None else ("", 0)


def remote_host(connection: Any) -> str:
    return remote(connection)[0]


def heard_at(connection: Any) -> float:
    """Return the time of a direct connection's last received bytes, in trio's time."""
    return float(connection.muxed_conn.secured_conn.conn.read_writer.read_write_closer.stream.heard_at)


def remote_address(connection: Any) -> str:
    """Return the other end's multiaddress, "" if the library does not know it."""
    if (through := circuit(connection)) is not None:
        return through.address
    host, port = remote(connection)
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}" if host else ""


async def close_socket(connection: Any) -> None:
    with trio.CancelScope(shield=True):
        # The socket is closed at once, before the await's checkpoint.
        await connection.muxed_conn.secured_conn.conn.read_writer.close()


class _NoAutoConnector(AutoConnector):  # type: ignore[misc]
    async def maybe_connect(self) -> None:
        """Do nothing. The library would dial peers of its store, up to half of the high watermark."""

    def record_disconnect(self, peer_id: Any) -> None:
        """Do nothing. The library would note each peer that left, and forget them only when it dials."""
