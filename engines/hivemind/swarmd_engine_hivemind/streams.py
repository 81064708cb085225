"""Requests and responses (`p2p.engines.request_response`) over streams of p2pd.

Each stream is a separate connection to a Unix socket. To ask, we connect to p2pd's socket; if a peer asks us,
p2pd connects to our socket. If one direction of such a stream ends, p2pd ends both.
"""

import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from p2p.engines.request_response import CHUNK_BYTES, Broken, KeptStreams, Responder
from p2p.engines.traffic import Line
from p2p.topic import ASK
from p2p.types import PeerId, Started, Unanswered
from swarmd_engine_hivemind.p2pd import P2pd, P2pdGone, P2pdRefused, Wire, peer_bytes, peer_of, unix_address

# Timeout for p2pd to reach the peer, in whole seconds.
OPEN_TIMEOUT_S = 8
BACKLOG = 64

log = logging.getLogger(__name__)


class P2pdStream:
    """Implements `ByteStream`."""

    def __init__(self, stream: trio.SocketStream, p2pd: P2pd) -> None:
        self._stream = stream
        self.wire = Wire(stream, p2pd.control)

    async def read(self) -> bytes:
        try:
            return await self.wire.read(CHUNK_BYTES)
        except P2pdGone as error:
            raise Broken(str(error)) from None

    async def write(self, data: bytes) -> None:
        try:
            await self.wire.write(data)
        except P2pdGone as error:
            raise Broken(str(error)) from None

    async def end(self, well: bool) -> None:  # noqa: ARG002  # p2pd is told the same way in both cases
        self._stream.socket.close()


async def serve(
    p2pd: P2pd,
    responder: Responder,
    line_of: Callable[[PeerId], Line],
    task_status: Started = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer questions until cancelled.

    With `nursery.start` it returns once questions are answered. Raises P2pdGone, and P2pdRefused if p2pd does
    not hand streams over to us.

    line_of: returns a peer's path in the shared upload rate.
    """
    path = p2pd.folder / "asked"
    with trio.socket.socket(socket.AF_UNIX) as listening:
        await listening.bind(str(path))
        listening.listen(BACKLOG)
        handler = {"addr": unix_address(path), "proto": [ASK], "balanced": False}
        await p2pd.ask(type=p2pd.pb.Request.STREAM_HANDLER, streamHandler=handler)
        task_status.started(())
        listeners = [trio.SocketListener(listening)]
        # This waits if the process has no free file descriptors.
        await trio.serve_listeners(partial(_serve_one, p2pd, responder, line_of), listeners)


async def _serve_one(
    p2pd: P2pd, responder: Responder, line_of: Callable[[PeerId], Line], stream: trio.SocketStream
) -> None:
    async with stream:
        taken = P2pdStream(stream, p2pd)
        try:
            peer = peer_of((await taken.wire.receive(p2pd.pb.StreamInfo)).peer)
        except P2pdGone as error:
            log.debug("a stream ended: %s", error)
            return
        if peer is not None:
            await responder.serve(peer, taken, line_of(peer))


class HivemindRequests:
    """Asks peers questions.

    reach: as in `KeptStreams`; may also raise P2pdGone. on_answer: called with the length of each answer.
    """

    def __init__(
        self, p2pd: P2pd, reach: Callable[[PeerId], Awaitable[bool]], on_answer: Callable[[int], None]
    ) -> None:
        self._p2pd, self._on_answer = p2pd, on_answer
        self._streams = KeptStreams(reach, self._new)

    async def ask(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        """Ask a peer. Raises Unanswered."""
        try:
            answer = await self._streams.ask(peer, question, limit)
        except P2pdGone as error:
            raise Unanswered(f"{peer}: {error}") from None
        self._on_answer(len(answer))
        return answer

    async def __aenter__(self) -> "HivemindRequests":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._streams.end()

    async def _new(self, peer: PeerId) -> P2pdStream:
        well, opened = False, None
        try:
            opened = P2pdStream(await self._p2pd.connect(), self._p2pd)
            stream = {"peer": peer_bytes(peer), "proto": [ASK], "timeout": OPEN_TIMEOUT_S}
            await self._p2pd.answer(
                opened.wire, OPEN_TIMEOUT_S, type=self._p2pd.pb.Request.STREAM_OPEN, streamOpen=stream
            )
            well = True
        except (P2pdGone, P2pdRefused) as error:
            raise Broken(str(error)) from None
        finally:
            if opened is not None and not well:
                await opened.end(False)
        return opened
