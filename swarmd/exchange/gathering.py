"""From offers to rollouts, in the daemon: chooses what we will train on, fetches that alone, and hands it on as if it had been gossiped.

Each round has a number of rollouts to gather. They are chosen from what is on offer when the round begins, uniformly; where that is too
little, from what is offered while it lasts; and where nobody has one of them any more, another takes its place. So rollouts come while
our own are being generated, and no round ever waits for them.
"""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from p2p.blobs import BadBlob, unpack
from p2p.fetching import Want
from p2p.member import Member
from p2p.types import Envelope, PeerId, Reason
from swarmd.exchange import offers, wire
from swarmd.exchange.offers import Board, Choice, Offered

AT_LEAST = 5.0  # seconds a fetch may take though the round it was begun in is over: the rounds of a tiny model are shorter than a way

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fetch:
    item: Offered
    scope: trio.CancelScope
    since: float  # seconds, the gatherer's clock


class Gatherer:
    """wanted: rollouts to gather a round. specialties: the curriculum's.

    hand_on: gets an envelope of kind `rollouts` for each, whose `heard` is the board's round in which its offer came.
    """

    def __init__(
        self,
        member: Member,
        board: Board,
        *,
        wanted: int,
        specialties: Sequence[str],
        hand_on: Callable[[Envelope], None],
        clock: Callable[[], float],
        rng: random.Random,
        choice: Choice = offers.uniform,
    ) -> None:
        self._member, self._board, self._wanted, self._specialties = member, board, wanted, specialties
        self._hand_on, self._clock, self._rng, self._choice = hand_on, clock, rng, choice
        self._missing = wanted  # rollouts of this round that are neither here nor on their way
        self._under_way: dict[bytes, _Fetch] = {}
        self._nursery: trio.Nursery | None = None
        self.gathered, self.missed = 0, 0

    async def run(self) -> None:
        """Fetch until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._fill()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def hear(self, envelope: Envelope) -> None:
        """An offer came. Quick."""
        offered = offers.decode(envelope, self._specialties)
        if isinstance(offered, Reason):
            self._member.report(envelope.author, offered)
            return
        if self._board.add(offered) < len(offered):
            self._member.report(envelope.author, Reason.UNKNOWN_TASK)
        if envelope.established:  # newcomers' wait for the next choice: a crowd of them does not keep us choosing
            self._fill()

    def next_round(self) -> None:
        """A round of ours is over: what was chosen for it comes too late now, unless it has only just been asked for.

        What would be too old to be trained on comes too late in any case.
        """
        now = self._clock()
        self._board.next_round()
        for fetch in self._under_way.values():
            if now - fetch.since >= AT_LEAST or self._board.too_old(fetch.item):
                fetch.scope.cancel()
        self._missing = max(0, self._wanted - sum(not fetch.scope.cancel_called for fetch in self._under_way.values()))
        self._fill()

    @property
    def round(self) -> int:
        """Of our own rounds, counted from 1 at the start of this process: what `Envelope.heard` is counted in here."""
        return self._board.round

    def document(self) -> dict[str, int]:
        """Rollouts on offer now; since the start those fetched and those that nobody had in time; bytes fetched, and served to others."""
        fetched, sent = self._member.fetcher.received, self._member.server.sent
        return {"on_offer": len(self._board), "fetched": self.gathered, "missed": self.missed, "bytes_in": fetched, "bytes_out": sent}

    def _fill(self) -> None:
        if self._nursery is None or self._missing <= 0:
            return
        for item in self._board.choose(self._missing, self._rng, self._choice):
            self._missing -= 1
            fetch = self._under_way[item.id] = _Fetch(item, trio.CancelScope(), self._clock())
            self._nursery.start_soon(self._gather, item, fetch)

    async def _gather(self, item: Offered, fetch: _Fetch) -> None:
        blob: bytes | None = None
        try:
            with fetch.scope:
                holders: list[PeerId] = [item.author] if item.via is None else [item.author, item.via]
                blob = await self._member.fetch(Want(item.id, item.size, holders))
        finally:
            del self._under_way[item.id]
        if fetch.scope.cancelled_caught:
            self.missed += 1
            return
        if blob is None or not self._take(item, blob):
            log.info("nobody has what %s offered", item.author)
            self.missed += 1
            self._missing += 1
            self._fill()

    def _take(self, item: Offered, blob: bytes) -> bool:
        try:
            body = unpack(blob)
        except BadBlob as error:  # it is what the author offered: nobody else could have made it
            log.info("a blob of %s: %s", item.author, error)
            self._member.report(item.author, Reason.UNDECODABLE)
            return False
        self.gathered += 1
        self._hand_on(Envelope(item.author, 0, self._clock(), wire.KIND, body, heard=item.heard))
        return True
