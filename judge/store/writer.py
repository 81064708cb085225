"""Runs the steps of the store in a thread of its own.

Steps that wait at the same time share one transaction, and so one write to disk.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from judge.store.store import Store

TOGETHER = 64  # steps of one transaction, at most

T = TypeVar("T")
Step = tuple[Callable[..., Any], Sequence[object]]


class StoreWriter:
    """Used from one event loop. A step's outcome is told when its transaction is on disk, and not before."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._waiting: deque[tuple[Step, asyncio.Future[Any]]] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def run(self, step: Callable[..., T], *arguments: object) -> T:
        """Run a method of the store in its thread; return or raise what it does."""
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(((step, arguments), outcome))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await outcome

    async def _work(self) -> None:
        while self._waiting:
            taken = [self._waiting.popleft() for _ in range(min(TOGETHER, len(self._waiting)))]
            outcomes = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._store.together, [step for step, _ in taken]
            )
            for (_, future), outcome in zip(taken, outcomes, strict=True):
                if future.done():  # nobody waits for it any more
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    async def close(self) -> None:
        """Wait until everything is written."""
        if self._worker is not None:
            await self._worker
        await asyncio.to_thread(self._thread.shutdown)
