"""GossipSub's RPCs: reads them one at a time, and queues the RPCs to each neighbour.

A frame's **ingress** is the connection that brought it, with its network group.

Inbound: each peer may have one unfinished RPC, and must finish it within a limited time. New messages are
checked at a limited rate, each ingress in turn. While messages of a connection wait for their check, nothing
more is read from it. So a flood stays in the flooder's send buffer.

Outbound: a neighbour gets our own frames, control messages, and frames that we forward. Forwarding is fair by
ingress: network groups take turns, in each group its connections take turns, and in each connection its
authors. (A peer can make any number of authors.) If the queue is full, the largest author of the largest
connection of the largest group loses its oldest frame. So a flood pushes out only itself. The next node
charges us for all frames that we forward, so our pace stays below its limit for a connection.
"""

import math
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import trio
from libp2p.network.stream.exceptions import StreamEOF, StreamError, StreamReset
from libp2p.utils.varint import decode_varint_with_size

from p2p.admission.fair_queue import Turns
from p2p.engines.libp2p.streams import READ_BYTES, MeteredStream, own_frame
from p2p.envelope import MAX_FRAME_BYTES
from p2p.rate_limit import TokenBucket

# A frame and control messages.
MAX_RPC_BYTES = MAX_FRAME_BYTES + 64 * 1024
# Timeout of an RPC from its first byte to its last.
FINISH_S = 10.0
# New messages that are checked: rate and burst. A swarm has a few messages a second. Each costs us about 1
# ms, for its two signatures and its forwarding. A single flooder is cut off within the burst.
CHECKS_PER_S, CHECKS_BURST = 50.0, 1200.0
# Memory of messages that wait for their check; TASK_BYTES is the size of the waiting task. The limit is
# needed because one RPC may hold 600 messages, and an attacker can open any number of connections with new
# keys.
MAX_WAITING_BYTES, TASK_BYTES = 64 * 1024 * 1024, 4096
# The length of an RPC's length prefix.
_MAX_LENGTH_BYTES = 3


class RpcStream(MeteredStream):
    """A stream of the library that returns bytes only once an RPC is complete.

    Its reads raise StreamError, also if an RPC takes too long.

    Args:
        stream: the library's stream.
        on_read: called with the peer for each read of the library and each piece that arrives.
        cut_off: called with a peer and the reason to disconnect it.
        ready: awaited with the peer before each RPC.
    """

    def __init__(
        self,
        stream: Any,
        on_read: Callable[[Any], object],
        cut_off: Callable[[Any, str], None],
        ready: Callable[[Any], Awaitable[None]],
    ) -> None:
        super().__init__(stream, on_read)
        self._cut_off, self._ready = cut_off, ready
        self._rest = bytearray()  # bytes that came after the last complete RPC
        self.peer = stream.muxed_conn.peer_id

    async def _more(self) -> bytes:
        await self._ready(self.peer)
        try:
            with trio.CancelScope() as receiving:
                while (size := _size(self._rest)) is None:
                    if self._rest and receiving.deadline == math.inf:
                        receiving.deadline = trio.current_time() + FINISH_S
                    if not (more := await self._stream.read(READ_BYTES)):
                        raise StreamEOF
                    self._on_read(self.peer)
                    self._rest += more
        except NoRpc as error:
            self._cut_off(self.peer, str(error))
            raise
        if size is None:
            self._cut_off(self.peer, f"RPC not finished within {FINISH_S:g} s")
            raise StreamReset
        whole = bytes(self._rest[:size])
        del self._rest[:size]
        return whole


class NoRpc(StreamError):  # type: ignore[misc]
    """The received bytes are not an RPC, or the RPC is too large."""


def _size(data: bytearray) -> int | None:
    """Return the size of the first RPC with its length prefix; None if it is incomplete. Raises NoRpc."""
    length, prefix = decode_varint_with_size(bytes(data[:_MAX_LENGTH_BYTES]))
    if not prefix or data[prefix - 1] >= 0x80:  # the length goes on
        if prefix == _MAX_LENGTH_BYTES:
            raise NoRpc("RPC too large")
        return None
    if length > MAX_RPC_BYTES:
        raise NoRpc(f"RPC too large: {length:,} bytes (limit {MAX_RPC_BYTES:,})")
    size = prefix + length
    return size if len(data) >= size else None


# Limits of the forwarded frames that wait for one neighbour: number and bytes. A frame counts as MAX_BYTES /
# MAX_FRAMES bytes at least, so that neither many small frames nor a few large ones push out other authors'
# frames.
MAX_FRAMES, MAX_BYTES = 256, 512 * 1024
# Forwarded frames are joined in one RPC until it has this many bytes.
JOINED_BYTES = 16 * 1024
# Maximum number of our own frames that wait for one neighbour.
MAX_OWN_FRAMES = 64
# Maximum number of control RPCs that wait for one neighbour. If an RPC that matters is refused, the library
# sends it again.
MAX_CONTROL_RPCS = 64
# Rate and burst of forwarded frames to one neighbour: three quarters of its limit for a connection.
PACE_PER_S, PACE_BURST = 150.0, 300.0
PACE_BYTES_PER_S, PACE_BURST_BYTES = 3 * 1024 * 1024.0, 16 * 1024 * 1024.0
# Rate and burst of RPCs with forwarded frames to one neighbour. Each RPC is a separate write, so frames that
# come faster are joined in one RPC.
PACE_RPCS_PER_S, PACE_BURST_RPCS = 10.0, 20.0
Ingress = tuple[Hashable, Hashable]  # the network group of a connection, and its peer
# The ingress of messages that a neighbour requested (IWANT).
ASKED: Ingress = ("asked for", "")
# The ingress of the message that this task forwards.
ingress: ContextVar[Ingress] = ContextVar("ingress", default=ASKED)


