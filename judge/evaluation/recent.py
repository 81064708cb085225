"""A cache whose values are computed once for all readers within a few seconds."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from p2p.latest import Latest

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps values for some seconds. Used from one event loop."""

    def __init__(
        self, make: Callable[[K], Awaitable[V]], seconds: float, most: int, clock: Callable[[], float]
    ) -> None:
        self._make, self._seconds, self._clock = make, seconds, clock
        self._kept: Latest[K, tuple[float, V]] = Latest(most)  # when each value was computed, and the value
        self._lock = asyncio.Lock()

    def kept(self, key: K) -> bool:
        """Return whether the value is cached and need not be computed."""
        return key in self._kept and 0 <= self._clock() - self._kept[key][0] < self._seconds

    async def get(self, key: K) -> V:
        async with self._lock:
            if not self.kept(key):
                self._kept[key] = (self._clock(), await self._make(key))
            return self._kept[key][1]
