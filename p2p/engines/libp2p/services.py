"""Runs py-libp2p's services: an exception in one of their tasks ends that task, not the host."""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import trio
from libp2p.tools.anyio_service import TrioManager

log = logging.getLogger(__name__)


class Tasks(TrioManager):  # type: ignore[misc]
    """Runs a service whose one-off tasks may fail alone. Its daemon tasks may not: the engine then starts all anew."""

    def run_task(
        self, async_fn: Callable[..., Awaitable[Any]], *args: Any, daemon: bool = False, name: str | None = None, _internal: bool = False
    ) -> None:
        if daemon or _internal:
            super().run_task(async_fn, *args, daemon=daemon, name=name, _internal=_internal)
            return

        async def alone() -> None:
            try:
                await async_fn(*args)
            except Exception as error:  # one message or one peer that the library could not handle; the log hears of it
                log.debug("%s failed: %r", name or async_fn, error)

        if self._task_nursery is not None and not self.is_cancelled:  # straight into it: the library would look through all its tasks first
            self._task_nursery.start_soon(alone, name=name)


@contextlib.asynccontextmanager
async def running(service: Any) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        manager = Tasks(service)
        service._manager = manager
        nursery.start_soon(manager.run)
        await manager.wait_started()
        try:
            yield
        finally:
            await manager.stop()


async def keep_running(dht: Any) -> None:
    """The DHT is only for finding peers: when it breaks, it starts again by itself and nothing else stops."""
    while True:
        try:
            async with running(dht):
                await dht.manager.wait_finished()
        except Exception as error:  # whatever broke in it; the log hears of it
            log.warning("the DHT broke and starts again in a minute: %r", error)
        await trio.sleep(60)
