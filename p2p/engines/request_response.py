"""Request/response protocol `/swarmd/ask/1`: questions and answers, one after the other on a stream.

Every engine sends the same bytes.

The asker writes the question's length as four bytes, big-endian, and the question; the answer comes back in
the same form. Then the stream is there for the next question. It ends when the asker closes it, and the other
side then too, or when it was idle for too long. (An asker closes only when it wants nothing more: p2pd takes
the end of one direction for the end of both.)
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

# The time to send a question, and to receive an answer.
MESSAGE_TIMEOUT_S = 10.0
# Questions to one peer: as many as streams are kept, for a new one costs more than an answer.
AT_ONCE = 2
# Questions answered at once, in all and of one peer: more than AT_ONCE, as ends are seen late.
SERVED_AT_ONCE, SERVED_EACH = 64, 8
# How long a stream waits for the next question.
IDLE_S = 60.0
# Streams left open for a next question, in all and of one peer.
IDLE_AT_ONCE, IDLE_EACH = 128, 2
# Streams kept for our own questions, for less than IDLE_S of the other side.
MAX_KEPT, KEPT_S = 64, 45.0
CHUNK_BYTES = 64 * 1024
_LENGTH = struct.Struct(">I")


class Broken(Exception):
    """The stream, or the connection under it, is no more."""


class ByteStream(Protocol):
    """A stream to a peer, whatever the library. `read` and `write` raise Broken."""

    async def read(self) -> bytes:
        """Read some bytes, at most CHUNK_BYTES; none at the end."""

    async def write(self, data: bytes) -> None: ...

    async def end(self, well: bool) -> None:
        """Close it, or cut it off. Never fails."""


S = TypeVar("S", bound=ByteStream)


async def ask(stream: ByteStream, question: bytes, limit: int) -> bytes:
    """Ask on this stream. Returns the answer, of at most `limit` bytes.

    Raises Broken, after which nothing more can be asked on this stream.
    """
    await stream.write(_LENGTH.pack(len(question)) + question)
    return await _message(stream, limit)


async def _message(stream: ByteStream, limit: int, begun: bytes = b"") -> bytes:
    """Read a message. begun: what has been read of it. Raises Broken."""
    data = bytearray(begun)
    wanted = _LENGTH.size
    while True:
        if wanted == _LENGTH.size <= len(data):
            wanted += _LENGTH.unpack_from(data)[0]
            if wanted > _LENGTH.size + limit:
                raise Broken(f"says {wanted - _LENGTH.size} bytes, over {limit}")
        if len(data) >= wanted:
            break
        chunk = await stream.read()
        if not chunk:
            raise Broken("hung up" if not data else "hung up half way")
        data += chunk
    if len(data) > wanted:
        raise Broken("says more than it announced")
    return bytes(data[_LENGTH.size :])


class Responder:
    """Answers questions, within limits.

    If too many are asked at once, the newest is reset of the connection that asks most, in the machine and
    the network group that ask most.

    admits: returns whether this peer may ask one question more; called before it is read. upload: waits until
    an answer of so many bytes may be sent.
    """

    def __init__(
        self,
        answer: Answer,
        admits: Callable[[PeerId], bool],
        upload: Callable[[float, Line], Awaitable[None]],
    ) -> None:
        self._answer, self._admits, self._upload = answer, admits, upload
        self._open: dict[trio.CancelScope, Line] = {}  # streams with a question on them, oldest first
        self._idle: Counter[PeerId] = Counter()  # streams that wait for the next question

    async def serve(self, peer: PeerId, stream: ByteStream, line: Line = UNKNOWN_LINE) -> bool:
        """Answer the questions on a stream. Returns False where it is to be reset instead of closed.

        The peer is then too slow, has too many streams, or asked what cannot be answered.
        """
        begun, line = b"", line._replace(connection=peer)
        with contextlib.suppress(Broken):
            while self._admits(peer) and [*self._open.values()].count(line) < SERVED_EACH:
                with self._place(line) as place:
                    if not await self._served(peer, stream, begun, line):
                        return False
                    if self._idle.total() >= IDLE_AT_ONCE or self._idle[peer] >= IDLE_EACH:
                        # Closed by us before the asker closes it, some of the answer could be lost.
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
        """Take a place for a question, or cancel the one that has to give way, which may be this one."""
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
        """Return whether one question was asked and answered, each in time. Raises Broken."""
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
    """Asks at most AT_ONCE questions of each peer at once; the others wait.

    A stream whose question went well is kept for the next.

    reach: makes sure that there is a connection; False where none can be made. new: opens a stream to a peer;
    raises Broken.
    """

    def __init__(
        self,
        reach: Callable[[PeerId], Awaitable[bool]],
        new: Callable[[PeerId], Awaitable[S]],
    ) -> None:
        self._reach, self._new = reach, new
        self._turns: WeakValueDictionary[PeerId, trio.Semaphore] = WeakValueDictionary()
        self._room = MAX_KEPT
        # Kept streams and the time of their last answer, the oldest first.
        self._kept: list[tuple[PeerId, float, S]] = []

    async def ask(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        """Ask a peer. Raises Unanswered."""
        if len(question) > MAX_QUESTION_BYTES:
            raise Unanswered(f"a question of {len(question)} bytes, over {MAX_QUESTION_BYTES}")
        turn = self._turns.setdefault(peer, trio.Semaphore(AT_ONCE))
        try:
            async with turn:
                if not await self._reach(peer):
                    raise Unanswered(f"{peer}: not connected, and not to be reached")
                await self._let_go()
                if (kept := next((kept for kept in self._kept if kept[0] == peer), None)) is not None:
                    self._kept.remove(kept)
                    # The kept stream has ended since. Asking a question twice does no harm.
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
        """End the kept streams that were not used for long, and the oldest of too many."""
        now = trio.current_time()
        while self._kept and (len(self._kept) > self._room or now - self._kept[0][1] > KEPT_S):
            await self._kept.pop(0)[2].end(True)
