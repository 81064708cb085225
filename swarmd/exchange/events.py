"""The events and outputs of the exchange: frozen values, checked when they are made (ValueError).

A driver makes events, and performs the outputs in their order. All are structs with tags, so that a run can
be written to a file and replayed.
"""

import msgspec

from p2p.types import MAX_QUESTION_BYTES, Envelope, PeerId, Reason
from swarmd.exchange.offers import Blob, Offered
from swarmd.exchange.wire import RolloutSet
from swarmd.types import PassRates, Rollout


class _Value(msgspec.Struct, frozen=True, tag=True):
    pass


class Admitted(_Value, frozen=True):
    """A frame of another member passed admission (`p2p.admission.inbox`).

    found: the decoded body, or the reason for rejecting it; None: not decoded yet.
    """

    envelope: Envelope
    found: RolloutSet | tuple[Offered, ...] | Reason | None = None


class Answered(_Value, frozen=True):
    """An `Ask` ended and was not cancelled. reply: None if the peer was not reached."""

    number: int
    reply: bytes | Blob | None


class Connected(_Value, frozen=True):
    """The members that we are connected to now; empty while our own member is offline."""

    peers: tuple[PeerId, ...]


class RoundBegan(_Value, frozen=True):
    """The trainer begins a round.

    pass_rates: the gate's, after the previous round; None if the trainer has just started.
    """

    number: int
    pass_rates: PassRates | None = None

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"round {self.number}: rounds are counted from 1")


class Share(_Value, frozen=True):
    """The trainer shares its own rollouts of a round.

    blobs: one for each rollout; None for a rollout that is too large for a blob. `blobs` itself is None if
    nothing is encoded yet.
    """

    rollouts: tuple[Rollout, ...]
    round: int
    blobs: tuple[Blob | None, ...] | None = None


class Useless(_Value, frozen=True):
    """The trainer has learnt nothing from these authors' rollouts for a long time."""

    authors: tuple[PeerId, ...]


class Leave(_Value, frozen=True):
    """The node leaves soon: it sends its waiting messages now instead of at its next turn."""


class SendFailed(_Value, frozen=True):
    """A `Send` was not performed."""

    cause: str


class Tick(_Value, frozen=True):
    """The time of the last `WakeAt` has come."""


class Send(_Value, frozen=True):
    """Sign a body and gossip it."""

    kind: str
    body: bytes


class Hold(_Value, frozen=True):
    """Keep a blob for peers that ask for it (`p2p.blobs.BlobStore`)."""

    blob: Blob


class Ask(_Value, frozen=True):
    """Ask a peer; dial it if need be.

    number: never used twice, so a late answer is never taken for another question's. limit: bytes of the
    answer, at most. at: the multiaddress at which the peer says that it can be reached; "" if it gave none.
    """

    number: int
    peer: PeerId
    question: bytes
    limit: int
    at: str = ""

    def __post_init__(self) -> None:
        if not 0 < len(self.question) <= MAX_QUESTION_BYTES or self.limit < 1:
            raise ValueError(f"a question of {len(self.question)} bytes, an answer of {self.limit}")


class Cancel(_Value, frozen=True):
    """End a question. If its answer still arrives, the answer is ignored."""

    number: int


class Deliver(_Value, frozen=True):
    """Hand another node's rollout to the trainer."""

    rollout: Rollout


class Report(_Value, frozen=True):
    """Report a peer for a fault: an author for its content, a holder for its answer."""

    peer: PeerId
    reason: Reason


class Talk(_Value, frozen=True):
    """Tell the operator."""

    text: str


class WakeAt(_Value, frozen=True):
    """Send a `Tick` at this time. It replaces the last one; infinity: never."""

    time: float


Event = Admitted | Answered | Connected | RoundBegan | Share | Useless | Leave | SendFailed | Tick
Output = Send | Hold | Ask | Cancel | Deliver | Report | Talk | WakeAt
