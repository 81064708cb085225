"""The types of the network layer: peers, frames, verdicts, and the interface of an engine.

This layer knows nothing of rollouts, tasks or models. A message's type says which checks it has passed:

    bytes: a frame as it arrived, not checked
    Envelope: form, signature and limits hold; only `p2p.envelope.check` makes one
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NewType, Protocol

from p2p.topic import Topic

PeerId = NewType("PeerId", str)  # libp2p's text form: 12D3Koo…


class Verdict(Enum):
    """What to do with a frame (GossipSub v1.1, "extended validators")."""

    ACCEPT = "accept"  # use it and forward it
    IGNORE = "ignore"  # drop it; nobody is to blame
    REJECT = "reject"  # drop it and blame the forwarder, which could have checked it


class Reason(Enum):
    """Why a frame or its content is refused. The value is the text that operators read.

    Functions return a reason instead of raising it, because hostile peers are normal.
    """

    TOO_LARGE = "too large"
    MALFORMED = "not a frame"
    WRONG_VERSION = "another wire version"
    OTHER_SWARM = "of another swarm"
    BAD_SIGNATURE = "bad signature"
    STALE = "outside the time window"
    OLD = "sent before this node's start, or a late copy"
    DUPLICATE = "already seen"
    OVER_QUOTA = "author over quota"
    OWN_ECHO = "our own frame"
    FLOODING = "peer over its rate limit"
    SHUNNED = "from a misbehaving peer"
    UNKNOWN_KIND = "of a kind unknown to this version"
    BACKLOG = "more frames than this node can handle"
    NOT_ASKED_FOR = "not the requested blob"
    # Admission cannot find these; the node reports them later through `Member.report`.
    UNDECODABLE = "not a rollout set"
    UNKNOWN_TASK = "no such task in this curriculum"
    MISLABELLED = "another task than its author offered"
    NOT_ITS_OWN = "another author's rollout, offered as its own"
    TOO_LONG = "a completion is over the length limit"
    USELESS = "nothing to learn from this author"
    UNSERVED = "offers that their author does not serve"

    @property
    def verdict(self) -> Verdict:
        return Verdict.IGNORE if self in _BLAMELESS else Verdict.REJECT

    @property
    def remedy(self) -> str:
        """The operator's remedy if this happens often; empty if there is none."""
        return _REMEDIES.get(self, "")


