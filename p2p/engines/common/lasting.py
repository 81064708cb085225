"""What keeps an engine in the swarm while its library breaks, its peers are gone and its disk is full. Shared by the engines that
go over the network.
"""

import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

import trio

from p2p.address import parse_bootstrap
from p2p.errors import OperatorError
from p2p.peers.addressbook import AddressBook
from p2p.topic import SHARDS
from p2p.types import PeerId, Started

QUEUE = 64  # frames that wait to be sent
HELD = 15.0  # seconds a frame waits for somebody to send it to
RESTART_FIRST, RESTART_LAST = 1.0, 30.0  # seconds between a breakdown and the next start
CALM = 120.0  # seconds without a breakdown after which the wait is short again
SAVE_EVERY, SAVE_PEERS = 5.0, 50  # seconds at least, and a second for so many peers: a large book is some MB

log = logging.getLogger(__name__)


class Outbox:
    """Frames to be sent, each to a shard. At the limit the oldest is dropped."""

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


class Shards:
    """Those that we are to be in besides shard 0. `changed` is set when it changes, and replaced."""

    def __init__(self) -> None:
        self.wanted: frozenset[int] = frozenset()
        self.changed = trio.Event()

    def change(self, shards: Collection[int]) -> None:
        """Raises ValueError on what is no shard."""
        if outside := [shard for shard in shards if not 0 <= shard < SHARDS]:
            raise ValueError(f"shard {outside[0]} is outside 0 to {SHARDS - 1}")
        wanted = frozenset(shards) - {0}
        if wanted != self.wanted:
            self.wanted = wanted
            self.changed.set()
            self.changed = trio.Event()


def pinned_book(me: PeerId, bootstrap: Sequence[str]) -> AddressBook:
    """A new book, with a key of its own, that holds the operator's addresses. Raises BadAddress."""
    book = AddressBook(me, secrets.token_bytes(16))
    for text in bootstrap:
        book.pin(*parse_bootstrap(text))
    return book


class BookFile:
    """An address book on disk, or nowhere where there is no path. Its failures are logged and stop nothing."""

    def __init__(self, book: AddressBook, path: Path | None) -> None:
        self._book, self._path = book, path
        self._loaded = False

    def load(self) -> None:
        """Once: an engine may run again."""
        if self._path is not None and not self._loaded:
            self._loaded = True
            try:
                self._book.load(self._path)
            except OSError as error:  # without it peers are found as at a first start
                log.warning("cannot read the address book %s: %s", self._path, error.strerror)

    def save(self) -> None:
        if self._path is not None and self._book.changed:
            try:
                self._book.save(self._path)
            except OSError as error:  # a full disk must not stop the network
                log.warning("cannot write the address book %s: %s", self._path, error.strerror)

    async def save_now_and_then(self) -> None:
        while True:
            await trio.sleep(max(SAVE_EVERY, len(self._book) / SAVE_PEERS))
            self.save()


class Lasting:
    """Starts something again whenever it breaks. `restarts` counts how often it did."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.restarts = 0
        self._clock = clock

    async def run(
        self,
        live: Callable[[Callable[[], None]], Awaitable[None]],
        addresses: Callable[[], Sequence[str]],
        task_status: Started | None,
    ) -> None:
        """Until cancelled. `live` calls its argument when it is up. Raises OperatorError where it never was."""
        wait, started = RESTART_FIRST, False

        def up() -> None:
            nonlocal started
            if not started and task_status is not None:
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
            except Exception:  # anything in a library of 100,000 lines; the log hears of it, and `restarts` counts it
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
