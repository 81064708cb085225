"""Frames that wait to be sent. Bounded: at the limit the oldest is dropped."""

from collections import deque
from collections.abc import Awaitable, Callable

import trio

QUEUE = 64  # frames that wait to be sent
HELD = 15.0  # seconds a frame waits for somebody to send it to


class FrameOutbox:
    """Frames to be sent to the swarm."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, bytes]] = deque(maxlen=QUEUE)
        self._news = trio.Event()

    def put(self, frame: bytes) -> None:
        self._waiting.append((self._clock() + HELD, frame))
        self._news.set()

    async def send_all(self, alone: Callable[[], bool], send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send until cancelled. A frame waits while we are alone, but not for long: a rollout is worth something while it is fresh."""
        while True:
            if not self._waiting:
                self._news = trio.Event()
                await self._news.wait()
            elif alone() and self._waiting[0][0] > self._clock():
                await trio.sleep(0.1)
            else:
                await send(self._waiting.popleft()[1])
