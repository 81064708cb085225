"""The engine that goes over the network, on py-libp2p. Whatever breaks in the library, this starts it again and stays what it was."""

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from p2p.address import Endpoint, parse_bootstrap, parse_listen
from p2p.addressbook import AddressBook
from p2p.engines.libp2p_discovery import Discovery
from p2p.engines.libp2p_stack import Stack, check_listen, dialable, open_stack
from p2p.errors import OperatorError
from p2p.identity import Identity
from p2p.topic import Topic
from p2p.types import Deliver, Peer, PeerId, Started

QUEUE = 64  # frames that wait to be sent
HELD = 15.0  # seconds a frame waits for somebody to send it to
RESTART_FIRST, RESTART_LAST = 1.0, 30.0  # seconds between a breakdown and the next start
CALM = 120.0  # seconds without a breakdown after which the wait is short again
SAVE_EVERY = 5.0

log = logging.getLogger(__name__)


class Libp2pEngine:
    """Implements `Engine`. TCP, Noise, yamux, GossipSub, Kademlia.

    listen: multiaddresses; port 0 is replaced by the port it got, so a restart keeps it. bootstrap: multiaddresses ending in
    /p2p/<peer id>; our own is ignored. addressbook: the file of last known peers, or None to keep none. clock: seconds since the
    epoch. Raises BadAddress, naming what is not an address.
    """

    def __init__(
        self,
        identity: Identity,
        topic: Topic,
        deliver: Deliver,
        *,
        listen: Sequence[str],
        bootstrap: Sequence[str],
        addressbook: Path | None,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.me = identity.peer_id
        self.restarts = 0
        self._identity, self._topic, self._deliver = identity, topic, deliver
        self._clock, self._rng = clock, rng
        self._listen: Sequence[Endpoint] = [parse_listen(text) for text in listen]
        self._book_path = addressbook
        self._book = AddressBook(self.me)
        for text in bootstrap:
            self._book.pin(*parse_bootstrap(text))
        self._waiting: deque[tuple[float, bytes]] = deque(maxlen=QUEUE)
        self._news = trio.Event()
        self._stack: Stack | None = None
        self._discovery: Discovery | None = None

    async def run(self, task_status: Started | None = None) -> None:
        """Be in the swarm until cancelled. Reports its addresses when it listens. Raises PortInUse or CannotListen at the start."""
        check_listen(self._listen)
        self._load_book()
        wait, started = RESTART_FIRST, False

        def up() -> None:
            nonlocal started
            if not started and task_status is not None:
                task_status.started(self.addresses())
            started = True

        while True:
            since = self._clock()
            try:
                await self._live(up)
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
            finally:
                self._stack = self._discovery = None
                self._save_book()
            self.restarts += 1
            if self._clock() - since > CALM:
                wait = RESTART_FIRST
            await trio.sleep(wait)
            wait = min(2 * wait, RESTART_LAST)

    def publish(self, frame: bytes) -> None:
        self._waiting.append((self._clock() + HELD, frame))
        self._news.set()

    def peers(self) -> Sequence[Peer]:
        """Connected members of our swarm; other peers may be connected too, for the DHT's sake."""
        if self._stack is None or self._discovery is None:
            return []
        members = self._discovery.members()
        found = []
        for peer, connections in self._stack.host.get_network().get_connections_map().items():
            if str(peer) in members and connections:
                first = connections[0]
                found.append(Peer(PeerId(str(peer)), _remote(first), first.direction.name.lower(), first._created_at))
        return found

    def addresses(self) -> Sequence[str]:
        if self._stack is None:
            return []
        listening = [str(address) for address in self._stack.host.get_transport_addrs()]
        return [f"{address}/p2p/{self.me}" for address in dialable(listening)]

    async def _live(self, up: Callable[[], None]) -> None:
        async with open_stack(self._identity, str(self._topic), self._deliver, self._listen, self._clock) as stack:
            self._stack = stack
            self._listen = [parse_listen(str(address)) for address in stack.host.get_transport_addrs()]
            self._discovery = Discovery(stack, self._topic, self._book, self._clock, self._rng)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                nursery.start_soon(self._discovery.run)
                nursery.start_soon(self._save_book_now_and_then)
                up()

    async def _send(self) -> None:
        """A frame waits while we are alone, but not for long: a rollout is worth something while it is fresh."""
        assert self._stack is not None and self._discovery is not None
        while True:
            while self._waiting:
                until, frame = self._waiting[0]
                if until > self._clock() and not self._discovery.members():
                    await trio.sleep(0.1)
                    continue
                self._waiting.popleft()
                await self._stack.pubsub.publish(str(self._topic), frame)
            self._news = trio.Event()
            await self._news.wait()

    def _load_book(self) -> None:
        if self._book_path is not None:
            try:
                self._book.load(self._book_path)
            except OSError as error:  # without it peers are found as at a first start
                log.warning("cannot read the address book %s: %s", self._book_path, error.strerror)

    def _save_book(self) -> None:
        if self._book_path is not None and self._book.changed:
            try:
                self._book.save(self._book_path)
            except OSError as error:  # a full disk must not stop the network
                log.warning("cannot write the address book %s: %s", self._book_path, error.strerror)

    async def _save_book_now_and_then(self) -> None:
        while True:
            await trio.sleep(SAVE_EVERY)
            self._save_book()


def _alone(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception of a group of one, so that an operator's mistake reads as one."""
    inner: BaseException = errors
    while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
        inner = inner.exceptions[0]
    return inner


def _remote(connection: object) -> str:
    """The other end's multiaddress, or "" where the library does not know it."""
    found = getattr(getattr(connection, "muxed_conn", None), "get_remote_address", lambda: None)()
    if found is None:
        return ""
    host, port = found
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}"