@dataclass(eq=False, slots=True)
class _Turn:
    """A message that waits for its check."""

    peer: Hashable
    come: trio.Event = field(default_factory=trio.Event)
    dropped: bool = False  # the message was dropped because the queue was full


class CheckQueue:
    """Admits new messages to the check at a limited rate, network groups and connections in turn.

    If the queue is full, the largest connection of the largest group loses its oldest message.
    """

    def __init__(self) -> None:
        self._bucket = TokenBucket(CHECKS_PER_S, CHECKS_BURST, 0.0)
        self._turns = Turns()
        # Peer -> the turn of its newest waiting message, which is also served last.
        self._last: dict[Hashable, _Turn] = {}
        self._some = trio.Event()

    async def enter(self, by: Ingress, size: int) -> bool:
        """Wait for the turn of a message of this size. Return False if it was dropped instead."""
        if not self._turns.frames and not self._bucket.wait(trio.current_time()):
            return True
        turn = self._last[by[1]] = _Turn(by[1])
        self._turns.put(by, turn, size + TASK_BYTES)
        self._some.set()
        while self._turns.bytes > MAX_WAITING_BYTES:
            oldest, _ = self._turns.drop()
            oldest.dropped = True
            self._end(oldest)
        await turn.come.wait()
        return not turn.dropped

    async def drained(self, peer: Hashable) -> None:
        """Wait until no message of this peer is in the queue."""
        if peer in self._last:
            await self._last[peer].come.wait()

    async def run(self) -> None:
        """Serve the queue until cancelled."""
        while True:
            await self._some.wait()
            self._some = trio.Event()
            while self._turns.frames:
                if seconds := self._bucket.wait(trio.current_time()):
                    await trio.sleep(max(seconds, 1 / CHECKS_PER_S))
                else:
                    self._end(self._turns.pop()[0])

    def _end(self, turn: _Turn) -> None:
        turn.come.set()
        if self._last.get(turn.peer) is turn:
            del self._last[turn.peer]


class ForwardQueue:
    """Replaces the library's `PriorityQueue` of RPCs to one neighbour. Limits forwarded frames.

    me: our peer id, as in a message's `from_id`.
    """

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._own: deque[Any] = deque(maxlen=MAX_OWN_FRAMES)
        self._control: deque[Any] = deque()
        self._others = Turns()
        self._paces = (
            TokenBucket(PACE_PER_S, PACE_BURST, 0.0),
            TokenBucket(PACE_BYTES_PER_S, PACE_BURST_BYTES, 0.0),
            TokenBucket(PACE_RPCS_PER_S, PACE_BURST_RPCS, 0.0),
        )

    def push(self, rpc: Any, priority: bool = False) -> bool:  # noqa: ARG002
        """Add an RPC. Return False if it was refused; an older RPC may be dropped for it.

        priority: set by the library for control messages; not used here.
        """
        if not rpc.publish:
            if len(self._control) >= MAX_CONTROL_RPCS:
                return False
            self._control.append(rpc)
        elif ingress.get() != ASKED and rpc.publish[0].from_id == self._me:
            self._own.append(rpc)
        else:
            by = (*ingress.get(), rpc.publish[0].from_id)
            self._others.put(by, rpc, max(rpc.ByteSize(), MAX_BYTES // MAX_FRAMES))
            while self._others.bytes > MAX_BYTES:
                self._others.drop()
        return True

    def pop(self) -> Any:
        """Return the next RPC, or None. Forwarded frames are joined in one RPC, which costs less.

        Our own frames that a neighbour requests (IWANT) count as forwarded, because it could request each a
        hundred times.
        """
        own_frame.set(bool(self._own))
        if self._own:
            return self._own.popleft()
        if self._control:
            return self._control.popleft()
        if not self._others.frames:
            return None
        rpc, _ = self._others.pop()
        while self._others.frames and rpc.ByteSize() < JOINED_BYTES:
            rpc.publish.extend(self._others.pop()[0].publish)
        return rpc

    def pace(self, frames: int, size: int, now: float) -> float:
        """Charge the pace for an RPC of forwarded frames. Return the seconds to wait before sending it."""
        seconds = 0.0
        for bucket, amount in zip(self._paces, (frames, size, 1), strict=True):
            bucket.refill(now)
            bucket.spend(amount)
            seconds = max(seconds, -bucket.left / bucket.rate)
        return seconds

    def __len__(self) -> int:
        return len(self._own) + len(self._control) + self._others.frames


class Queues(dict[Any, Any]):
    """The library's queues by neighbour; puts a `ForwardQueue` into each.

    This is a dict because the library makes a queue and starts the task that empties it in one method.
    """

    def __init__(self, me: bytes) -> None:
        self._me = me

    def __setitem__(self, peer: Any, queue: Any) -> None:
        queue.max_message_size = MAX_RPC_BYTES
        queue._queue = ForwardQueue(self._me)
        if (before := self.get(peer)) is not None:
            # Two streams were opened at once. Without this, the first stream's task would wait for this queue
            # for ever.
            before.close()
        super().__setitem__(peer, queue)
