"""Base class of the network engines: construction, publishing, requests, bans, restarts with back-off."""

import logging
import random
import secrets
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

import trio

from p2p.address import Endpoint, parse_bootstrap, parse_listen
from p2p.admission.host_bans import HostBans
from p2p.engines.discovery import Connections, Discovery
from p2p.engines.request_response import Responder
from p2p.engines.traffic import Traffic
from p2p.errors import OperatorError
from p2p.identity import Identity
from p2p.netgroup import LOCAL
from p2p.peers.addressbook import AUTHORS, NEARBY, AddressBook
from p2p.peers.addressbook_file import AddressBookFile
from p2p.rate_limit import RateLimit, TokenBuckets
from p2p.topic import Topic
from p2p.types import Ask, Handlers, P2pEngine, Peer, PeerId, Started, Unanswered, Verdict

# Questions of one peer, rate and burst: 25 rounds a second with a question for each of four rollouts.
QUESTIONS_PER_S, QUESTIONS_AT_ONCE = 100.0, 1000.0
# Maximum number of frames that wait to be sent.
MAX_QUEUED_FRAMES = 64
# Seconds that a frame waits until we have a neighbour.
MAX_WAIT_S = 15.0
# Seconds from a failure of the library to its next start. The wait doubles from the first value to the last.
RESTART_FIRST_S, RESTART_LAST_S = 1.0, 30.0
# After this long without a failure the wait is reset to the first value.
CALM_S = 120.0

log = logging.getLogger(__name__)


