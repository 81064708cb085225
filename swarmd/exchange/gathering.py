"""From offers to rollouts, in the daemon: chooses what we will train on, fetches that alone, and hands it on as if it had been gossiped.

Each round has a number of rollouts to gather. They are chosen from what is on offer when the round begins, uniformly; where that is too
little, from what is offered while it lasts; and where nobody has one of them any more, or it is late, another takes its place. So
rollouts come while our own are being generated, and no round ever waits for them.
"""

import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from p2p.blobs.blobs import BadBlob, unpack
from p2p.blobs.fetch import HEDGE, Said, Says, Want
from p2p.member import Member
from p2p.types import Envelope, PeerId, Reason
from swarmd.exchange import offers, wire
from swarmd.exchange.offers import Board, Choice, Offered
from swarmd.exchange.serving import HARD, Serving

AT_LEAST = 5.0  # seconds a fetch may take though the round it was begun in is over: the rounds of a tiny model are shorter than a way
DOUBTFUL = 2.0  # seconds a fetch may take where the author is doubtful (`Serving.doubtful`)
LATE = 2.0  # seconds after which a fetch holds its place no longer: it goes on, and another author's is begun

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fetch:
    item: Offered
    scope: trio.CancelScope
    since: float  # seconds, the gatherer's clock
    says: Says  # what its holders said so far
    late: bool = False  # it holds no place of the round any more


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
        serving: Serving | None = None,
    ) -> None:
        self._member, self._board, self._wanted, self._specialties = member, board, wanted, specialties
        self._hand_on, self._clock, self._rng, self._choice = hand_on, clock, rng, choice
        self._serving = serving or Serving(wanted)
        self._wanting = wanted  # rollouts of this round that are not here yet
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
        if envelope.established and self._places() > 0:  # newcomers' wait for the next choice: a crowd of them does not keep us choosing
            self._fill()

    def next_round(self) -> None:
        """A round of ours is over: what was chosen for it comes too late now, unless it has only just been asked for.

        What would be too old to be trained on comes too late in any case.
        """
        now = self._clock()
        self._board.next_round()
        self._serving.next_round()
        for fetch in self._under_way.values():
            if now - fetch.since >= AT_LEAST or self._board.too_old(fetch.item):
                fetch.scope.cancel()
        self._wanting = self._wanted
        self._fill()

    @property
    def round(self) -> int:
        """Of our own rounds, counted from 1 at the start of this process: what `Envelope.heard` is counted in here."""
        return self._board.round

    def document(self) -> dict[str, int]:
        """Rollouts on offer now; since the start those fetched and those that nobody had in time; authors set aside now, as they do not
        serve what they offer; bytes fetched, and served to others.
        """
        fetched, sent = self._member.fetcher.received, self._member.server.sent
        aside = self._serving.aside(self._clock())
        return {"on_offer": len(self._board), "fetched": self.gathered, "missed": self.missed, "set_aside": aside,
                "bytes_in": fetched, "bytes_out": sent}  # fmt: skip

    def _fill(self) -> None:
        """Give the round's places to authors that serve, and try out beside them those who did not (`Serving.on_trial`)."""
        if self._nursery is None:
            return
        now, under_way = self._clock(), self._alive()
        late = {fetch.item.author for fetch in under_way if fetch.late}
        tried = sum(self._serving.on_trial(fetch.item.author) for fetch in under_way)

        def choose(offered: Sequence[Offered], count: int, rng: random.Random) -> Sequence[Offered]:
            prompt = [item for item in offered if item.author not in late]
            return self._serving.choose(prompt, count, rng, self._choice, now, tried)

        for item in self._board.choose(self._places(), self._rng, choose):
            fetch = self._under_way[item.id] = _Fetch(item, trio.CancelScope(), now, {})
            self._nursery.start_soon(self._gather, fetch)
            self._nursery.start_soon(self._wait, fetch)

    def _places(self) -> int:
        """Of the round, that nobody's rollout has, and on the way to which none is. Of a round at most twice its rollouts come."""
        under_way = self._alive()
        holding = sum(not fetch.late and not self._serving.on_trial(fetch.item.author) for fetch in under_way)
        return max(0, min(self._wanting - holding, self._wanted + self._wanting - len(under_way)))

    def _alive(self) -> Sequence[_Fetch]:
        return [fetch for fetch in self._under_way.values() if not fetch.scope.cancel_called]

    async def _wait(self, fetch: _Fetch) -> None:
        await trio.sleep(LATE)
        if self._under_way.get(fetch.item.id) is fetch:
            fetch.late = True
            self._fill()

    async def _gather(self, fetch: _Fetch) -> None:
        item, blob = fetch.item, None
        try:
            with fetch.scope, trio.move_on_after(DOUBTFUL if self._serving.doubtful(item.author) else math.inf):
                holders: list[PeerId] = [item.author] if item.via is None else [item.author, item.via]
                blob = await self._member.fetch(Want(item.id, item.size, holders), fetch.says)
        finally:
            del self._under_way[item.id]
        if blob is not None and self._take(item, blob):
            if fetch.says.get(item.author, Said.NO) is not Said.NO:  # else it was here, or others had it: no credit to the author
                self._serving.served(item.author, self._clock())
            self._wanting -= 1
            self._fill()
            return
        self.missed += 1
        if blob is None:
            self._unserved(fetch)
        if not fetch.scope.cancelled_caught:
            self._fill()

    def _unserved(self, fetch: _Fetch) -> None:
        """Nobody had it, or not in time."""
        author, said, now = fetch.item.author, fetch.says.get(fetch.item.author), self._clock()
        log.info("nobody has what %s offered; itself: %s", author, said.value if said else "not asked")
        given = now - fetch.since  # seconds
        if said is None or (said is not Said.NO and given < HEDGE):
            return  # it had no time
        patient = given >= AT_LEAST or not fetch.scope.cancelled_caught
        connected = patient and any(peer.id == author for peer in self._member.peers())
        cost = self._serving.cost(said, connected, now)
        if cost == HARD:
            self._board.take_down(author)  # what it offers from now on is another matter
        if self._serving.failed(author, cost, fetch.since, now) and cost == HARD:
            self._member.report(author, Reason.UNSERVED)

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
