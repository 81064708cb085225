"""A cache whose values are computed once for all readers within a few seconds."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps values for some seconds. Used from one event loop."""

    def __init__(
        self, make: Callable[[K], Awaitable[V]], seconds: float, most: int, clock: Callable[[], float]
    ) -> None:
        self._make, self._seconds, self._most, self._clock = make, seconds, most, clock
        self._kept: dict[K, tuple[float, V]] = {}
        self._lock = asyncio.Lock()

    def kept(self, key: K) -> bool:
        """Return whether the value is cached and need not be computed."""
        return key in self._kept and 0 <= self._clock() - self._kept[key][0] < self._seconds

    async def get(self, key: K) -> V:
        async with self._lock:
            now = self._clock()
            self._kept = {of: kept for of, kept in self._kept.items() if 0 <= now - kept[0] < self._seconds}
            if key not in self._kept:
                self._kept[key] = (now, await self._make(key))
                while len(self._kept) > self._most:
                    del self._kept[next(iter(self._kept))]
            return self._kept[key][1]
