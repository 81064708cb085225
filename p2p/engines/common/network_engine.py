"""What the engines that go over the network share: how they are built, what they are asked to do, and that they last."""

import logging
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

from p2p.address import Endpoint, parse_listen
from p2p.admission.host_bans import HostBans
from p2p.engines.common.lasting import BookFile, Lasting, Outbox, Shards, pinned_book
from p2p.engines.common.request_response import Desk
from p2p.identity import Identity
from p2p.netgroup import LOCAL
from p2p.peers.addressbook import NEARBY
from p2p.rate_limit import RateLimit
from p2p.topic import Topic
from p2p.types import Handlers, PeerId, Unanswered, Verdict

QUESTIONS, QUESTIONS_AT_ONCE = 100.0, 1000.0  # of one peer, a second: 25 rounds in it with a question for each rollout

log = logging.getLogger(__name__)


class Asking(Protocol):
    async def ask(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        """Raises Unanswered."""


class Finding(Protocol):
    def hang_up_soon(self, peer: PeerId) -> None: ...

    def connected(self) -> Collection[PeerId]: ...

    def present(self, topic: Topic) -> int: ...

    async def announce(self, topic: Topic) -> None:
        """Raises Unanswered."""

    async def find(self, topic: Topic) -> Sequence[PeerId]:
        """Raises Unanswered."""


class Networked:
    """Half of an `Engine`; the other half is a library.

    listen: multiaddresses; port 0 is replaced by the port it got, so a restart keeps it. bootstrap: multiaddresses ending in
    /p2p/<peer id>; our own is ignored. addressbook: the file of last known peers, or None to keep none. clock: seconds since the
    epoch. Raises BadAddress, naming what is not an address.
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
    ) -> None:
        self.me = identity.peer_id
        self._identity, self._topic, self._handlers = identity, topic, handlers
        self._clock, self._rng = clock, rng
        self._listen: Sequence[Endpoint] = [parse_listen(text) for text in listen]
        self._book = pinned_book(self.me, bootstrap)
        self._file = BookFile(self._book, addressbook)
        self._outbox = Outbox(clock)
        self._lasting = Lasting(clock)
        self._rate_limit, self._host_bans = rate_limit, HostBans()
        self._questions = RateLimit(rate=QUESTIONS, burst=QUESTIONS_AT_ONCE)
        self._desk = Desk(handlers.answer, self._may_ask)
        self._shards = Shards()
        self._asking: Asking | None = None  # while the engine is up, as the next
        self._finding: Finding | None = None

    @property
    def restarts(self) -> int:
        return self._lasting.restarts

    def publish(self, frame: bytes, shard: int = 0) -> None:
        self._outbox.put(frame, shard)

    def subscribe(self, shards: Collection[int]) -> None:
        self._shards.change(shards)

    async def request(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        if self._asking is None:
            raise Unanswered(f"{peer}: the engine is not up")
        return await self._asking.ask(peer, question, limit)

    def shut_out(self, peer: PeerId, seconds: float) -> None:
        self._rate_limit.ban(peer, self._clock(), seconds)
        if self._finding is not None:
            self._finding.hang_up_soon(peer)

    async def announce(self, topic: Topic) -> None:
        if self._finding is None:
            raise Unanswered("the engine is not up")
        await self._finding.announce(topic)

    async def find(self, topic: Topic) -> Sequence[PeerId]:
        if self._finding is None:
            raise Unanswered("the engine is not up")
        return await self._finding.find(topic)

    def connected(self) -> Collection[PeerId]:
        return self._finding.connected() if self._finding is not None else ()

    def present(self, topic: Topic) -> int:
        return self._finding.present(topic) if self._finding is not None else 0

    def heard_nearby(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self._book.add(peer, addresses, self._clock(), teller=NEARBY, source=LOCAL)

    def _hear(self, frame: bytes, via: PeerId | None, topics: Sequence[str]) -> Verdict:
        """What came in a message of these topics."""
        for topic, pass_on in self._handlers.also.items():
            if str(topic) in topics:
                return pass_on(frame, via)
        return self._handlers.deliver(frame, via, self._topic.shard_of(topics))

    def _may_ask(self, peer: PeerId) -> bool:
        if self._shut_out(peer):
            return False
        if self._questions.pay(peer, self._clock()):
            return True
        log.warning("cut off %s: too many questions", peer)
        self.shut_out(peer, self._questions.ban_seconds)
        return False

    def _shut_out(self, peer: PeerId) -> bool:
        return self._rate_limit.banned(peer, self._clock())
