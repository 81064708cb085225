"""Frames that wait to be sent. Bounded: at the limit the oldest is dropped."""

from collections import deque
from collections.abc import Awaitable, Callable

import trio

QUEUE = 64  # frames that wait to be sent
HELD = 15.0  # seconds a frame waits for somebody to send it to


class FrameOutbox:
    """Frames to be sent, each to a shard."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, int, bytes]] = deque(maxlen=QUEUE)
        self._news = trio.Event()

    def put(self, frame: bytes, shard: int) -> None:
        self._waiting.append((self._clock() + HELD, shard, frame))
        self._news.set()

    async def send_all(self, alone: Callable[[int], bool], send: Callable[[bytes, int], Awaitable[None]]) -> None:
        """Until cancelled. A frame waits while we are alone in its shard, but not for long: a rollout is worth something while it is
        fresh. Frames of other shards do not wait for it.
        """
        while True:
            now, lonely = self._clock(), {shard for shard in {shard for _, shard, _ in self._waiting} if alone(shard)}
            ready = next((n for n, (until, shard, _) in enumerate(self._waiting) if until <= now or shard not in lonely), None)
            if ready is not None:
                _, shard, frame = self._waiting[ready]
                del self._waiting[ready]
                await send(frame, shard)
            elif self._waiting:
                await trio.sleep(0.1)
            else:
                self._news = trio.Event()
                await self._news.wait()
