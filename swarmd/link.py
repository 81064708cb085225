"""The socket pair between daemon and trainer: length-prefixed msgpack, one type per kind of message.

Theory of operation. Neither side ever waits for the other. Each keeps a bounded outgoing queue; if it is
full, the oldest rollouts are dropped (there will be fresher experience), but never a message about state. The
trainer's end is a `protocols.Swarm`, like a node in virtual time (`swarmd.exchange.virtual`). Rollouts cross
decoded: their wire bytes stay in the daemon. End of file means that the other process is gone: the daemon
restarts the trainer; a trainer without its daemon ends at once, which is safe because checkpoints are atomic.
"""

from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

from swarmd.exchange.events import Deliver, Share, Useless
from swarmd.state.status import ModelDescription, NodeState, StageProgress
from swarmd.types import PassRates, RoundLine, ShownRollout

# Both ends are part of swarmd, so a larger message is a bug.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
# The trainer sends a heartbeat if it has sent nothing else for this many seconds.
HEARTBEAT_S = 2.0
# Maximum number of queued rollouts in each direction.
MAX_WAITING_ROLLOUTS = 1024
# Size of the length before each message.
_HEADER_BYTES = 4


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# Daemon to trainer.


class StartTrainer(_Message, frozen=True):
    """The first message: everything that a trainer needs to start."""

    config: str  # NodeConfig as JSON
    state_dir: str
    peer_id: str
    seed: int
    curriculum: str = ""  # digest of the curriculum of the daemon's swarm; "": not checked


class SwarmNews(_Message, frozen=True):
    """The number of known peers, and the frames rejected since the last message, by reason."""

    peers: int
    refused: dict[str, int]


class JudgeQuestion(_Message, frozen=True):
    """A judge's question, to be answered once, greedily, between two rounds.

    turns: this node's texts so far, each with the environment's reply; the next text is asked for.
    """

    id: str
    text: str
    turns: tuple[tuple[str, str], ...] = ()


class CompareRequest(_Message, frozen=True):
    """Answer a question between two rounds, with the current and with the initial weights."""


class JudgeScore(_Message, frozen=True):
    score: float  # pass@1 so far
    n: int


class Pause(_Message, frozen=True):
    """Stop between two tokens or micro-batches, until Resume."""

    cause: str = "you paused it"
    remedy: str = "swarmd resume"
    # A short pause to keep to the CPU share; it is not reported as a state, and nothing is saved for it.
    brief: bool = False


class Resume(_Message, frozen=True):
    pass


class Stop(_Message, frozen=True):
    now: bool = False  # interrupt the round, instead of finishing it


# Trainer to daemon.


class TrainerState(_Message, frozen=True):
    """The trainer's state. Every state except "training" has a cause and a remedy."""

    state: NodeState
    cause: str = ""
    remedy: str = ""


class Alive(_Message, frozen=True):
    """Heartbeat of the writing thread: the process runs, even if its loop is busy."""


class TrainerReady(_Message, frozen=True):
    """The model is loaded and the run resumed after `round` finished rounds."""

    model: ModelDescription
    round: int
    notes: list[str]


class RoundDone(_Message, frozen=True):
    line: RoundLine
    verifier_pid: int | None
    saved: int = 0  # rounds in the newest checkpoint
    # Whether the limit allows a checkpoint now, which an answer to the judge needs.
    affordable: bool = True
    # Author and specialty of each external rollout that was trained on for the first time.
    used: tuple[tuple[str, str], ...] = ()
    pass_rates: PassRates = {}  # the daemon chooses offers by them
    shown: ShownRollout | None = None  # one of this node's own rollouts


class RoundGoesOn(_Message, frozen=True):
    """Progress of a long round, at most once a second."""

    progress: StageProgress


class Note(_Message, frozen=True):
    """A message for the operator."""

    text: str


class JudgeAnswer(_Message, frozen=True):
    id: str
    text: str
    ended: bool


class ComparedAnswers(_Message, frozen=True):
    """The answer to a CompareRequest. Each of the two is a text and its reward."""

    question: str
    round: int
    now: tuple[str, float]
    first: tuple[str, float]


class TrainerFailed(_Message, frozen=True):
    """The trainer cannot continue, and a restart would not help."""

    message: str
    exit_code: int


class Stopped(_Message, frozen=True):
    round: int


ToTrainer = (
    StartTrainer | Deliver | SwarmNews | JudgeQuestion | CompareRequest | JudgeScore | Pause | Resume | Stop
)
ToDaemon = (
    Share
    | Useless
    | TrainerState
    | Alive
    | TrainerReady
    | RoundDone
    | RoundGoesOn
    | Note
    | JudgeAnswer
    | ComparedAnswers
    | TrainerFailed
    | Stopped
)


def pack(message: ToTrainer | ToDaemon) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(_HEADER_BYTES) + payload


M = TypeVar("M")


class Unpacker(Generic[M]):
    """Turns bytes into messages of a kind: ToTrainer or ToDaemon. Pure."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        self._buffer += data
        messages: list[M] = []
        while len(self._buffer) >= _HEADER_BYTES:
            if (length := int.from_bytes(self._buffer[:_HEADER_BYTES])) > MAX_MESSAGE_BYTES:
                raise ValueError(
                    f"message on the link too large: {length:,} bytes (limit {MAX_MESSAGE_BYTES:,})"
                )
            if len(self._buffer) < (end := _HEADER_BYTES + length):
                break
            messages.append(self._decoder.decode(bytes(self._buffer[_HEADER_BYTES:end])))
            del self._buffer[:end]
        return messages


class MessageQueue:
    """Messages waiting to be written, oldest first. Pure.

    Rollouts are bounded, and the oldest are dropped; other messages are few and always kept.
    """

    def __init__(self, rollouts: int = MAX_WAITING_ROLLOUTS) -> None:
        self._words: deque[ToTrainer | ToDaemon] = deque()
        self._rollouts: deque[ToTrainer | ToDaemon] = deque(maxlen=rollouts)

    def put(self, message: ToTrainer | ToDaemon) -> None:
        (self._rollouts if isinstance(message, Share | Deliver) else self._words).append(message)

    def pop(self) -> ToTrainer | ToDaemon | None:
        """Return the next message, or None; rollouts come last, so that a flood cannot delay a stop."""
        waiting = self._words or self._rollouts
        return waiting.popleft() if waiting else None

    def __len__(self) -> int:
        return len(self._words) + len(self._rollouts)
