"""This node in one swarm: identity, inbox, engine, blobs and sequence numbers."""

import dataclasses
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import trio

from p2p.address import parse_endpoint
from p2p.admission.inbox import AdmissionLimits, Inbox
from p2p.admission.reputation import Reputation
from p2p.admission.seen_file import SeenFile
from p2p.blobs.blobs import BlobServer, BlobStore
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

# How often to note the network groups of connected peers.
NOTE_PEERS_EVERY_S = 10.0
# How often to look for another node with our key.
TWINS_EVERY_S = 5.0
# How often to try to come back.
RETURN_EVERY_S = 5.0
# How long to stay away from another node with our key that started earlier.
AWAY_S = 30.0
# The group of all connections whose own we have not noted: dialling again and again brings no more room.
NOT_NOTED = "not noted yet"
# What one report costs its author, in frames of its quota: a second's worth.
_REPORT_CHARGE = 5.0

log = logging.getLogger(__name__)


class _FirstStart:
    """Reports the engine's first start alone.

    The engine starts again whenever the member comes back, and starts late where the member was away.
    """

    def __init__(self, task_status: Started) -> None:
        self._task_status = task_status

    def started(self, value: Sequence[str]) -> None:
        task_status, self._task_status = self._task_status, trio.TASK_STATUS_IGNORED
        task_status.started(value)


