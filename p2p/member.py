"""This node in one swarm: its identity, its inbox, its engine and its own sequence numbers, as one Transport."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256

from p2p.envelope import seal
from p2p.identity import Identity
from p2p.inbox import Inbox, Limits
from p2p.topic import Topic
from p2p.types import Deliver, Engine, Envelope, Peer, PeerId, Reason, Rejected, Started, Verdict

QUEUE_FRAMES = 1024  # admitted and not yet drained
QUEUE_BYTES = 32 * 1024 * 1024
_KEPT_BYTES = 16 * 1024 * 1024  # of recent bodies, for `fetch`
_REPORT_CHARGE = 20.0  # frames of quota that one report costs its author


class Member:
    """Implements `Transport`. `build_engine` is called once with what the engine must deliver to; `run` is the engine's life."""

    def __init__(
        self,
        identity: Identity,
        topic: Topic,
        build_engine: Callable[[Deliver], Engine],
        *,
        sequence: Iterator[int],
        clock: Callable[[], float],
        limits: Limits | None = None,
    ) -> None:
        self.identity = identity
        self.topic = topic
        self.inbox = Inbox(identity.peer_id, topic.swarm_id, limits, not_before=clock())
        self.reports: Counter[Reason] = Counter()
        self._told: Counter[Reason] = Counter()  # refusals already given by `refused`
        self.dropped = 0  # admitted, and gone before anyone drained them
        self._sequence = sequence
        self._clock = clock
        self._queue: deque[Envelope] = deque()
        self._queue_bytes = 0
        self._bodies: OrderedDict[bytes, bytes] = OrderedDict()
        self._bodies_bytes = 0
        self.engine = build_engine(self.deliver)

    @property
    def rejected(self) -> Counter[Reason]:
        """How many frames were refused for which reason, the trainer's reports included, since the start."""
        return self.inbox.counts + self.reports

    async def run(self, task_status: Started | None = None) -> None:
        """Be in the swarm until cancelled (trio). With `nursery.start`, returns the addresses once others can reach us."""
        await self.engine.run(task_status)

    def peers(self) -> Sequence[Peer]:
        return self.engine.peers()

    def addresses(self) -> Sequence[str]:
        return self.engine.addresses()

    def deliver(self, frame: bytes) -> Verdict:
        """Called by the engine for every frame that arrives. Quick: no I/O, no waiting."""
        outcome = self.inbox.receive(frame, self._clock())
        if isinstance(outcome, Rejected):
            return outcome.reason.verdict
        self._keep(outcome.body)
        self._queue.append(outcome)
        self._queue_bytes += len(outcome.body)
        while len(self._queue) > QUEUE_FRAMES or self._queue_bytes > QUEUE_BYTES:
            self._queue_bytes -= len(self._queue.popleft().body)
            self.dropped += 1
        return Verdict.ACCEPT

    def publish(self, kind: str, body: bytes) -> None:
        """Seal and send. Raises ValueError where no receiver would admit it (body over `envelope.MAX_BODY`, kind no word)."""
        frame = seal(self.identity, self.topic.swarm_id, next(self._sequence), self._clock(), kind, body)
        self._keep(body)
        self.engine.publish(frame)

    def received(self) -> Sequence[Envelope]:
        envelopes = list(self._queue)
        self._queue.clear()
        self._queue_bytes = 0
        return envelopes

    def fetch(self, content_id: bytes) -> bytes | None:
        """The body with this SHA-256, if it came or went lately; nothing is asked of others yet."""
        return self._bodies.get(content_id)

    def report(self, author: PeerId, reason: Reason) -> None:
        self.reports[reason] += 1
        self.inbox.charge(author, _REPORT_CHARGE, self._clock())

    def refused(self) -> Mapping[Reason, int]:
        refused = self.inbox.counts - self._told
        self._told = Counter(self.inbox.counts)
        return refused

    def _keep(self, body: bytes) -> None:
        content_id = sha256(body).digest()
        if content_id in self._bodies:
            self._bodies.move_to_end(content_id)
            return
        self._bodies[content_id] = body
        self._bodies_bytes += len(body)
        while self._bodies_bytes > _KEPT_BYTES:
            self._bodies_bytes -= len(self._bodies.popitem(last=False)[1])
