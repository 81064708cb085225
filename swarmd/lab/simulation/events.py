"""Discrete-event clock of the simulation. Same seed, same events."""

import heapq
from array import array
from collections.abc import Callable
from hashlib import sha256
from typing import Any

_CHUNK = 8192  # numbers hashed at once

Act = Callable[..., None]


class Events:
    """A heap of things to do. What is due at the same moment happens in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self.done = 0
        self._asked = 0
        self._heap: list[tuple[float, int, Act, tuple[Any, ...]]] = []
        self._history = sha256()
        self._unhashed = array("d")

    def at(self, when: float, act: Act, *arguments: Any) -> None:
        """Do it then, or now where that is over."""
        self._asked += 1
        heapq.heappush(self._heap, (when if when > self.now else self.now, self._asked, act, arguments))

    def after(self, seconds: float, act: Act, *arguments: Any) -> None:
        self.at(self.now + seconds, act, *arguments)

    def run(self, until: float) -> None:
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            when, number, act, arguments = pop(heap)
            self.now = when
            self.done += 1
            act(*arguments)
            self.note(when, number)
        self.now = until

    def note(self, *numbers: float) -> None:
        """Part of the history."""
        self._unhashed.extend(numbers)
        if len(self._unhashed) >= _CHUNK:
            self._history.update(self._unhashed.tobytes())
            del self._unhashed[:]

    def digest(self) -> str:
        """Of everything that happened so far, and when."""
        history = self._history.copy()
        history.update(self._unhashed.tobytes())
        return history.hexdigest()
