"""Request/response protocol `/swarmd/ask/1`: questions and answers, one after the other on a stream.

All network engines send the same bytes.

The asker writes the question's length as four bytes, big-endian, and the question. The answer comes back in
the same form. Then the stream is free for the next question. When the asker closes its side, the other side
closes too; a stream that is idle for too long is also closed. An asker must not close its side before it has
the answer, because p2pd takes the end of one direction for the end of both.
"""

import contextlib
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import trio

from p2p.admission.inbound_slots import one_too_many
from p2p.engines.traffic import UNKNOWN_LINE, Line
from p2p.rate_limit import counted
from p2p.types import MAX_QUESTION_BYTES, Answer, PeerId, Unanswered

# Timeout to send a question, and to receive an answer.
MESSAGE_TIMEOUT_S = 10.0
# Maximum number of concurrent questions to one peer. The same number of streams is kept, because a new stream
# costs more than an answer.
AT_ONCE = 2
# Maximum number of questions that are answered at the same time, in all and of one peer. The limit for one
# peer is larger than AT_ONCE, because we learn late that a question has ended.
SERVED_AT_ONCE, SERVED_EACH = 64, 8
# Seconds that a stream waits for the next question.
IDLE_S = 60.0
# Maximum number of streams that wait for a next question, in all and of one peer.
IDLE_AT_ONCE, IDLE_EACH = 128, 2
# Maximum number of streams that we keep for our questions, and seconds for which we keep them: fewer than
# IDLE_S of the other side.
MAX_KEPT, KEPT_S = 64, 45.0
CHUNK_BYTES = 64 * 1024
_LENGTH = struct.Struct(">I")


class Broken(Exception):
    """The stream or its connection has ended, or the other side broke the protocol."""


class ByteStream(Protocol):
    """A stream to a peer, independent of the network library. `read` and `write` raise Broken."""

    async def read(self) -> bytes:
        """Read some bytes, at most CHUNK_BYTES; b"" at the end."""

    async def write(self, data: bytes) -> None: ...

    async def end(self, well: bool) -> None:
        """Close the stream if `well`, else reset it. Never fails."""


S = TypeVar("S", bound=ByteStream)


async def ask(stream: ByteStream, question: bytes, limit: int) -> bytes:
    """Send a question on this stream and return the answer, of at most `limit` bytes.

    Raises Broken; the stream cannot be used after that.
    """
    await stream.write(_LENGTH.pack(len(question)) + question)
    return await _message(stream, limit)


async def _message(stream: ByteStream, limit: int, begun: bytes = b"") -> bytes:
    """Read a message. begun: bytes of it that were already read. Raises Broken."""
    data = bytearray(begun)
    wanted = _LENGTH.size
    while True:
        if wanted == _LENGTH.size <= len(data):
            wanted += _LENGTH.unpack_from(data)[0]
            if wanted > _LENGTH.size + limit:
                raise Broken(f"message too large: {wanted - _LENGTH.size:,} bytes (limit {limit:,})")
        if len(data) >= wanted:
            break
        if not (chunk := await stream.read()):
            raise Broken("hung up" if not data else "hung up in the middle of a message")
        data += chunk
    if len(data) > wanted:
        raise Broken("more bytes than announced")
    return bytes(data[_LENGTH.size :])


