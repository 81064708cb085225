"""What a node's daemon does for its trainer, within an experiment: puts offers on the board, and fetches what a round needs.

The board, the choice and the fetches are those of a real node (`swarmd.exchange.gathering`), over the memory engine. Fetching takes no
virtual time: what no member that is there holds is given up, as at the end of a real round.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import trio
import trio.testing

from p2p.member import Member
from p2p.types import Envelope, PeerId, Reason
from swarmd.config.config import NodeConfig
from swarmd.exchange import offers
from swarmd.exchange.gathering import gatherer_of
from swarmd.tasks.curriculum import Curriculum
from swarmd.types import Lead


class FetchingMember:
    """A `Transport` that fetches when the round collects."""

    def __init__(self, member: Member, config: NodeConfig, curriculum: Curriculum, clock: Callable[[], float], rng: random.Random) -> None:
        self._member = member
        self._gatherer, self._choice = gatherer_of(member, curriculum, config.round, config.sharing.take, self._hand_on, clock, rng)
        self._here: list[Envelope] = []
        self.round = 0  # of the experiment, set by whoever plays it

    def received(self) -> Sequence[Envelope]:
        """Return what was gossiped whole, oldest first, then what was fetched, in a repeatable order."""
        for envelope in self._member.received():
            (self._gatherer.on_offer if envelope.kind == offers.KIND else self._hand_on)(envelope)
        whole, self._here = self._here, []
        trio.run(self._fetch)
        fetched, self._here = self._here, []
        return [*whole, *sorted(fetched, key=lambda envelope: (envelope.heard, envelope.author, envelope.body))]

    def end_round(self, lead: Lead) -> None:
        """End a round, as a trainer tells its daemon."""
        self._choice.begin(lead)
        self._gatherer.next_round()

    async def _fetch(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._gatherer.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    def _hand_on(self, envelope: Envelope) -> None:
        """Pass an envelope on with the experiment's round as its age.

        The gatherer counts only rounds in which the node is present; the experiment counts all.
        """
        age = self._gatherer.round - (envelope.heard or self._gatherer.round)
        self._here.append(replace(envelope, group=self._member.group(envelope.author), heard=max(1, self.round - age)))

    # The rest is the member's.

    def publish(self, kind: str, body: bytes) -> None:
        self._member.publish(kind, body)

    def hold(self, blob: bytes) -> None:
        self._member.hold(blob)

    def report(self, author: PeerId, reason: Reason) -> None:
        self._member.report(author, reason)

    def refused(self) -> Mapping[Reason, int]:
        return self._member.refused()
