"""Data that the parts of the judge exchange: requests, questions and evaluations."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from p2p.netgroup import block_of_host
from p2p.types import PeerId
from swarmd.tasks import held_out
from swarmd.tasks.answers import ScoredAnswer
from swarmd.types import Completion, Task, TaskRef


@dataclass(frozen=True, slots=True)
class Signed:
    """Sender and sequence number of a signed request."""

    peer: PeerId
    sequence: int


@dataclass(frozen=True, slots=True)
class Attributes:
    round: int  # the peer's own round
    model: str
    name: str | None = None  # the node's name, for people
    sharing: str | None = None  # "swarm" or "solo"
    local: int | None = None  # I, the node's own rollouts in a batch
    external: int | None = None  # J, rollouts of other nodes in a batch
    strategy: str | None = None  # how it samples and weighs other nodes' rollouts
    version: str | None = None  # version of swarmd
    hardware: str | None = None  # "cpu", "cuda", "mps" or "other"

    def said(self) -> dict[str, Any]:
        """Return the attributes that the peer stated."""
        return {name: value for name in ATTRIBUTES if (value := getattr(self, name)) is not None}


ATTRIBUTES = tuple(each.name for each in fields(Attributes))
UNNAMED = Attributes(0, "unnamed")


@dataclass(frozen=True, slots=True)
class Requester:
    """The requesting peer's address and record, on which its limits depend."""

    host: str  # its address
    record: bool  # whether it has answered enough questions to be listed

    @property
    def room(self) -> tuple[str, bool]:
        """Its network and record; peers that have both in common share one limit."""
        return network_of(self.host), self.record


@dataclass(frozen=True, slots=True)
class QuestionWindow:
    terms: held_out.Terms
    seed: bytes
    published: float  # seconds since 1970, by the judge's clock
    opened: float | None = None
    revealed: float | None = None

    @property
    def number(self) -> int:
        return self.terms.number

    @property
    def commitment(self) -> str:
        return held_out.commitment(self.terms, self.seed)

    def document(self) -> dict[str, Any]:
        """Return the public form of the window; it has the seed only once that is revealed."""
        return {
            "number": self.number,
            "opens": self.terms.opens,
            "closes": self.terms.closes,
            "questions": self.terms.questions,
            "commitment": self.commitment,
            "published": self.published,
            "opened": self.opened,
            "revealed": self.revealed,
            "seed": None if self.revealed is None else self.seed.hex(),
        }


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    id: str  # 32 hex digits, unguessable
    peer: PeerId
    task: Task
    asked: float  # monotonic seconds
    deadline: float  # monotonic seconds
    asker: Requester
    window: QuestionWindow
    place: int  # the question's place in the peer's order of the window
    attributes: Attributes = UNNAMED
    answers: int = 1  # number of answers asked for


@dataclass(frozen=True, slots=True)
class GradedEvaluation:
    """An evaluation with everything that its receipt contains.

    The database returns it unchanged, so the same receipt can be made again.
    """

    id: str
    peer: str
    attributes: Attributes
    ref: TaskRef
    window: QuestionWindow
    place: int
    number: int
    at: float
    answers: Sequence[Completion]
    scores: Sequence[ScoredAnswer]


def network_of(host: str) -> str:
    """Return the network that one machine's owner gets cheaply: /24 of IPv4, /48 of IPv6.

    Text that is not the address of a peer is treated as a network.
    """
    return block_of_host(host) or host
