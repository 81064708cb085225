"""This node as a member of one swarm: joins identity, inbox, engine, blobs and sequence numbers."""

import dataclasses
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import trio

from p2p.address import parse_endpoint
from p2p.admission.inbox import Inbox
from p2p.admission.reputation import Reputation
from p2p.admission.seen_file import SeenFile
from p2p.blobs.blobs import BlobStore
from p2p.envelope import seal
from p2p.errors import OperatorError
from p2p.identity import Identity
from p2p.netgroup import share_group_of_host
from p2p.peers.dial_back import DialBack
from p2p.peers.introduction import ask_each
from p2p.peers.twins import MAX_CARD_BYTES, NOTHING, TwinCards, TwinSession
from p2p.topic import Topic
from p2p.types import (
    Answer,
    Envelope,
    Handlers,
    P2pEngine,
    Peer,
    PeerId,
    PeerRequest,
    Reason,
    Started,
    Verdict,
)

# Seconds between two readings of the network groups of connected peers.
NOTE_PEERS_EVERY_S = 10.0
# Seconds between two searches for another node with our key.
TWINS_EVERY_S = 5.0
# Seconds between two attempts to return to the swarm.
RETURN_EVERY_S = 5.0
# Seconds that we stay out of the swarm when another node with our key started before us.
AWAY_S = 30.0
# All connections whose network group is not noted yet count as one group, so that a peer gains no room in the
# inbox by dialling us again and again.
NOT_NOTED = "not noted yet"
# Frames that one report takes off its author's quota: the quota of one second.
_REPORT_CHARGE = 5.0

log = logging.getLogger(__name__)


class _FirstStart:
    """Passes on the engine's first `started` call and drops later ones.

    The engine starts again whenever the member returns to the swarm.
    """

    def __init__(self, task_status: Started) -> None:
        self._task_status = task_status

    def started(self, value: Sequence[str]) -> None:
        task_status, self._task_status = self._task_status, trio.TASK_STATUS_IGNORED
        task_status.started(value)


