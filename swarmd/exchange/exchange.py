"""The exchange of rollouts as one state machine without I/O.

`Exchange.handle` takes an event and returns the outputs that a driver performs, in their order. The laws:

1. `handle` alone changes the state. Clock and randomness are arguments, so the same events give the same
   outputs.
2. Every input from a peer is an event. No event makes `handle` raise, unless this code has a bug.
3. Each question and each fetch has a timeout, so it ends even if the driver never answers.
4. Every collection is bounded.
5. A `WakeAt` replaces the previous one and is later than now; each `Tick` is followed by a `WakeAt`.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from p2p.blobs.blobs import MAX_BLOB_BYTES, MAX_CONTENT_BYTES
from p2p.types import Reason
from swarmd.config.config import RoundConfig
from swarmd.exchange import offers, wire
from swarmd.exchange.events import (
    Admitted,
    Answered,
    Connected,
    Event,
    Hold,
    Leave,
    Output,
    Report,
    RoundBegan,
    Send,
    SendFailed,
    Share,
    Talk,
    Tick,
    Useless,
    WakeAt,
)
from swarmd.exchange.market import Market
from swarmd.exchange.pacing import Heard, Outgoing, Pacing
from swarmd.experience.strategies import SharingSettings
from swarmd.tasks.curriculum import Curriculum
from swarmd.types import Rollout

# The kinds of frames that this version can use.
KINDS = frozenset((wire.KIND, offers.KIND))
# The minimum time between two turns, because receivers drop frames over an author's quota.
MIN_GAP_S = 0.5
# Maximum number of own rollouts that wait to be encoded; over it, the oldest are dropped.
MAX_UNSENT = 1024
TOO_LARGE = (
    f"rollouts over {MAX_CONTENT_BYTES} bytes, or {MAX_BLOB_BYTES} compressed, are not shared: lower"
    " generate.max_new_tokens or round.completions"
)


class Exchange:
    """One node's part in the exchange.

    Args:
        sharing: its `take` and `caps` decide which rollouts are fetched.
        model: the model's name that other nodes are told.
        whole: a rollout set of at most this many bytes is gossiped whole; the rollouts of a larger set are
        offered.
    """

    def __init__(
        self,
        curriculum: Curriculum,
        round: RoundConfig,
        sharing: SharingSettings,
        model: str,
        rng: random.Random,
        whole: int = offers.WHOLE_BYTES,
    ) -> None:
        self.curriculum, self.model = curriculum, wire.model_for_others(model)
        self.whole, self.rng, self._round = whole, rng, 0  # the round of the unsent rollouts
        self._out: list[Output] = []
        heard = self.heard = Heard()
        self.pacing = Pacing(heard, rng, curriculum.offers_a_second)
        self.market = Market(
            curriculum, round, sharing, rng, lambda output: self._out.append(output), heard.tried
        )
        self.outgoing = Outgoing(self.pacing, round.max_age)
        # Own rollouts that wait to be encoded, with their blobs.
        self.unsent: deque[tuple[Rollout, offers.Blob | None]] = deque(maxlen=MAX_UNSENT)
        self._turn_at = -math.inf  # the earliest time of the next turn
        self._said = ""  # the last message to the operator
        self._wake_at = math.nan  # differs from any time, so the first `WakeAt` is sent
        self.shared = 0  # own rollouts that were sent or offered
        # Called with each decoded event, its time and its outputs (`exchange.replay`).
        self.record: Callable[[Event, float, Sequence[Output]], None] = lambda *_: None

    def handle(self, event: Event, now: float) -> Sequence[Output]:
        """Handle an event and return the outputs, in order. now: seconds of a monotonic clock."""
        event = self._decoded(event)
        try:
            self._handle(event, now)
        finally:
            out, self._out = self._out, []
            self.record(event, now, out)
        return out

    def _handle(self, event: Event, now: float) -> None:
        match event:
            case Admitted():
                self._admitted(event, now)
            case Answered(number, offers.Blob() | None as reply):
                self.market.answered(number, reply, now)
            case Connected(peers):
                self.market.connected = peers
            case RoundBegan(number, pass_rates):
                self.market.begin(number, pass_rates, now)
                if pass_rates is not None:
                    self._encode()
                    self.outgoing.next_round()
            case Share(rollouts, number, tuple() as blobs):
                self.unsent.extend(zip(rollouts, blobs, strict=True))
                self._round = number
            case Useless(authors):
                self._out += [Report(author, Reason.USELESS) for author in authors]
            case Leave():
                self.pacing.pace = self.pacing.target = math.inf
                self._turn_at = now
            case SendFailed(cause):
                self._talk(f"sharing is off for now: {cause}")
        due = min(self.market.advance(now), self._send(now))
        if isinstance(event, Tick) or due != self._wake_at:
            self._wake_at = due
            self._out.append(WakeAt(due))

    @property
    def waits(self) -> bool:
        """Whether own rollouts wait to be sent."""
        return bool(self.unsent) or self.outgoing.waits

    def _decoded(self, event: Event) -> Event:
        """Return the event with its bytes decoded. No other method of this class depends on the bytes."""
        match event:
            case Admitted(envelope, None):
                found = (
                    wire.decode(envelope.body, envelope.author)
                    if envelope.kind == wire.KIND
                    else offers.decode(envelope, self.curriculum.specialties)
                )
                return Admitted(replace(envelope, body=b""), found)
            case Answered(number, bytes() as reply):
                return Answered(number, offers.decode_blob(reply, {id for _, id in self.market.under_way}))
            case Share(rollouts, number, None):
                blobs = (offers.packed_rollout(rollout, number, self.model) for rollout in rollouts)
                return Share(rollouts, number, tuple(blobs))
        return event

    def _admitted(self, event: Admitted, now: float) -> None:
        envelope, found = event.envelope, event.found
        self.heard.offer(envelope.author, envelope.group, now)
        match found:
            case wire.RolloutSet(rollouts=rollouts):
                self.market.deliver(found, envelope.group, self.market.board.round)
                known = all(self.curriculum.trains_on(rollout.ref) for rollout in rollouts)
            case tuple():
                known = self.market.add(found, now) == len(found)
        reason = found if isinstance(found, Reason) else None if known else Reason.UNKNOWN_TASK
        if reason is not None:
            self._out.append(Report(envelope.author, reason))

    def _encode(self) -> None:
        """Encode the unsent rollouts: as one whole set if it is small enough, else as offers."""
        if not self.unsent:
            return
        rollouts = [rollout for rollout, _ in self.unsent]
        blobs = [(rollout.ref, blob) for rollout, blob in self.unsent if blob is not None]
        self.unsent.clear()
        body = wire.encode(rollouts, self._round, self.model)
        if len(body) <= self.whole and len(rollouts) <= wire.MAX_ROLLOUTS:
            self.outgoing.put(wire.KIND, body)
            self.shared += len(rollouts)
            return
        if len(blobs) < len(rollouts):
            self._talk(TOO_LARGE)
        for _, blob in blobs:
            # This is recorded, so that another author's offer of this blob is recognised as a copy.
            self.market.author_of[blob.id] = rollouts[0].author
            self._out.append(Hold(blob))
        for offer in offers.encode(blobs, self._round, self.curriculum.specialties):
            self.outgoing.put(offers.KIND, offer)
        self.shared += len(blobs)

    def _send(self, now: float) -> float:
        """Send waiting messages if it is our turn and a peer is connected; return the next turn's time."""
        if not self.market.connected or not self.waits:
            return math.inf
        if (turn := max(self._turn_at, self.pacing.next_at(now))) > now:
            return turn
        self._encode()
        while (message := self.outgoing.pop(now)) is not None:
            self._out.append(Send(*message))
        self._turn_at = now + MIN_GAP_S
        return self._send(now)

    def _talk(self, text: str) -> None:
        """Tell the operator, unless it repeats the last message."""
        if text != self._said:
            self._said = text
            self._out.append(Talk(text))