class Responder:
    """Answers questions, within limits.

    If too many questions are being answered, the newest of the busiest connection is reset, in the busiest
    machine of the busiest network group.

    Args:
        answer: returns the answer to a peer's question.
        admits: returns whether this peer may ask another question; called before the question is read.
        upload: waits until an answer of this many bytes may be sent.
    """

    def __init__(
        self,
        answer: Answer,
        admits: Callable[[PeerId], bool],
        upload: Callable[[float, Line], Awaitable[None]],
    ) -> None:
        self._answer, self._admits, self._upload = answer, admits, upload
        self._open: dict[trio.CancelScope, Line] = {}  # questions in progress, oldest first
        self._idle: Counter[PeerId] = Counter()  # number of streams that wait for the next question

    async def serve(self, peer: PeerId, stream: ByteStream, line: Line = UNKNOWN_LINE) -> bool:
        """Answer the questions on a stream. Return True to close it, False to reset it.

        A stream is reset if the peer is too slow, has too many streams, or broke the protocol.
        """
        begun, line = b"", line._replace(connection=peer)
        with contextlib.suppress(Broken):
            while self._admits(peer) and [*self._open.values()].count(line) < SERVED_EACH:
                with self._place(line) as place:
                    if not await self._served(peer, stream, begun, line):
                        return False
                    if self._idle.total() >= IDLE_AT_ONCE or self._idle[peer] >= IDLE_EACH:
                        # Wait until the asker closes. If we closed first, part of the answer could be lost.
                        with trio.move_on_after(MESSAGE_TIMEOUT_S):
                            return not await stream.read()
                        return False
                if place.cancelled_caught:
                    return False
                with counted(self._idle, peer), trio.move_on_after(IDLE_S):
                    begun = b""
                    begun = await stream.read()
                if not begun:
                    return True
        return False

    @contextlib.contextmanager
    def _place(self, line: Line) -> Iterator[trio.CancelScope]:
        """Take a slot for a question. If all are taken, cancel one question, which may be this one."""
        with trio.CancelScope() as place:
            full, self._open[place] = len(self._open) >= SERVED_AT_ONCE, line
            if full:
                paths = {one: its.path for one, its in self._open.items() if one is not place}
                leaving = one_too_many(paths, line.path) or place
                del self._open[leaving]
                leaving.cancel()
            try:
                yield place
            finally:
                self._open.pop(place, None)

    async def _served(self, peer: PeerId, stream: ByteStream, begun: bytes, line: Line) -> bool:
        """Read one question and answer it. Return False on a timeout. Raises Broken."""
        with trio.move_on_after(MESSAGE_TIMEOUT_S) as asked:
            question = await _message(stream, MAX_QUESTION_BYTES, begun)
        if asked.cancelled_caught:
            return False
        answer = self._answer(peer, question)
        with trio.move_on_after(MESSAGE_TIMEOUT_S) as taken:
            await self._upload(len(answer), line)
            message = memoryview(_LENGTH.pack(len(answer)) + answer)
            for at in range(0, len(message), CHUNK_BYTES):
                await stream.write(bytes(message[at : at + CHUNK_BYTES]))
        return not taken.cancelled_caught


class KeptStreams(Generic[S]):
    """Asks each peer at most AT_ONCE questions at a time; further questions wait.

    After a successful question the stream is kept for the next one.

    reach: connects to a peer; returns False if that fails. new: opens a stream to a peer; raises Broken.
    """

    def __init__(
        self,
        reach: Callable[[PeerId], Awaitable[bool]],
        new: Callable[[PeerId], Awaitable[S]],
    ) -> None:
        self._reach, self._new = reach, new
        self._turns: WeakValueDictionary[PeerId, trio.Semaphore] = WeakValueDictionary()
        self._room = MAX_KEPT
        # Kept streams with the time of their last answer, oldest first.
        self._kept: list[tuple[PeerId, float, S]] = []

    async def ask(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        """Ask a peer. Raises Unanswered."""
        if len(question) > MAX_QUESTION_BYTES:
            raise Unanswered(f"question too large: {len(question):,} bytes (limit {MAX_QUESTION_BYTES:,})")
        turn = self._turns.setdefault(peer, trio.Semaphore(AT_ONCE))
        try:
            async with turn:
                if not await self._reach(peer):
                    raise Unanswered(f"{peer}: cannot be reached")
                await self._let_go()
                if (kept := next((kept for kept in self._kept if kept[0] == peer), None)) is not None:
                    self._kept.remove(kept)
                    # If the kept stream has ended, ask again on a new one. Asking twice does no harm.
                    with contextlib.suppress(Broken):
                        return await self._ask(peer, kept[2], question, limit)
                return await self._ask(peer, await self._new(peer), question, limit)
        except Broken as error:
            raise Unanswered(f"{peer}: {error}") from None

    async def end(self) -> None:
        """End all kept streams."""
        self._room = 0
        await self._let_go()

    async def _ask(self, peer: PeerId, stream: S, question: bytes, limit: int) -> bytes:
        try:
            answer = await ask(stream, question, limit)
        except BaseException:
            await stream.end(False)
            raise
        self._kept.append((peer, trio.current_time(), stream))
        await self._let_go()
        return answer

    async def _let_go(self) -> None:
        """Close kept streams that are older than KEPT_S, and the oldest ones over the limit."""
        now = trio.current_time()
        while self._kept and (len(self._kept) > self._room or now - self._kept[0][1] > KEPT_S):
            await self._kept.pop(0)[2].end(True)