class Member:
    """One member of a swarm, on top of a p2p engine.

    Args:
        build_engine: builds the engine from its handlers. Called once; `run` runs the engine.
        sequence: numbers for our frames, rising over restarts.
        clock: returns seconds since the epoch.
        admitted: called with each admitted envelope of a kind that this version can use.
        folder: state folder for the file that protects from replays after a restart.
        knows: whether this version can use a kind. Frames of other kinds are counted and forwarded.
        also: other swarms whose members this node helps to meet. Each has a separate inbox; its frames are
            received and forwarded, too. A node with `also` does not train.
    """

    def __init__(
        self,
        identity: Identity,
        topic: Topic,
        build_engine: Callable[[Handlers], P2pEngine],
        *,
        sequence: Iterator[int],
        clock: Callable[[], float],
        admitted: Callable[[Envelope], object],
        folder: Path | None = None,
        also: Sequence[Topic] = (),
        knows: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.identity = identity
        # Our swarm's topic comes first, then the topics of `also`.
        self.topic, self.topics = topic, [topic, *dict.fromkeys(also)]
        self._recall = SeenFile(folder, clock)
        self.reputation = Reputation()
        inboxes = {
            each: Inbox(
                identity.peer_id,
                each.swarm_id,
                not_before=self._recall.not_before,
                reputation=self.reputation,
                group_of=lambda via: self.reputation.group(via) or NOT_NOTED,
                note=lambda trace: self._recall.note(trace.sent_at),
            )
            for each in self.topics
        }
        self.inbox = inboxes[topic]
        self._knows = knows
        self._noted_at = 0.0
        # Frames refused since the start, by reason, including calls of `report`.
        self.rejected: Counter[Reason] = Counter()
        # Refusals that `refused` has already returned.
        self._returned: Counter[Reason] = Counter()
        self._sequence = sequence
        self._clock = clock
        self._admitted = admitted
        self.blobs = BlobStore()
        self.dial_back = DialBack(self.peers, clock)
        self.engine = build_engine(
            Handlers(
                self.deliver,
                self.answer,
                self.score,
                {each: partial(self._receive, inboxes[each]) for each in also},
            )
        )
        self._session = TwinSession(identity, clock(), secrets.token_bytes)
        # The daemon adds the handlers of USED and INTRODUCTION.
        self.answers: dict[int, Answer] = {
            PeerRequest.BLOBS: self.blobs.answer,
            PeerRequest.DIAL_BACK: self.dial_back,
            PeerRequest.TWINS: TwinCards(clock),
        }
        # For a kind, the function that completes a body before `publish` seals it.
        self.completes: dict[str, Callable[[bytes], bytes]] = {}
        self._stay = trio.CancelScope()
        # Set by `come_back`; None while we are in the swarm.
        self._left: trio.Event | None = None

    async def run(self, task_status: Started = trio.TASK_STATUS_IGNORED) -> None:
        """Stay in the swarm until cancelled (trio).

        With `nursery.start` it returns our addresses once other nodes can reach us.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look_for_twins)
                self.dial_back.nursery = nursery
                await self._be_there(task_status)
        finally:
            self.dial_back.nursery = None
            self._recall.close()

    def peers(self) -> Sequence[Peer]:
        return self.engine.peers()

    def addresses(self) -> Sequence[str]:
        return self.engine.addresses()

    def deliver(self, frame: bytes, via: PeerId | None) -> Verdict:
        """Admit or refuse a frame that arrived, and tell the engine whether to forward it.

        The engine calls this for every frame, so it must be quick: files are written without a sync.
        """
        return self._receive(self.inbox, frame, via)

    def _receive(self, inbox: Inbox, frame: bytes, via: PeerId | None) -> Verdict:
        now = self._clock()
        outcome = inbox.receive(frame, now, via)
        self._note_peers(now)
        if isinstance(outcome, Reason):
            self.rejected[outcome] += 1
            if via is not None:
                self._blame(via, outcome, now)
            return outcome.verdict
        if via is not None:
            self.reputation.admitted(via, now)
        if self._knows(outcome.kind):
            self._admitted(dataclasses.replace(outcome, via=via, group=self.reputation.group(outcome.author)))
        else:
            self.ignore(Reason.UNKNOWN_KIND)
        return Verdict.ACCEPT

    def score(self, peer: PeerId) -> float:
        """Return our score of a peer (`p2p.admission.reputation`), by which the engine chooses peers."""
        return self.reputation.score(peer, self._clock())

    def answer(self, peer: PeerId, question: bytes) -> bytes:
        """Answer a peer's question for the engine. An unknown question gets an empty answer."""
        answer = self.answers.get(question[0]) if question else None
        return answer(peer, question) if answer is not None else b""

    def publish(self, kind: str, body: bytes) -> None:
        """Sign a body and send it.

        Nothing is sent after `leave`, or while another node runs that has our key and started earlier.

        Raises:
            ValueError: no receiver would admit the frame. The body is longer than `envelope.MAX_BODY_BYTES`,
                or the kind is malformed.
        """
        if self._left is None and not self.earlier_twin():
            body = self.completes.get(kind, bytes)(body)
            self.engine.publish(
                seal(self.identity, self.topic.swarm_id, next(self._sequence), self._clock(), kind, body)
            )

    def earlier_twin(self) -> bool | None:
        """Return whether another node with our key started before us; None if there is none.

        The other node is running, or was within the last minutes (`p2p.peers.twins`).
        """
        return self._session.earlier_twin(self._clock())

    @property
    def away(self) -> bool:
        return self._left is not None

    def leave(self) -> None:
        """End all connections and stay out of the swarm until `come_back`."""
        self._left = trio.Event() if self._left is None else self._left
        self._stay.cancel()

    def come_back(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            left.set()

    async def request(self, peer: PeerId, question: bytes, limit: int, at: str = "") -> bytes:
        """Ask a peer, like `P2pEngine.request`, but return b"" at once if the peer is graylisted.

        at: an address that the peer has signed, or "". Raises Unanswered.
        """
        if self.reputation.shunned(peer, self._clock()):
            return b""
        if at:
            self.engine.told_of(peer, at)
        return await self.engine.request(peer, question, limit)

    def report(self, author: PeerId, reason: Reason) -> None:
        now = self._clock()
        self.rejected[reason] += 1
        self.inbox.charge(author, _REPORT_CHARGE, now)
        self._blame(author, reason, now)

    def ignore(self, reason: Reason) -> None:
        """Count an admitted frame that we cannot use. No peer is charged for it, and it is forwarded."""
        self.rejected[reason] += 1

    def refused(self) -> Mapping[Reason, int]:
        """Return how many frames and contents were refused since the last call, by reason."""
        refused = self.rejected - self._returned
        self._returned = self.rejected.copy()
        return refused

    async def _be_there(self, task_status: Started) -> None:
        """Run the engine, except while another node runs that has our key and started earlier.

        Two nodes with one key would end each other's connections at every peer that they share. So this node
        stays away, and only starts the engine every AWAY_S to check whether the other node still runs.
        """
        first = _FirstStart(task_status)
        await self._stay_until_sent_away(first)
        while True:
            if self._left is not None:
                await self._left.wait()
            elif self.earlier_twin():
                log.warning(
                    "another node runs with our key and started earlier: this one leaves the swarm and checks"
                    " again in %.0f s",
                    AWAY_S,
                )
                await trio.sleep(AWAY_S)
            try:
                await self._stay_until_sent_away(first)
            except OperatorError as error:
                log.warning("could not return to the swarm: %s", error)
                await trio.sleep(RETURN_EVERY_S)

    async def _stay_until_sent_away(self, task_status: Started) -> None:
        if self._left is None:
            with trio.CancelScope() as self._stay:
                await self.engine.run(task_status)

    async def _look_for_twins(self) -> None:
        while True:
            said = await ask_each(
                self._leave_card, self._session.whom(self.engine.connected()), TWINS_EVERY_S
            )
            # A peer that does not know the question gives no answer.
            shown = [answer for answer in said.values() if answer]
            if shown and all(answer == NOTHING for answer in shown):
                self._session.shown_nothing()
            # After a return, `shown` is empty until a peer is connected. Until then the old proof does not
            # count: we returned to check it.
            if shown and self.earlier_twin():
                self._stay.cancel()
            await trio.sleep(TWINS_EVERY_S if shown else 1.0)

    async def _leave_card(self, peer: PeerId) -> bytes:
        """Exchange twin cards with a peer. If its card is new to us, answer that card at once."""
        for _ in range(2):
            answer = await self.engine.request(peer, self._session.question(self._clock()), MAX_CARD_BYTES)
            if not self._session.answered(answer, self._clock()):
                break
        return answer

    def _blame(self, peer: PeerId, reason: Reason, now: float) -> None:
        if (seconds := self.reputation.offence(peer, reason, now)) is not None:
            log.warning(
                "banned %s for %.0f s for repeated offences, the last: %s", peer, seconds, reason.value
            )
            self.engine.shut_out(peer, seconds)

    def _note_peers(self, now: float) -> None:
        """Note the network groups of our peers, at most once in NOTE_PEERS_EVERY_S."""
        if 0 <= now - self._noted_at < NOTE_PEERS_EVERY_S:
            return
        self._noted_at = now
        for peer in self.peers():
            # A peer behind a relay gets no group, because the relay's address says nothing about the peer.
            endpoint = parse_endpoint(peer.address)
            if endpoint is not None and (group := share_group_of_host(endpoint.host)) is not None:
                self.reputation.met(peer.id, group)
