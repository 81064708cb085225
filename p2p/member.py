"""This node in one swarm: its identity, its inbox, its engine, its blobs and its own sequence numbers, as one Transport."""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from p2p.blobs import BlobStore
from p2p.envelope import seal
from p2p.fetching import FETCH, Fetcher, Server, Want
from p2p.identity import Identity
from p2p.inbox import Inbox, Limits
from p2p.reachability import DIAL_BACK, DialBack
from p2p.topic import Topic
from p2p.types import Answer, Engine, Envelope, Handlers, Peer, PeerId, Reason, Rejected, Started, Verdict

QUEUE_FRAMES = 1024  # admitted and not yet drained
QUEUE_BYTES = 32 * 1024 * 1024
_REPORT_CHARGE = 20.0  # frames of quota that one report costs its author


class Member:
    """Implements `Transport`. `build_engine` is called once with what the engine must call; `run` is the engine's life.

    admitted: called whenever `received` has something new.
    """

    def __init__(
        self,
        identity: Identity,
        topic: Topic,
        build_engine: Callable[[Handlers], Engine],
        *,
        sequence: Iterator[int],
        clock: Callable[[], float],
        limits: Limits | None = None,
        admitted: Callable[[], None] = lambda: None,
    ) -> None:
        self.identity = identity
        self.topic = topic
        self.inbox = Inbox(identity.peer_id, topic.swarm_id, limits, not_before=clock())
        self.reports: Counter[Reason] = Counter()
        self._told: Counter[Reason] = Counter()  # refusals already given by `refused`
        self.dropped = 0  # admitted, and gone before anyone drained them
        self._sequence = sequence
        self._clock = clock
        self._admitted = admitted
        self._queue: deque[Envelope] = deque()
        self._queue_bytes = 0
        self.blobs = BlobStore()
        self.server = Server(self.blobs, clock)
        self.dial_back = DialBack(self.peers, clock)  # its `run` is for whoever runs this member
        self.answers: dict[int, Answer] = {FETCH: self.server, DIAL_BACK: self.dial_back}  # by a question's first byte
        self.engine = build_engine(Handlers(self.deliver, self.answer))
        self.fetcher = Fetcher(self.engine.request, self.blobs, self.report)

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

    def deliver(self, frame: bytes, via: PeerId | None) -> Verdict:
        """Called by the engine for every frame that arrives. Quick: no I/O, no waiting."""
        outcome = self.inbox.receive(frame, self._clock())
        if isinstance(outcome, Rejected):
            return outcome.reason.verdict
        self._queue.append(dataclasses.replace(outcome, via=via))
        self._queue_bytes += len(outcome.body)
        while len(self._queue) > QUEUE_FRAMES or self._queue_bytes > QUEUE_BYTES:
            self._queue_bytes -= len(self._queue.popleft().body)
            self.dropped += 1
        self._admitted()
        return Verdict.ACCEPT

    def answer(self, peer: PeerId, question: bytes) -> bytes:
        """Called by the engine for every question; empty for one that nobody here knows."""
        known = self.answers.get(question[0]) if question else None
        return known(peer, question) if known is not None else b""

    def publish(self, kind: str, body: bytes) -> None:
        """Seal and send. Raises ValueError where no receiver would admit it (body over `envelope.MAX_BODY`, kind no word)."""
        self.engine.publish(seal(self.identity, self.topic.swarm_id, next(self._sequence), self._clock(), kind, body))

    def received(self) -> Sequence[Envelope]:
        envelopes = list(self._queue)
        self._queue.clear()
        self._queue_bytes = 0
        return envelopes

    def hold(self, blob: bytes) -> None:
        self.blobs.put(blob)

    async def fetch(self, want: Want) -> bytes | None:
        """The blob, from the holders that the want names or else from any member that we are connected to. Cancel it at your deadline."""
        others = [peer.id for peer in self.peers()]
        return await self.fetcher.fetch(dataclasses.replace(want, holders=[*want.holders, *others]))

    def report(self, author: PeerId, reason: Reason) -> None:
        self.reports[reason] += 1
        self.inbox.charge(author, _REPORT_CHARGE, self._clock())

    def refused(self) -> Mapping[Reason, int]:
        refused = self.inbox.counts - self._told
        self._told = Counter(self.inbox.counts)
        return refused
