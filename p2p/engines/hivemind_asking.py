"""Questions and answers (`p2p.engines.asking`) over streams of p2pd, each a connection of its own to a Unix socket: ours to p2pd's where
we ask, p2pd's to ours where we are asked. The end of one direction is the end of both there.
"""

import logging
import socket
from collections.abc import Awaitable, Callable

import trio

from p2p.engines.asking import CHUNK, Broken, Desk, Turns, ask
from p2p.engines.p2pd import P2pd, P2pdGone, P2pdRefused, Wire, peer_bytes, peer_of, unix_address
from p2p.topic import ASK
from p2p.types import PeerId, Unanswered

OPEN_TIMEOUT = 8  # seconds in which p2pd is to reach the peer; whole ones
BACKLOG = 64

log = logging.getLogger(__name__)


class Piped:
    """Implements `asking.Stream`."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def read(self) -> bytes:
        try:
            return await self._wire.read(CHUNK)
        except P2pdGone as error:
            raise Broken(str(error)) from None

    async def write(self, data: bytes) -> None:
        try:
            await self._wire.write(data)
        except P2pdGone as error:
            raise Broken(str(error)) from None


async def serve(p2pd: P2pd, desk: Desk) -> None:
    """Answer, until cancelled. Raises P2pdGone, P2pdRefused where p2pd does not hand the streams over."""
    path = p2pd.folder / "asked"
    with trio.socket.socket(socket.AF_UNIX) as listening:
        await listening.bind(str(path))
        listening.listen(BACKLOG)
        handler = {"addr": unix_address(path), "proto": [ASK], "balanced": False}
        await p2pd.ask(type=p2pd.pb.Request.STREAM_HANDLER, streamHandler=handler)
        async with trio.open_nursery() as nursery:
            while True:
                connection, _ = await listening.accept()
                nursery.start_soon(_serve_one, p2pd, desk, trio.SocketStream(connection))


async def _serve_one(p2pd: P2pd, desk: Desk, stream: trio.SocketStream) -> None:
    async with stream:
        wire = Wire(stream)
        try:
            peer = peer_of((await wire.receive(p2pd.pb.StreamInfo)).peer)
        except P2pdGone as error:
            log.debug("a stream ended: %s", error)
            return
        if peer is not None:
            await desk.serve(peer, Piped(wire))


class Asker:
    """reach: sees to it that p2pd is connected, where an address is known; False where the peer is not to be asked. Raises P2pdGone."""

    def __init__(self, p2pd: P2pd, reach: Callable[[PeerId], Awaitable[bool]]) -> None:
        self._p2pd, self._reach = p2pd, reach
        self._turns = Turns()

    async def ask(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        """Raises Unanswered."""
        async with self._turns.turn(peer):
            try:
                allowed = await self._reach(peer)
            except P2pdGone as error:
                raise Unanswered(f"{peer}: {error}") from None
            if not allowed:
                raise Unanswered(f"{peer} is shut out")
            try:
                async with self._p2pd.wire() as wire:
                    stream = {"peer": peer_bytes(peer), "proto": [ASK], "timeout": OPEN_TIMEOUT}
                    await self._p2pd.answer(wire, OPEN_TIMEOUT, type=self._p2pd.pb.Request.STREAM_OPEN, streamOpen=stream)
                    return await ask(Piped(wire), question, limit)
            except (P2pdGone, P2pdRefused, Unanswered) as error:
                raise Unanswered(f"{peer}: {error}") from None
