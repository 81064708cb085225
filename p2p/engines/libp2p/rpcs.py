"""Reads GossipSub's RPCs one at a time.

What a peer begins and does not finish is bounded, in time and over all peers together.
"""

import math
from collections.abc import Callable
from typing import Any

import trio
from libp2p.network.stream.exceptions import StreamEOF, StreamError, StreamReset

from p2p.envelope import MAX_FRAME_BYTES

# A frame and control.
MAX_RPC_BYTES = MAX_FRAME_BYTES + 64 * 1024
# Begun RPCs of all peers together.
MAX_UNFINISHED_BYTES = 4 * 1024 * 1024
# The time of an RPC from its first byte to its last.
FINISH_S = 10.0
_READ_BYTES = 65536
# The length of an RPC's length prefix.
_MAX_LENGTH_BYTES = 3

CutOff = Callable[[Any, str], None]  # a peer, and why


class UnfinishedRpcs:
    """The budget of all streams together. Where it is used up, the stream with most of it is ended."""

    def __init__(self, cut_off: CutOff, limit: int = MAX_UNFINISHED_BYTES) -> None:
        self._cut_off, self._limit = cut_off, limit
        self._held: dict[RpcStream, int] = {}  # bytes
        self._total = 0

    def hold(self, stream: "RpcStream", size: int) -> None:
        """Note how many bytes of an unfinished RPC the stream holds now; 0: none."""
        self._total += size - self._held.pop(stream, 0)
        if size:
            self._held[stream] = size
        while self._total > self._limit:
            greedy = max(self._held, key=lambda held: self._held[held])
            self._total -= self._held.pop(greedy)
            greedy.end()
            self._cut_off(greedy.peer, "too much begun and not finished")


class RpcStream:
    """A stream of the library that gives out whole RPCs alone.

    It is read in large pieces: the library would read each length byte by byte.

    on_read: called with the peer before an RPC is given out, and for each piece of it.
    """

    def __init__(
        self, stream: Any, on_read: Callable[[Any], object], unfinished: UnfinishedRpcs, cut_off: CutOff
    ) -> None:
        self._stream, self._on_read, self._unfinished, self._cut_off = stream, on_read, unfinished, cut_off
        self._whole, self._rest = b"", bytearray()  # what may be given out, and what came after it
        self._scope = trio.CancelScope()
        self._ended = False
        self.peer = stream.muxed_conn.peer_id

    async def read(self, n: int | None = None) -> bytes:
        """Read from whole RPCs. Raises StreamError, also where one takes too long or too much of it waits."""
        if not self._whole:
            await self._receive()
        self._on_read(self.peer)
        data, self._whole = (self._whole, b"") if n is None else (self._whole[:n], self._whole[n:])
        return data

    def end(self) -> None:
        """Tell whoever reads that the stream was reset."""
        self._ended = True
        self._scope.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def _receive(self) -> None:
        self._scope = trio.CancelScope()
        try:
            with self._scope:
                while (size := _size(self._rest)) is None:
                    self._unfinished.hold(self, len(self._rest))
                    if self._rest and self._scope.deadline == math.inf:
                        self._scope.deadline = trio.current_time() + FINISH_S
                    more = await self._stream.read(_READ_BYTES)
                    if not more:
                        raise StreamEOF
                    self._on_read(self.peer)
                    self._rest += more
        except NoRpc as error:
            self._cut_off(self.peer, str(error))
            raise
        finally:
            self._unfinished.hold(self, 0)
        if size is None:
            if not self._ended:
                self._cut_off(self.peer, f"an RPC was not finished within {FINISH_S:g} s")
            raise StreamReset
        self._whole = bytes(self._rest[:size])
        del self._rest[:size]


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
