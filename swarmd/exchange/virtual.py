"""Runs an exchange in the caller's time, over a member of a `p2p.engines.memory.MemorySwarm`.

Peers answer at once. Frames pass the usual admission checks, as the member is a real `p2p.member.Member`.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from p2p.admission.fair_queue import FairQueue
from p2p.engines.memory import MemoryEngine
from p2p.identity import Identity
from p2p.member import Member
from p2p.topic import Topic
from p2p.types import Handlers, PeerId, Unanswered
from swarmd.exchange.events import (
    Admitted,
    Answered,
    Ask,
    Connected,
    Deliver,
    Event,
    Hold,
    Output,
    Report,
    RoundBegan,
    Send,
    Share,
    Tick,
    Useless,
    WakeAt,
)
from swarmd.exchange.exchange import KINDS, Exchange
from swarmd.types import PassRates, Rollout


class VirtualNode:
    """One node of a swarm in virtual time. Implements `swarmd.protocols.Swarm`.

    It handles the frames that have arrived when its round shares and when its round collects.

    build_engine: builds the member's engine (`MemorySwarm.join`). clock: seconds.
    """

    def __init__(
        self,
        exchange: Exchange,
        identity: Identity,
        topic: Topic,
        build_engine: Callable[[Handlers], MemoryEngine],
        clock: Callable[[], float],
    ) -> None:
        self.exchange, self._clock = exchange, clock
        self.pass_rates: PassRates = {}  # set by the trainer at the end of a round, for the next round
        self._round, self._wake_at = 0, math.inf
        self._events: deque[Event] = deque()
        self.arrived: FairQueue[Rollout] = FairQueue()
        self.member = Member(
            identity,
            topic,
            build_engine,
            sequence=itertools.count(1),
            clock=clock,
            admitted=lambda envelope: self._events.append(Admitted(envelope)),
            knows=KINDS.__contains__,
        )

    def share(self, rollouts: Sequence[Rollout], round_number: int) -> None:
        """Begin a round, as a trainer tells its daemon, and share our rollouts of it."""
        began = [RoundBegan(round_number, self.pass_rates)] if round_number != self._round else []
        self._round = round_number
        self._play(*began, Share(tuple(rollouts), round_number))

    def collect(self) -> tuple[Sequence[Rollout], Mapping[str, int]]:
        self._play()
        return self.arrived.drain(), {reason.value: n for reason, n in self.member.refused().items()}

    def charge(self, authors: Iterable[PeerId]) -> None:
        self._play(Useless(tuple(authors)))

    def _play(self, *first: Event) -> None:
        """Handle these events, then the queued ones, until the queue is empty."""
        peers = tuple(peer.id for peer in self.member.peers())
        due = [Tick()] if self._clock() >= self._wake_at else []
        self._events.extendleft(reversed([Connected(peers), *due, *first]))
        while self._events:
            for output in self.exchange.handle(self._events.popleft(), self._clock()):
                self._perform(output)

    def _perform(self, output: Output) -> None:
        match output:
            case Send(kind, body):
                self.member.publish(kind, body)
            case Hold(blob):
                self.member.blobs.put(blob.data)
            case Ask(number):
                self._events.append(Answered(number, self._answer(output)))
            case Deliver(rollout):
                self.arrived.put(rollout, rollout.author, rollout.group, rollout.size)
            case Report(peer, reason):
                self.member.report(peer, reason)
            case WakeAt(time):
                self._wake_at = time

    def _answer(self, ask: Ask) -> bytes | None:
        engine = self.member.engine
        assert isinstance(engine, MemoryEngine)
        try:
            return engine.ask(ask.peer, ask.question, ask.limit)
        except Unanswered:
            return None
