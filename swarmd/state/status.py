"""The node's status as one struct: every display of a node, for people or programs, derives from it. Pure.

A node is in one of these states; NEXT lists the allowed transitions. The trainer reports the first four
states; the daemon sets the other ones.

    STARTING  TRAINING  WAITING  PAUSED   →  each other; STUCK and back
    any of these                          →  RESTARTING  →  STARTING
    any of these                          →  STOPPING  →  STOPPED

Every state but TRAINING has a cause and a remedy.
"""

from enum import StrEnum
from typing import Final

import msgspec

from p2p.types import PeerId
from swarmd.types import RoundLine, ShownRollout


class NodeState(StrEnum):
    STARTING = "starting"
    TRAINING = "training"
    WAITING = "waiting"  # for other nodes' rollouts, as this node asks no questions itself
    PAUSED = "paused"
    STUCK = "stuck"  # the trainer is silent, or ends no round
    RESTARTING = "restarting"  # the trainer died
    STOPPING = "stopping"
    STOPPED = "stopped"
    HELPING = "helping"  # a bootstrap node, which trains nothing
    JOINED = "joined"  # a program that has joined a swarm
    LEFT = "left"


_RUNS: Final = frozenset(NodeState) - {NodeState.HELPING, NodeState.JOINED, NodeState.LEFT}
_ENDS: Final = frozenset((NodeState.STOPPING, NodeState.STOPPED))
NEXT: Final = {
    NodeState.STARTING: _RUNS,
    NodeState.TRAINING: _RUNS,
    NodeState.WAITING: _RUNS,
    NodeState.PAUSED: _RUNS,
    NodeState.STUCK: _RUNS,
    # The last message of a dead trainer may arrive late.
    NodeState.RESTARTING: _ENDS | {NodeState.STARTING, NodeState.STUCK, NodeState.RESTARTING},
    # A trainer that finishes its last round still reports TRAINING, so STOPPING has no way back.
    NodeState.STOPPING: _ENDS,
    NodeState.STOPPED: frozenset(),
    NodeState.HELPING: frozenset(),
    NodeState.JOINED: frozenset((NodeState.LEFT,)),
    NodeState.LEFT: frozenset(),
}


class Trouble(msgspec.Struct, frozen=True):
    """A problem: its cause and its remedy."""

    cause: str
    remedy: str


class PauseCause(msgspec.Struct, frozen=True):
    """Why the node pauses (or leaves the swarm).

    until: seconds since the epoch; None if unknown. ends: the same in words.
    """

    kind: str  # user, battery, load, gpu, hours, metered, month
    cause: str
    until: float | None
    ends: str
    remedy: str

    @property
    def sentence(self) -> str:
        return f"{self.cause}; it goes on {self.ends}"


class SwarmLabel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A swarm's labels; a bootstrap node is in the swarm of each curriculum."""

    name: str = ""
    digest: str = ""
    topic: str = ""
    curricula: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()


class ModelDescription(msgspec.Struct, frozen=True):
    """The model that is trained; until it is loaded only its name is known."""

    model: str = ""
    revision: str | None = None
    device: str = ""
    dtype: str = ""
    parameters: int | None = None
    lora: int | None = None  # rank
    # Maximum number of tokens of an answer, and of a question with its answer.
    new_tokens: int | None = None
    context: int | None = None
    # Example turns before each question, and the text with which each answer begins.
    examples: int = 0
    opening: str = ""
    keeps_first: bool | None = None  # whether the first weights are kept, to answer with


class ExchangeFigures(msgspec.Struct, frozen=True):
    """Rollouts on offer now, authors set aside now, and counts since the start."""

    on_offer: int = 0
    fetched: int = 0
    missed: int = 0
    set_aside: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class SharedRollouts(msgspec.Struct, frozen=True):
    """Rollouts sent or offered since the start, how often other nodes used them, and how many nodes did."""

    rollouts: int = 0
    used: int = 0
    by: int = 0


class StageProgress(msgspec.Struct, frozen=True):
    """The progress of a long round."""

    stage: str  # of `types.STAGES`
    done: int  # answers that have been through the stage
    of: int  # answers; 0: not counted
    left: float | None  # seconds until the round ends, estimated


class MeasuredKl(msgspec.Struct, frozen=True):
    """The last measured KL from the first weights, and its round: not every update measures it."""

    round: int
    value: float


class JudgeStatus(msgspec.Struct, frozen=True):
    """The judge's last score of the node, and why there is no newer one."""

    url: str = ""
    score: float | None = None
    interval: tuple[float, float] | None = None
    n: int = 0  # questions graded
    cause: str = ""
    remedy: str = ""
    asked_again_in: float = 0.0  # seconds
    earlier: bool = False  # whether the score is from before this start


