"""Restarts an engine with back-off whenever its network library breaks."""

import logging
from collections.abc import Awaitable, Callable, Sequence

import trio

from p2p.errors import OperatorError
from p2p.types import Started

RESTART_FIRST, RESTART_LAST = 1.0, 30.0  # seconds between a breakdown and the next start; doubling
CALM = 120.0  # seconds without a breakdown after which the wait is short again

log = logging.getLogger(__name__)


class Restarter:
    """`restarts` counts how often something was started again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.restarts = 0
        self._clock = clock

    async def run(
        self,
        live: Callable[[Callable[[], None]], Awaitable[None]],
        addresses: Callable[[], Sequence[str]],
        task_status: Started,
    ) -> None:
        """Until cancelled. `live` calls its argument when it is up. Raises OperatorError where it never was."""
        wait, started = RESTART_FIRST, False

        def up() -> None:
            nonlocal started
            if not started:
                task_status.started(addresses())
            started = True

        while True:
            since = self._clock()
            try:
                await live(up)
            except OperatorError:
                if not started:
                    raise
                log.warning("the listen address is not free again yet", exc_info=True)
            except BaseExceptionGroup as errors:
                ours, broken = errors.split((trio.Cancelled, KeyboardInterrupt, SystemExit, OperatorError))
                if ours is not None:
                    raise _alone(ours) from None
                log.exception("the p2p engine broke and starts again in %.0f s", wait, exc_info=broken)
            except Exception:  # anything in a library of 100,000 lines; the log has it, and `restarts` counts it
                log.exception("the p2p engine broke and starts again in %.0f s", wait)
            self.restarts += 1
            if self._clock() - since > CALM:
                wait = RESTART_FIRST
            await trio.sleep(wait)
            wait = min(2 * wait, RESTART_LAST)


def _alone(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception of a group of one, so that an operator's mistake reads as one."""
    inner: BaseException = errors
    while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
        inner = inner.exceptions[0]
    return inner
