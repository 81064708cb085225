"""The protocol `/swarmd/ask/1`: one question and one answer on a stream of their own. The same bytes with every engine.

The asker writes the question's length as four bytes, big-endian, and the question; the answer comes back in the same form; then
the asker closes, and after it the one who answered. (Not before: p2pd takes the end of one direction for the end of both.)
"""

import contextlib
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import trio

from p2p.types import MAX_QUESTION, Answer, PeerId, Unanswered

PATIENCE = 10.0  # seconds in which a question has come, and in which an answer is taken
AT_ONCE = 4  # questions to one peer
SERVED_AT_ONCE, SERVED_EACH = 64, 8  # streams that others have open to us, and one of them: more than AT_ONCE, for ends are seen late
CHUNK = 64 * 1024  # bytes
_LENGTH = struct.Struct(">I")


class Broken(Exception):
    """The stream, or the connection under it, is no more."""


class Stream(Protocol):
    """What an engine makes of its library's streams. Both calls raise Broken."""

    async def read(self) -> bytes:
        """Some bytes, at most CHUNK; none at the end."""

    async def write(self, data: bytes) -> None: ...


async def ask(stream: Stream, question: bytes, limit: int) -> bytes:
    """Raises Unanswered."""
    if len(question) > MAX_QUESTION:
        raise Unanswered(f"a question of {len(question)} bytes, over {MAX_QUESTION}")
    try:
        await stream.write(_LENGTH.pack(len(question)) + question)
        return await _message(stream, limit)
    except Broken as error:
        raise Unanswered(str(error)) from None


async def _message(stream: Stream, limit: int) -> bytes:
    """Raises Broken."""
    data = bytearray()
    wanted = _LENGTH.size
    while len(data) < wanted:
        chunk = await stream.read()
        if not chunk:
            raise Broken("hung up" if not data else "hung up half way")
        data += chunk
        if wanted == _LENGTH.size <= len(data):
            wanted += _LENGTH.unpack_from(data)[0]
            if wanted > _LENGTH.size + limit:
                raise Broken(f"says {wanted - _LENGTH.size} bytes, over {limit}")
    if len(data) > wanted:
        raise Broken("says more than it announced")
    return bytes(data[_LENGTH.size :])


class Desk:
    """Answers those who come, within limits."""

    def __init__(self, answer: Answer, shut_out: Callable[[PeerId], bool]) -> None:
        self._answer, self._shut_out = answer, shut_out
        self._open: Counter[PeerId] = Counter()

    async def serve(self, peer: PeerId, stream: Stream) -> bool:
        """False: the peer is to be cut off, not only closed: it is too slow, one too many, or asked nothing that can be answered."""
        if self._shut_out(peer) or self._open.total() >= SERVED_AT_ONCE or self._open[peer] >= SERVED_EACH:
            return False
        self._open[peer] += 1
        try:
            return await self._served(peer, stream)
        except Broken:
            return False
        finally:
            self._open[peer] -= 1
            self._open += Counter()  # without those at zero

    async def _served(self, peer: PeerId, stream: Stream) -> bool:
        with trio.move_on_after(PATIENCE) as asked:
            question = await _message(stream, MAX_QUESTION)
        if asked.cancelled_caught:
            return False
        answer = self._answer(peer, question)
        with trio.move_on_after(PATIENCE) as taken:
            message = memoryview(_LENGTH.pack(len(answer)) + answer)
            for at in range(0, len(message), CHUNK):
                await stream.write(bytes(message[at : at + CHUNK]))
            return not await stream.read()  # the asker closes when it has it all
        return not taken.cancelled_caught


class Turns:
    """At most AT_ONCE questions to each peer; the others wait."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, tuple[trio.Semaphore, list[None]]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, peer: PeerId) -> AsyncIterator[None]:
        free, users = self._peers.setdefault(peer, (trio.Semaphore(AT_ONCE), []))
        users.append(None)
        try:
            async with free:
                yield
        finally:
            users.pop()
            if not users:
                del self._peers[peer]
