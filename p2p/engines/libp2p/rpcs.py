"""GossipSub's RPCs: reads them one at a time, and queues what is sent to each neighbour.

A peer has one RPC begun at a time, and a limited time to finish it. New messages are checked at a limited
rate, of each ingress (below) in turn, and no more is read of a connection while messages of it wait: whoever
floods us waits itself, and its messages stay with it.

To a neighbour go our own frames, control, and what we pass on for others. Passing on is fair by **ingress**,
where a frame came in: network groups are served in turn, in a group its connections, and in one of these its
authors, which are as many as it likes. Where too much waits, the oldest goes of the author that has most, of
the connection that has most, of the group that has most. So a flood crowds out itself. The next node charges
us for all that we pass on, so it goes at a pace that is less than a connection may bring.
"""

import math
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import trio
from libp2p.network.stream.exceptions import StreamEOF, StreamError, StreamReset

from p2p.admission.fair_queue import Turns
from p2p.engines.libp2p.streams import READ_BYTES, MeteredStream, own_frame
from p2p.envelope import MAX_FRAME_BYTES
from p2p.rate_limit import TokenBucket

# A frame and control.
MAX_RPC_BYTES = MAX_FRAME_BYTES + 64 * 1024
# The time of an RPC from its first byte to its last.
FINISH_S = 10.0
# New messages that are checked: a second, and at once after a pause. A swarm has some a second; each costs us
# a millisecond, with its two signatures and what passes it on. A lone flooder is cut off within the burst.
CHECKS_PER_S, CHECKS_BURST = 50.0, 1200.0
# Messages that wait to be checked, each with the bytes of the task that waits with it. One RPC may hold 600,
# and a connection with a new key, which brings another, costs nothing.
MAX_WAITING_BYTES, TASK_BYTES = 64 * 1024 * 1024, 4096
# The length of an RPC's length prefix.
_MAX_LENGTH_BYTES = 3


class RpcStream(MeteredStream):
    """A stream of the library that gives out whole RPCs alone.

    Its reads raise StreamError, also where an RPC takes too long.

    on_read: called with the peer before an RPC is given out, and for each piece of it. cut_off: called with a
        peer and the reason. ready: waited for before each RPC.
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
        self._rest = bytearray()  # what came after the RPC that is given out
        self.peer = stream.muxed_conn.peer_id

    async def _more(self) -> bytes:
        await self._ready(self.peer)
        try:
            with trio.CancelScope() as receiving:
                while (size := _size(self._rest)) is None:
                    if self._rest and receiving.deadline == math.inf:
                        receiving.deadline = trio.current_time() + FINISH_S
                    more = await self._stream.read(READ_BYTES)
                    if not more:
                        raise StreamEOF
                    self._on_read(self.peer)
                    self._rest += more
        except NoRpc as error:
            self._cut_off(self.peer, str(error))
            raise
        if size is None:
            self._cut_off(self.peer, f"an RPC was not finished within {FINISH_S:g} s")
            raise StreamReset
        whole = bytes(self._rest[:size])
        del self._rest[:size]
        return whole


class NoRpc(StreamError):  # type: ignore[misc]
    """What came is no RPC, or is too large."""


def _size(data: bytearray) -> int | None:
    """Return the bytes of the first RPC, its length included; None where it is not whole. Raises NoRpc."""
    length = 0
    for place, byte in enumerate(data[:_MAX_LENGTH_BYTES]):
        length |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            break
    else:
        if len(data) >= _MAX_LENGTH_BYTES:
            raise NoRpc("an RPC is too large")
        return None
    if length > MAX_RPC_BYTES:
        raise NoRpc(f"an RPC of {length} bytes, and at most {MAX_RPC_BYTES} are taken")
    size = place + 1 + length
    return size if len(data) >= size else None


# Others' frames that wait for one neighbour. Each counts with no less than an equal part of the bytes, so
# that neither many small ones nor a few large ones push out those of others.
MAX_FRAMES, MAX_BYTES = 256, 512 * 1024
# Others' frames go in one RPC up to so many bytes, and the last.
JOINED_BYTES = 16 * 1024
# Frames of ours that wait for one neighbour.
MAX_OWN_FRAMES = 64
# Control RPCs that wait. The library repeats those that were refused and matter.
MAX_CONTROL_RPCS = 64
# Others' frames to one neighbour: three quarters of what it takes from a connection.
PACE_PER_S, PACE_BURST = 150.0, 300.0
PACE_BYTES_PER_S, PACE_BURST_BYTES = 3 * 1024 * 1024.0, 16 * 1024 * 1024.0
# RPCs of others' frames to one neighbour: what comes faster goes together, as each is a write of its own.
PACE_RPCS_PER_S, PACE_BURST_RPCS = 10.0, 20.0
Ingress = tuple[Hashable, Hashable]  # the network group of a connection, and its peer
# The ingress of what a neighbour asked us for.
ASKED: Ingress = ("asked for", "")
# That of the message that this task passes on.
ingress: ContextVar[Ingress] = ContextVar("ingress", default=ASKED)


@dataclass(eq=False, slots=True)
class _Turn:
    """The turn of a message that waits to be checked."""

    peer: Hashable
    come: trio.Event = field(default_factory=trio.Event)
    dropped: bool = False  # it has to go, as too much waits


class CheckQueue:
    """Lets new messages in at a limited rate, of each network group and connection in turn.

    Where too much waits, the oldest goes of the connection that has most, of the group that has most.
    """

    def __init__(self) -> None:
        self._bucket = TokenBucket(CHECKS_PER_S, CHECKS_BURST, 0.0)
        self._turns = Turns()
        # Peer -> the turn of its last message that waits, which is also the last to come
        self._last: dict[Hashable, _Turn] = {}
        self._some = trio.Event()

    async def enter(self, by: Ingress, size: int) -> bool:
        """Wait until it is the turn of a message of this size. Returns False where it has to go instead."""
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
        """Wait until no message of this peer waits."""
        if peer in self._last:
            await self._last[peer].come.wait()

    async def run(self) -> None:
        """Give turns until cancelled."""
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
    """Takes the place of the library's `PriorityQueue`, whose methods it has. Limits others' frames.

    me: our own id, as messages name it.
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
        """Add an RPC. Returns whether it waits now; what waited before may be dropped for it.

        priority: the library's, which is for control.
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
        """Return the next RPC; None where none waits. Others' frames go together, which costs less.

        Our own frames that a neighbour asks for go with them: it could ask for each a hundred times.
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
        """Charge for an RPC of others' frames. Returns the seconds after which it may go."""
        seconds = 0.0
        for bucket, amount in zip(self._paces, (frames, size, 1), strict=True):
            bucket.refill(now)
            bucket.spend(amount)
            seconds = max(seconds, -bucket.left / bucket.rate)
        return seconds

    def __len__(self) -> int:
        return len(self._own) + len(self._control) + self._others.frames


class Queues(dict[Any, Any]):
    """The library's queues, one for each neighbour, with ours in them.

    The library makes a queue, and the task that empties it, in one method.
    """

    def __init__(self, me: bytes) -> None:
        self._me = me

    def __setitem__(self, peer: Any, queue: Any) -> None:
        queue.max_message_size = MAX_RPC_BYTES
        queue._queue = ForwardQueue(self._me)
        if (before := self.get(peer)) is not None:
            # Two streams were opened at once. The first one's task would wait for this queue for ever.
            before.close()
        super().__setitem__(peer, queue)