class NetworkEngine(P2pEngine):
    """The part of a `P2pEngine` that does not depend on the network library.

    Args:
        identity: our key.
        topic: our swarm's topic.
        handlers: called for frames and questions.
        rate_limit: limits and bans of peers.
        listen: multiaddresses. Port 0 is replaced by the port of the first start, so that a restart keeps it.
        bootstrap: multiaddresses ending in /p2p/<peer id>. Our own address is ignored.
        addressbook: the file of known peers; None to keep no file.
        clock: returns seconds since the epoch.
        rng: draws peers.
        traffic: counts and limits bytes.
        public: the operator says that other nodes can dial this node.

    Raises:
        BadAddress: an address is malformed; the message names it.
    """

    def __init__(
        self,
        identity: Identity,
        topic: Topic,
        handlers: Handlers,
        rate_limit: RateLimit,
        *,
        listen: Sequence[str],
        bootstrap: Sequence[str],
        addressbook: Path | None,
        clock: Callable[[], float],
        rng: random.Random,
        traffic: Traffic | None = None,
        public: bool = False,
    ) -> None:
        self.me = identity.peer_id
        self._identity, self._topic, self._handlers = identity, topic, handlers
        self._topics = [topic, *handlers.also]
        self._clock, self._rng = clock, rng
        self._traffic, self._public = traffic or Traffic(), public
        self._listen: Sequence[Endpoint] = [parse_listen(text) for text in listen]
        self._book = AddressBook(self.me, secrets.token_bytes(16))
        for text in bootstrap:
            self._book.pin(*parse_bootstrap(text))
        self._book_file = AddressBookFile(self._book, addressbook, clock)
        # Frames and the times until which they wait for a neighbour, oldest first.
        self._waiting: deque[tuple[float, bytes]] = deque(maxlen=MAX_QUEUED_FRAMES)
        self._news = trio.Event()
        self.restarts = 0
        self._rate_limit, self._host_bans = rate_limit, HostBans()
        self._questions = TokenBuckets[PeerId](QUESTIONS_PER_S, QUESTIONS_AT_ONCE)
        self._responder = Responder(handlers.answer, self._may_ask, self._traffic.upload)
        # `_ask` and `_discovery` are set while the library runs.
        self._ask: Ask | None = None
        self._discovery: Discovery | None = None

    async def run(self, task_status: Started = trio.TASK_STATUS_IGNORED) -> None:
        """Run the network library until cancelled, and restart it whenever it fails.

        Reports our addresses once the library listens.

        Raises:
            CannotListen: the library never listened.
        """
        wait, started = RESTART_FIRST_S, False

        def up() -> None:
            nonlocal started
            if not started:
                task_status.started(self.addresses())
            started = True

        while True:
            since = self._clock()
            try:
                await self._live(up)
            except (Exception, BaseExceptionGroup) as error:
                ours = _ours(error)
                # After the first start, an OperatorError only means that our port is not free again yet.
                if ours is not None and not (started and isinstance(ours, OperatorError)):
                    raise ours from None
                # A library of 100,000 lines can fail in any way.
                log.exception("the p2p engine failed and restarts in %.0f s", wait)
            self.restarts += 1
            if self._clock() - since > CALM_S:
                wait = RESTART_FIRST_S
            await trio.sleep(wait)
            wait = min(2 * wait, RESTART_LAST_S)

    @abstractmethod
    async def _live(self, up: Callable[[], None]) -> None:
        """Run the network library once, until it ends or fails. Call `up` when it listens."""

    def publish(self, frame: bytes) -> None:
        self._waiting.append((self._clock() + MAX_WAIT_S, frame))
        self._news.set()

    async def request(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        if self._ask is None or self._discovery is None:
            raise Unanswered(f"{peer}: the engine is not running")
        with self._discovery.asking(peer):
            return await self._ask(peer, question, limit)

    def shut_out(self, peer: PeerId, seconds: float) -> None:
        # The next `Connections.refresh` hangs up. Until then nothing from the peer is accepted.
        self._rate_limit.ban(peer, self._clock(), seconds)

    def peers(self) -> Sequence[Peer]:
        """Return the connected members of our swarm. Other nodes may be connected for the DHT."""
        return self._discovery.peers() if self._discovery is not None else []

    def connected(self) -> Collection[PeerId]:
        return self._discovery.connected if self._discovery is not None else ()

    def present(self, topic: Topic) -> int:
        return self._discovery.connections.present(topic) if self._discovery is not None else 0

    def heard_nearby(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self._book.add(peer, addresses, self._clock(), teller=NEARBY, source=LOCAL)

    def told_of(self, peer: PeerId, address: str) -> None:
        self._book.add(peer, [address], self._clock(), teller=AUTHORS, source="")

    def _discover(self, connections: Connections) -> Discovery:
        return Discovery(connections, self._topics, self._book, self._banned, self._clock, self._rng)

    async def _send_all(
        self, reached: Callable[[], Collection[PeerId]], send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Send published frames until cancelled.

        While no peer would get a frame, it waits for at most MAX_WAIT_S, because old rollouts are worth
        little.

        reached: returns the peers that get our frames. send: sends one frame.
        """
        while True:
            if not self._waiting:
                self._news = trio.Event()
                await self._news.wait()
            elif not reached() and self._waiting[0][0] > self._clock():
                await trio.sleep(0.1)
            else:
                await send(self._waiting.popleft()[1])

    def _on_frame(self, frame: bytes, via: PeerId | None, topics: Sequence[str]) -> Verdict:
        for topic, pass_on in self._handlers.also.items():
            if str(topic) in topics:
                return pass_on(frame, via)
        return self._handlers.deliver(frame, via)

    def _may_ask(self, peer: PeerId) -> bool:
        if self._banned(peer):
            return False
        if self._questions.of(peer, now := self._clock()).wait(now) == 0:
            return True
        log.warning("cut off %s: too many questions", peer)
        self.shut_out(peer, self._rate_limit.ban_again(peer, now))
        return False

    def _banned(self, peer: PeerId) -> bool:
        return self._rate_limit.banned(peer, self._clock())


def _ours(error: BaseException) -> BaseException | None:
    """Return the part of an error that is not the library's fault: a cancellation or an OperatorError.

    A single exception is unpacked from its group, so that the operator sees only its message.
    """
    group = error if isinstance(error, BaseExceptionGroup) else BaseExceptionGroup("", [error])
    inner: BaseException | None
    inner, _ = group.split((trio.Cancelled, KeyboardInterrupt, SystemExit, OperatorError))
    while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
        inner = inner.exceptions[0]
    return inner
