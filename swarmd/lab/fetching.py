"""What a node's daemon does for its trainer, within an experiment.

Puts offers on the board, and fetches what a round needs.

The board, the choice and the fetches are those of a real node (`swarmd.exchange.gathering`), over the memory
engine. Fetching takes no virtual time: what no member that is there holds is given up, as at the end of a
real round.
"""

import random
from collections.abc import Callable, Mapping, Sequence

import trio
import trio.testing

from p2p.admission.fair_queue import FairQueue
from p2p.member import Member
from p2p.types import Envelope, PeerId, Reason, ReceivedBody
from swarmd.config.config import NodeConfig
from swarmd.exchange.gathering import gatherer_of
from swarmd.tasks.curriculum import Curriculum
from swarmd.types import Lead


class FetchingMember:
    """A `Transport` that fetches when the round collects.

    join: builds the member, which is told what to do with each envelope.
    """

    def __init__(
        self,
        join: Callable[[Callable[[Envelope], None]], Member],
        config: NodeConfig,
        curriculum: Curriculum,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._heard: FairQueue[Envelope] = FairQueue()
        self._member = join(self._heard.put)
        self._here: list[ReceivedBody] = []
        hand_on = self._here.append
        self._gatherer, self._choice = gatherer_of(
            self._member, curriculum, config.round, config.sharing.take, hand_on, clock, rng
        )

    def received(self) -> Sequence[ReceivedBody]:
        """Return what was gossiped whole, oldest first, then what was fetched, in a repeatable order."""
        for envelope in self._heard.drain():
            self._gatherer.on_envelope(envelope)
        whole = len(self._here)
        trio.run(self._fetch)
        here = list(self._here)
        self._here.clear()
        return [
            *here[:whole],
            *sorted(here[whole:], key=lambda received: (received.heard, received.author, received.body)),
        ]

    def begin_round(self, number: int) -> None:
        """Begin a round. number: the experiment's, which counts rounds in which the node is away, too."""
        self._gatherer.next_round(number)

    def end_round(self, lead: Lead) -> None:
        """End a round, as a trainer tells its daemon."""
        self._choice.begin(lead)

    async def _fetch(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._gatherer.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    # The rest is the member's.

    def publish(self, kind: str, body: bytes) -> None:
        self._member.publish(kind, body)

    def hold(self, blob: bytes) -> None:
        self._member.hold(blob)

    def report(self, author: PeerId, reason: Reason) -> None:
        self._member.report(author, reason)

    def refused(self) -> Mapping[Reason, int]:
        return self._member.refused()