class TrainerFigures(msgspec.Struct, frozen=True):
    pid: int | None = None
    restarts: int = 0
    verifier_pid: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Resource usage over some time. None: the figure cannot be read on this machine."""

    cpu_seconds: float = 0.0  # CPU time of all processes of the node
    energy_wh: float | None = None  # an estimate (docs/guest.md)
    bytes_up: int = 0  # bytes of the swarm's connections
    bytes_down: int = 0
    bytes_written: int | None = None  # to disk
    helped: int = 0  # times that another node reported training on one of our rollouts

    def plus(self, other: "Usage") -> "Usage":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Usage(*(b if a is None else a if b is None else a + b for a, b in pairs))

    @property
    def bytes_moved(self) -> int:
        return self.bytes_up + self.bytes_down


class UsageRow(Usage, frozen=True):
    """The usage of a day or a month, or since a moment."""

    day: str | msgspec.UnsetType = msgspec.UNSET
    month: str | msgspec.UnsetType = msgspec.UNSET
    since: float | msgspec.UnsetType = msgspec.UNSET  # seconds since the epoch


class TrafficBudget(msgspec.Struct, frozen=True):
    """The monthly limit of bytes, up and down together, and the bytes of this month so far."""

    bytes: int
    used: int


class UsageReport(msgspec.Struct, frozen=True):
    """Usage of today, of this month, in total, and of each kept day, oldest first."""

    today: UsageRow
    month: UsageRow
    total: UsageRow
    days: list[UsageRow] = []
    budget: TrafficBudget | None = None


class SwarmPart(msgspec.Struct):
    """The part of a status that the swarm's member provides."""

    peer_id: str = ""
    name: str = ""
    swarm: SwarmLabel = SwarmLabel()
    engine: str = ""
    peers: int = 0  # peers heard, connected or not; every display of a number of peers uses this
    connected: int = 0
    addresses: list[str] = []  # the most widely reachable first
    rejected: dict[str, int] = {}  # frames by reason
    advice: dict[str, str] = {}  # what to do, by reason
    exchange: ExchangeFigures = ExchangeFigures()
    offers: dict[str, float | None] = {}  # every: mean seconds between two offers; None: the pace is free
    shared: SharedRollouts = SharedRollouts()
    trouble: Trouble | None = None  # why no peer is heard


class Status(SwarmPart):
    """The status of a node, of a bootstrap node or of a program in a swarm.

    None: the role has no such figure, or has none yet.
    """

    schema: int = 1
    role: str = "node"  # bootstrap, library
    state: NodeState = NodeState.STARTING
    cause: str = ""
    remedy: str = ""
    since: float | None = None  # seconds since the epoch: when state or cause changed
    pid: int | None = None
    started_at: float | None = None
    state_dir: str = ""
    model: ModelDescription = ModelDescription()
    round: int = 0
    rounds: int | None = None  # the last round to run
    saved: int = 0  # rounds in a checkpoint; kill -9 loses later ones
    last: RoundLine | None = None  # the newest round of this start
    # Of each of the last rounds: the mean reward, and rollouts of other nodes in the batch.
    rewards: list[float | None] = []
    external: list[int] = []
    kl: MeasuredKl | None = None
    progress: StageProgress | None = None
    learning: Trouble | None = None  # why nothing is learnt
    pauses: list[PauseCause] = []
    away: list[PauseCause] = []  # why it has left the swarm
    usage: UsageReport | None = None
    left: float | None = None  # share of a core that other programs leave to the node
    limits: dict[str, str | float | list[str]] = {}  # by key of the configuration
    judge: JudgeStatus | None = None
    trainer: TrainerFigures = TrainerFigures()
    relay: str | None = None  # a bootstrap node's limit on relayed traffic, in words
    # Of a program: rollouts that are not sent yet, and connected peers of its swarm.
    waiting: int | None = None
    present: int | None = None


class KnownPeer(msgspec.Struct):
    """A connected peer, or one whose rollouts arrive through other nodes: "relayed"."""

    id: PeerId
    name: str
    address: str | None
    direction: str
    connected_at: float | None  # seconds since the epoch
    heard_at: float | None = None
    frames: int = 0
    rejected: int = 0
    round: int | None = None  # its own, as it says
    model: str | None = None
    learnt: dict[str, int] = {}  # rollouts that this node trained on, by specialty
    score: float | None = None  # p2p.admission.reputation


class PeerList(msgspec.Struct):
    peers: list[KnownPeer]
    schema: int = 1


class AnswerList(msgspec.Struct):
    answers: list[ShownRollout]
    schema: int = 1
