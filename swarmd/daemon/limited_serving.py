"""Serves the connections of local callers, a limited number at once."""

from collections.abc import Awaitable, Callable, Sequence

import trio

Converse = Callable[[trio.SocketStream], Awaitable[None]]


async def serve_at_most(most: int, converse: Converse, listeners: Sequence[trio.SocketListener]) -> None:
    """Serve listeners until cancelled; close connections beyond `most` at once.

    Where there are no more open files, trio waits for one.
    """
    room = trio.Semaphore(most)

    async def admitted(stream: trio.SocketStream) -> None:
        try:
            room.acquire_nowait()
        except trio.WouldBlock:
            await trio.aclose_forcefully(stream)
            return
        try:
            await converse(stream)
        finally:
            room.release()

    await trio.serve_listeners(admitted, list(listeners))
