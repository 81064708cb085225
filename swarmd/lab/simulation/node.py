"""One simulated node: the daemon's pure parts (inbox, shards, offers, board) and its blobs."""

import random
from dataclasses import dataclass, field
from functools import lru_cache

from p2p.admission.inbox import Inbox
from p2p.admission.reputation import Reputation
from p2p.blobs.blobs import content_id
from p2p.blobs.providers import Providers
from p2p.envelope import Frame, check, seal
from p2p.identity import Identity
from p2p.shards.shards import Placement, Shards
from p2p.types import Envelope, PeerId, Rejected
from swarmd.exchange import offers
from swarmd.exchange.offers import Board, Offered
from swarmd.types import Completion, Rollout, TaskRef

EPOCH = 1_700_000_000.0  # seconds since 1970 at which virtual time begins
KEPT_ROUNDS = 2  # round.max_age
COMPLETIONS = 8
SPECIALTY = "basic_arithmetic"
SPECIALTIES = (SPECIALTY,)
UNPLACED = Placement(None, frozenset())


@lru_cache(maxsize=1 << 16)
def check_once(parsed: Frame, frame: bytes) -> Envelope | Rejected:
    """`envelope.check`, whose answer depends on the frame alone: of the many nodes that get one, the first does the work for all."""
    return check(parsed, frame)


@lru_cache(maxsize=1 << 15)
def offered_in(envelope: Envelope) -> tuple[Offered, ...]:
    found = offers.decode(envelope, SPECIALTIES)
    if not isinstance(found, tuple):
        raise TypeError(f"our own offer was refused: {found}")
    return found


@dataclass(slots=True)
class Round:
    """Counters of one round's rollouts."""

    wanted: int
    missing: int
    held: int = 0
    lost: int = 0  # chosen, and nobody was found who has it


@dataclass(slots=True)
class SimulatedNode:
    number: int
    identity: Identity
    swarm_id: bytes
    rng: random.Random
    shards: Shards
    inbox: Inbox
    board: Board
    held: dict[bytes, int] = field(default_factory=dict)  # blob -> the round in which it came here
    came: dict[bytes, tuple[float, float, int]] = field(default_factory=dict)  # blob on offer -> sealed, arrived, via
    providers: Providers = field(default_factory=Providers)
    reputation: Reputation = field(default_factory=Reputation)
    visits: dict[int, float] = field(default_factory=dict)  # connections made to ask, and when they were last of use
    placement: Placement = UNPLACED
    sequence: int = 0
    round: int = 0
    life: int = 0  # counts its starts, so that events of an earlier start are dropped
    gathering: Round | None = None
    lie: bytes | None = None  # what it says of the swarm's size, whatever it knows; such a node has no rounds
    waiting: bytes | None = None  # an offer that is to be published once it is known where

    @property
    def name(self) -> PeerId:
        return self.identity.peer_id

    def seal(self, kind: str, body: bytes, now: float) -> bytes:
        self.sequence += 1
        return seal(self.identity, self.swarm_id, self.sequence, EPOCH + now, kind, body)

    def produce(self, text: str, rollouts: int, size: int) -> tuple[bytes, list[bytes]]:
        """The offer of one round and its blobs' ids: rollouts of so many completions, `size` characters of text each."""
        made: list[Rollout] = []
        length = size // COMPLETIONS
        for _ in range(rollouts):
            starts = [self.rng.randrange(len(text) - length) for _ in range(COMPLETIONS)]
            ref = TaskRef(SPECIALTY, self.rng.randrange(900_000_000))
            made.append(Rollout(ref, tuple(Completion(text[at : at + length], True) for at in starts), self.name))
        bodies, blobs = offers.encode(made, self.round, "tiny", SPECIALTIES)
        if len(bodies) != 1:
            raise ValueError(f"a set of {rollouts} rollouts makes {len(bodies)} offers; the simulation knows sets of one")
        return bodies[0], [content_id(blob) for blob in blobs]

    def forget(self) -> None:
        """Blobs too old for anybody's pool, and offers that are off the board."""
        old = self.round - KEPT_ROUNDS - 1
        for blob in [blob for blob, since in self.held.items() if since < old]:
            del self.held[blob]
        here = {item.id for item in self.board}
        for blob in [blob for blob in self.came if blob not in here]:
            del self.came[blob]


def build(number: int, rng: random.Random, swarm_id: bytes, now: float, authors: float | None, shards: int) -> SimulatedNode:
    identity = Identity.from_seed(rng.randbytes(32))
    own = random.Random(rng.getrandbits(64))
    inbox = Inbox(identity.peer_id, swarm_id, verify=check_once)
    return SimulatedNode(number, identity, swarm_id, own, Shards(own, now, authors=authors, shards=shards), inbox, new_board())


def new_board() -> Board:
    return Board(lambda _: True, kept_rounds=KEPT_ROUNDS)
