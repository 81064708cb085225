"""The library-independent part of an engine restarts after any failure."""

import random
from collections.abc import Callable, Sequence

import trio

from p2p.engines.libp2p.metering import message_limits
from p2p.engines.network_engine import NetworkEngine
from p2p.errors import CannotListen
from p2p.identity import Identity
from tests.p2p.real import QUIET, TOPIC


class Engine(NetworkEngine):
    """An engine whose first runs end in the given ways."""

    def __init__(self, *ends: Exception) -> None:
        super().__init__(
            Identity(bytes(32)),
            TOPIC,
            QUIET,
            message_limits(),
            listen=["/ip4/127.0.0.1/tcp/0"],
            bootstrap=[],
            addressbook=None,
            clock=trio.current_time,
            rng=random.Random(1),
        )
        self.ends, self.back = list(ends), trio.Event()

    def addresses(self) -> Sequence[str]:
        return []

    async def _live(self, up: Callable[[], None]) -> None:
        end = self.ends.pop(0) if self.ends else None
        if not isinstance(end, CannotListen):
            up()
        if end is not None:
            async with trio.open_nursery():  # libraries raise errors in an exception group, as here
                raise end
        self.back.set()
        await trio.sleep_forever()


async def test_a_listen_address_that_is_briefly_taken_after_a_failure_does_not_end_the_engine(
    nursery: trio.Nursery, autojump_clock: trio.abc.Clock
) -> None:
    engine = Engine(RuntimeError("the library broke"), CannotListen("taken"), RuntimeError("again"))
    await nursery.start(engine.run)
    await engine.back.wait()
    assert engine.restarts == 3
