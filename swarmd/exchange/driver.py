"""Runs an exchange over a `p2p.member.Member`: makes events, and performs the outputs (trio).

It has one queue and one loop, because an output may cause an event at once (the memory engine delivers inside
`publish`), and an earlier `WakeAt` must not overtake a later one. The driver contains no rule of sharing.
"""

import logging
import math
from collections.abc import Callable

import trio

from p2p.errors import StateUnwritable
from p2p.member import Member
from p2p.types import Envelope, PeerId, Unanswered
from swarmd.exchange.events import (
    Admitted,
    Answered,
    Ask,
    Cancel,
    Connected,
    Deliver,
    Event,
    Hold,
    Output,
    Report,
    Send,
    SendFailed,
    Talk,
    Tick,
    WakeAt,
)
from swarmd.exchange.exchange import Exchange

# Maximum number of events in the queue. Over this limit, frames are dropped; events about state are never
# dropped.
MAX_EVENTS = 4096
# Seconds between two checks of which members we are connected to.
PEERS_EVERY_S = 1.0

log = logging.getLogger(__name__)


class Driver:
    """Drives one exchange.

    Args:
        deliver: called with the rollouts of other nodes.
        talk: called with a message for the operator.
        reported: called with each peer that is reported for a fault.
    """

    def __init__(
        self,
        exchange: Exchange,
        deliver: Callable[[Deliver], None],
        talk: Callable[[str], None],
        reported: Callable[[PeerId], None] = lambda _: None,
    ) -> None:
        self.exchange, self._deliver, self._talk, self._reported = exchange, deliver, talk, reported
        self._events_in, self._events = trio.open_memory_channel[Event](2 * MAX_EVENTS)
        self._questions: dict[int, trio.CancelScope] = {}
        self._wake_at = math.inf

    def admitted(self, envelope: Envelope) -> bool:
        """Take an admitted frame; return whether there was room for it."""
        if room := self._events.statistics().current_buffer_used < MAX_EVENTS:
            self.put(Admitted(envelope))
        return room

    def put(self, event: Event) -> None:
        """Queue an event, and return at once."""
        self._events_in.send_nowait(event)

    async def run(self, member: Member) -> None:
        """Handle events until cancelled."""
        async with trio.open_nursery() as nursery:
            # The exchange learns the connected peers before it fetches from them.
            event: Event = Connected(connected(member))
            nursery.start_soon(self._watch_peers, member)
            while True:
                for output in self.exchange.handle(event, trio.current_time()):
                    self._perform(output, member, nursery)
                event = Tick()
                with trio.move_on_at(self._wake_at):
                    event = await self._events.receive()

    def _perform(self, output: Output, member: Member, nursery: trio.Nursery) -> None:
        match output:
            case Send(kind, body):
                try:
                    member.publish(kind, body)
                except StateUnwritable as error:
                    # No sequence number can be reserved.
                    self.put(SendFailed(str(error)))
            case Hold(blob):
                member.blobs.put(blob.data)
            case Ask(number):
                self._questions[number] = trio.CancelScope()
                nursery.start_soon(self._ask, output, member)
            case Cancel(number):
                # The question may be over already, with its answer still in the queue.
                self._questions.get(number, trio.CancelScope()).cancel()
            case Deliver():
                self._deliver(output)
            case Report(peer, reason):
                log.info("%s: %s", peer, reason.value)
                member.report(peer, reason)
                self._reported(peer)
            case Talk(text):
                self._talk(text)
            case WakeAt(time):
                self._wake_at = time

    async def _ask(self, ask: Ask, member: Member) -> None:
        reply = None
        with self._questions[ask.number] as scope:
            try:
                reply = await member.request(ask.peer, ask.question, ask.limit, ask.at)
            except Unanswered as error:
                log.debug("%s does not answer: %s", ask.peer, error)
        del self._questions[ask.number]
        if not scope.cancelled_caught:
            self.put(Answered(ask.number, reply))

    async def _watch_peers(self, member: Member) -> None:
        known = None
        while True:
            if (peers := connected(member)) != known:
                known = peers
                self.put(Connected(peers))
            await trio.sleep(PEERS_EVERY_S)


def connected(member: Member) -> tuple[PeerId, ...]:
    return tuple(peer.id for peer in member.peers())