class Member:
    """One member of a swarm, over an engine.

    Args:
        build_engine: called once, with the engine's handlers; `run` runs the engine.
        admitted: called with each admitted envelope of a kind that this version can use.
        folder: for what protects from replays over restarts.
        knows: whether this version can use a kind; frames of other kinds are only counted and passed on.
        also: other swarms whose members this node helps to meet. An inbox of their own admits their frames,
            which are then received and passed on, too. A node with `also` does not train.
    """

    def __init__(
        self,
        identity: Identity,
        topic: Topic,
        build_engine: Callable[[Handlers], P2pEngine],
        *,
        sequence: Iterator[int],
        clock: Callable[[], float],
        admitted: Callable[[Envelope], None],
        limits: AdmissionLimits | None = None,
        folder: Path | None = None,
        also: Sequence[Topic] = (),
        knows: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.identity = identity
        # Our swarm's, then those of swarms whose members we help to meet.
        self.topic, self.topics = topic, [topic, *dict.fromkeys(also)]
        self._recall = SeenFile(folder, clock)
        self.reputation = Reputation()
        self.inbox = Inbox(
            identity.peer_id,
            topic.swarm_id,
            limits,
            not_before=self._recall.not_before,
            reputation=self.reputation,
            group_of=lambda via: self.reputation.group(via) or NOT_NOTED,
            note=lambda trace: self._recall.note(trace.sent_at),
        )
        self._also = {
            topic: Inbox(
                identity.peer_id,
                topic.swarm_id,
                limits,
                not_before=self._recall.not_before,
                reputation=self.reputation,
            )
            for topic in also
        }
        self._knows = knows
        self._noted_at = 0.0
        self.reports: Counter[Reason] = Counter()
        self._returned: Counter[Reason] = Counter()  # refusals that `refused` has returned
        self._sequence = sequence
        self._clock = clock
        self._admitted = admitted
        self.blobs = BlobStore()
        self.server = BlobServer(self.blobs)
        self.dial_back = DialBack(self.peers, clock)
        self.engine = build_engine(
            Handlers(
                self.deliver,
                self.answer,
                self.score,
                {topic: partial(self._receive, inbox) for topic, inbox in self._also.items()},
            )
        )
        self._session = TwinSession(identity, clock(), secrets.token_bytes)
        # USED and INTRODUCTION are added by whoever has an answer.
        self.answers: dict[int, Answer] = {
            PeerRequest.BLOBS: self.server,
            PeerRequest.DIAL_BACK: self.dial_back,
            PeerRequest.TWINS: TwinCards(clock),
        }
        # What is done with bodies of a kind before they are sealed.
        self.completes: dict[str, Callable[[bytes], bytes]] = {}
        self._stay = trio.CancelScope()
        # The event of coming back; None while we are in the swarm.
        self._left: trio.Event | None = None

    @property
    def rejected(self) -> Counter[Reason]:
        """Return how many frames were refused since the start, by reason, the trainer's reports included."""
        return sum((inbox.counts for inbox in self._also.values()), self.inbox.counts + self.reports)

    async def run(self, task_status: Started = trio.TASK_STATUS_IGNORED) -> None:
        """Stay in the swarm until cancelled (trio).

        With `nursery.start` it returns our addresses once others can reach us.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look_for_twins)
                nursery.start_soon(self.dial_back.run)
                await self._be_there(task_status)
        finally:
            self._recall.close()

    def peers(self) -> Sequence[Peer]:
        return self.engine.peers()

    def addresses(self) -> Sequence[str]:
        return self.engine.addresses()

    def deliver(self, frame: bytes, via: PeerId | None) -> Verdict:
        """Admit or refuse a frame that arrived, and tell the engine whether to pass it on.

        The engine calls this for every frame. It is quick: an admitted frame is noted in a file, without a
        sync.
        """
        return self._receive(self.inbox, frame, via)

    def _receive(self, inbox: Inbox, frame: bytes, via: PeerId | None) -> Verdict:
        now = self._clock()
        outcome = inbox.receive(frame, now, via)
        self._note_peers(now)
        if isinstance(outcome, Reason):
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
        """Return our score of a peer (`p2p.admission.reputation`), for the engine's own choices."""
        return self.reputation.score(peer, self._clock())

    def answer(self, peer: PeerId, question: bytes) -> bytes:
        """Answer a peer's question; an unknown one gets an empty answer. The engine calls this."""
        answer = self.answers.get(question[0]) if question else None
        return answer(peer, question) if answer is not None else b""

    def publish(self, kind: str, body: bytes) -> None:
        """Sign a body and send it.

        Nothing is sent while the member has left, or while another node with our key runs that started
        earlier.
        Raises ValueError where no receiver would admit it: a body over `envelope.MAX_BODY_BYTES`, a
        kind that is no word.
        """
        if self._left is None and not self.earlier_twin():
            body = self.completes.get(kind, bytes)(body)
            self.engine.publish(
                seal(self.identity, self.topic.swarm_id, next(self._sequence), self._clock(), kind, body)
            )

    def earlier_twin(self) -> bool | None:
        """Return whether another node with our key started before us; None where there is no other.

        It runs now or ran some seconds ago.
        """
        return self._session.earlier_twin(self._clock())

    @property
    def away(self) -> bool:
        return self._left is not None

    def leave(self) -> None:
        """End all connections, and make none until `come_back`."""
        self._left = trio.Event() if self._left is None else self._left
        self._stay.cancel()

    def come_back(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            left.set()

    def hold(self, blob: bytes) -> None:
        self.blobs.put(blob)

    async def request(self, peer: PeerId, question: bytes, limit: int, at: str = "") -> bytes:
        """Ask a peer, as `P2pEngine.request` does; a graylisted one is not asked and has no answer.

        at: where it says that it can be reached. Raises Unanswered.
        """
        if self.reputation.shunned(peer, self._clock()):
            return b""
        if at:
            self.engine.told_of(peer, at)
        return await self.engine.request(peer, question, limit)

    def report(self, author: PeerId, reason: Reason) -> None:
        now = self._clock()
        self.reports[reason] += 1
        self.inbox.charge(author, _REPORT_CHARGE, now)
        self._blame(author, reason, now)

    def ignore(self, reason: Reason) -> None:
        """Count an admitted frame that we cannot use. Nobody is to blame, and it was passed on."""
        self.inbox.counts[reason] += 1

    def refused(self) -> Mapping[Reason, int]:
        """Return how many frames and contents were refused since the last call, by reason."""
        rejected = self.rejected
        refused, self._returned = rejected - self._returned, rejected
        return refused

    async def _be_there(self, task_status: Started) -> None:
        """Run the engine, except while another node with our key runs that started earlier.

        Both would otherwise end each other's connections at every member that they share. While there is one,
        the engine only comes back now and then for a check.
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
            # Nobody is connected yet after a return: what was proved before it is what it came to check.
            if shown and self.earlier_twin():
                self._stay.cancel()
            await trio.sleep(TWINS_EVERY_S if shown else 1.0)

    async def _leave_card(self, peer: PeerId) -> bytes:
        """Exchange cards with a peer, at most twice: one that is new to us is answered at once."""
        for _ in range(2):
            answer = await self.engine.request(peer, self._session.question(self._clock()), MAX_CARD_BYTES)
            if not self._session.answered(answer, self._clock()):
                break
        return answer

    def _blame(self, peer: PeerId, reason: Reason, now: float) -> None:
        seconds = self.reputation.offence(peer, reason, now)
        if seconds is not None:
            log.warning("banned %s for %.0f s: %s, and not for the first time", peer, seconds, reason.value)
            self.engine.shut_out(peer, seconds)

    def _note_peers(self, now: float) -> None:
        """Note the network groups of our peers, at most every NOTE_PEERS_EVERY_S, as frames arrive."""
        if 0 <= now - self._noted_at < NOTE_PEERS_EVERY_S:
            return
        self._noted_at = now
        for peer in self.peers():
            # There is none of a peer behind a relay: the relay's address is not the peer's.
            endpoint = parse_endpoint(peer.address)
            if endpoint is not None and (group := share_group_of_host(endpoint.host)) is not None:
                self.reputation.met(peer.id, group)