_BLAMELESS = frozenset(
    {Reason.STALE, Reason.OLD, Reason.DUPLICATE, Reason.OVER_QUOTA, Reason.OWN_ECHO, Reason.WRONG_VERSION}
    # The frame may be good, so `p2p.admission.reputation` charges the peer instead of GossipSub.
    | {Reason.FLOODING, Reason.SHUNNED}
    | {Reason.USELESS}  # costs only quota: other nodes may learn from it
    | {Reason.UNKNOWN_KIND}  # a later version may use it
    | {Reason.BACKLOG}  # other nodes may be quicker
)
_REMEDIES = {
    Reason.WRONG_VERSION: "a peer runs another version of swarmd: update the older of the two",
    Reason.STALE: "a peer's clock or yours is wrong, or this machine slept: set your clock by NTP",
    Reason.OVER_QUOTA: "nothing to do: a peer sends more than a node needs, and the rest is dropped",
    Reason.FLOODING: "nothing to do: such peers are banned for a while, each time for longer",
    Reason.SHUNNED: "wait: a peer's frames are accepted again after a while without offences",
    Reason.UNKNOWN_KIND: "update swarmd if most peers run a later version",
    Reason.OWN_ECHO: "if there are many, another node may use a copy of your key: give each node its own key",
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """A frame whose form, signature, time and quota hold."""

    author: PeerId
    sequence: int  # the author's own counter; never repeats for one key
    sent_at: float  # seconds since the epoch, by the author's clock
    kind: str
    body: bytes
    via: PeerId | None = None  # the peer that handed it to us; None if the engine does not know
    group: str = ""  # the author's network group (`p2p.netgroup`); empty if we never met the author


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer we are connected to, as `swarmd peers` shows it."""

    id: PeerId
    address: str
    direction: str  # "inbound" or "outbound"
    connected_at: float


# Called for every frame that arrives, with the peer that handed it over, or None if the engine does not know.
# An engine that can wait for the verdict calls it before it forwards the frame. Must be quick.
Deliver = Callable[[bytes, PeerId | None], Verdict]
Score = Callable[[PeerId], float]  # our score of a peer: 0 if it is clean, below 0 if it misbehaved
# Answers a peer's question of at most MAX_QUESTION_BYTES. Must be quick.
Answer = Callable[[PeerId, bytes], bytes]
MAX_QUESTION_BYTES = 4096
# `P2pEngine.request`: takes the peer, the question and the largest answer in bytes.
Ask = Callable[[PeerId, bytes, int], Awaitable[bytes]]


class PeerRequest(IntEnum):
    """The kinds of questions that members ask each other: a question's first byte.

    To add a kind, add a line here and its handler to `Member.answers`. Never reuse a number; 2, 4 and 5 are
    retired.
    """

    BLOBS = 1  # `p2p.blobs.blobs`
    DIAL_BACK = 3  # `p2p.peers.dial_back`
    TWINS = 6  # `p2p.peers.twins`
    USED = 7  # `swarmd.exchange.acknowledgements`
    INTRODUCTION = 8  # `p2p.peers.introduction`

    def message(self, content: bytes = b"") -> bytes:
        return bytes([self]) + content

    def content(self, message: bytes) -> bytes | None:
        """Return the message without its first byte; None if it is empty or of another kind."""
        return message[1:] if message[:1] == bytes([self]) else None


@dataclass(frozen=True, slots=True)
class Handlers:
    """The functions that an engine calls.

    also: topics of other swarms that the engine also joins, on a node that only helps nodes to meet. The
        engine treats their members like our swarm's, announces itself to them, and forwards admitted frames.
    """

    deliver: Deliver
    answer: Answer
    score: Score = lambda _: 0.0
    also: Mapping[Topic, Deliver] = field(default_factory=dict)


class Unanswered(Exception):
    """A peer could not be asked, hung up, or sent too much. This is normal; the message is for the log."""


class Started(Protocol):
    """The `task_status` argument that `trio.Nursery.start` passes to a task.

    trio has this type, but its stubs do not export it.
    """

    def started(self, value: Sequence[str]) -> None: ...


class P2pEngine(Protocol):
    """Moves frames between the members of one swarm.

    An engine is built with `Handlers`. All engines pass the same contract tests.
    """

    me: PeerId

    async def run(self, task_status: Started = ...) -> None:
        """Stay in the swarm until cancelled (trio).

        Reports its addresses once other nodes can reach it; until then it may raise OperatorError.
        """

    def publish(self, frame: bytes) -> None:
        """Queue a frame for sending and return at once.

        The queue is bounded: the oldest waiting frame is dropped.
        """

    async def request(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        """Ask a peer and return its answer of at most `limit` bytes; empty if the peer has no answer.

        Dials the peer if it is not connected, and never ends a connection. There is no timeout: the caller
        cancels. Raises Unanswered.
        """

    def shut_out(self, peer: PeerId, seconds: float) -> None:
        """Ban the peer: hang up soon, and neither dial nor accept it meanwhile. Return at once."""

    def heard_nearby(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Note a member that was announced on our local network at these addresses. Return at once."""

    def told_of(self, peer: PeerId, address: str) -> None:
        """Note an address of a peer from a frame that the peer signed. Return at once."""

    def reached_at(self) -> str:
        """Return a multiaddress at which the internet can reach this member; empty if none is known.

        It may lead through a relay. By default none is known.
        """
        return ""

    def peers(self) -> Sequence[Peer]: ...

    def connected(self) -> Collection[PeerId]:
        """Return all peers we are connected to, in our swarm or not."""

    def present(self, topic: Topic) -> int:
        """Count the connected peers in a topic that we are in."""

    def addresses(self) -> Sequence[str]:
        """Return the multiaddresses at which peers can dial this member, each ending in /p2p/<peer id>."""
