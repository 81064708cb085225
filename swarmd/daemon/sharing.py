"""A member that shares rollouts, as a node and a program (`library`) have it, and the node's publisher."""

import random
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from p2p.engines.traffic import Traffic
from p2p.errors import StateUnwritable
from p2p.identity import Identity, nickname
from p2p.member import Member
from p2p.sequence import SequenceFile
from p2p.types import Envelope, PeerId, PeerRequest, ReceivedBody, Started
from swarmd.config.config import NodeConfig
from swarmd.daemon.diagnosis.isolation_watch import IsolationWatch
from swarmd.daemon.inviting import PLACES, place
from swarmd.daemon.local_api.roster import Roster
from swarmd.daemon.local_api.status import peers_of
from swarmd.daemon.membership import engine_builder, introduce, nearby, topic_of
from swarmd.exchange import offers, wire
from swarmd.exchange.acknowledgements import AcknowledgementCounter, Acknowledger
from swarmd.exchange.gathering import Gatherer
from swarmd.exchange.pacing import Heard, Outgoing, Pacing
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.state.folder import IDENTITY_FILE
from swarmd.state.status import ExchangeFigures, GivenRollouts, PeerList, SwarmLabel, SwarmPart

# How often to check whether what waits may be sent.
TURN_EVERY_S = 1.0


class Participant:
    """A member of the swarm with all that works beside it.

    member               key and p2p engine; its inbox admits frames before anything here sees them
    gatherer             offers of others: chooses a round's, fetches their blobs, hands bodies on
    pacing               when ours may be sent, by what is heard of others
    roster, isolation    who is heard; why nobody is
    given                what others say that they used of ours
    """

    def __init__(
        self,
        config: NodeConfig,
        folder: Path,
        hand_on: Callable[[ReceivedBody], None],
        doing: Callable[[], str],
        traffic: Traffic | None = None,
    ) -> None:
        """Build the member, without running it. Raises ConfigError where the configuration cannot be used.

        Args:
            folder: the state folder.
            hand_on: called with each set of others.
            doing: returns what the member says that it does, when asked.
            traffic: counts and limits the bytes.
        """
        self._config = config
        self.curriculum = curriculum = curriculum_of(config)
        self.identity, self.topic = (
            Identity.load_or_create(folder / IDENTITY_FILE),
            topic_of(config.swarm, curriculum),
        )
        self.member = Member(
            self.identity,
            self.topic,
            engine_builder(self.identity, self.topic, config.swarm, folder, traffic=traffic),
            sequence=SequenceFile(folder / "sequence", time.time),
            clock=time.time,
            admitted=self._on_envelope,
            folder=folder,
            knows={wire.KIND, offers.KIND}.__contains__,
        )
        self._heard, self.roster, rng = Heard(), Roster(), random.Random(secrets.randbits(64))
        self.pacing = Pacing(self._heard, rng, curriculum.offers_a_second)
        self.gatherer = Gatherer(
            self.member,
            curriculum,
            config.round,
            config.sharing,
            hand_on,
            time.monotonic,
            rng,
            self._heard.tried,
        )
        self.member.completes[offers.KIND] = lambda body: offers.addressed(
            body, self.member.engine.reached_at()
        )
        self.given = self.member.answers[PeerRequest.USED] = AcknowledgementCounter()
        self._acknowledger = Acknowledger(self.member.engine.request, self.member.engine.connected, time.time)
        runs = introduce(self.member, curriculum, doing)
        self.isolation = IsolationWatch(
            self.member, config.swarm, curriculum.name, self.roster, time.time, runs
        )

    async def run(self, *, task_status: Started) -> None:
        """Take part until cancelled. Started (`nursery.start`) once others can reach us."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.gatherer.run)
            if self._config.swarm.engine != "none":
                nursery.start_soon(self.isolation.run)
                nursery.start_soon(self._acknowledger.run)
            await nursery.start(self.member.run)
            if self._config.swarm.engine != "none" and self._config.swarm.mdns == "on":
                # Announces our addresses, so the member must listen already.
                nursery.start_soon(nearby(self.member).run)
            task_status.started("")

    def used(self, used: Sequence[tuple[PeerId, str]]) -> None:
        """Note the author and the specialty of each of others' rollouts that was trained on."""
        for author, specialty in used:
            self.roster.useful(author, specialty)
        self._acknowledger.used(author for author, _ in used)

    def heard(self) -> int:
        """Return how many peers are heard, connected or not: the number of peers wherever one is shown."""
        return len(self.roster.present(time.time()))

    def status(self) -> SwarmPart:
        """Return the status of the swarm and of our part in it."""
        rejected = {reason: count for reason, count in self.member.rejected.items() if count}
        return SwarmPart(
            peer_id=self.identity.peer_id,
            name=nickname(self.identity.peer_id),
            swarm=SwarmLabel(self.topic.name, self.topic.digest, str(self.topic)),
            engine=self._config.swarm.engine,
            peers=self.heard(),
            connected=len(self.member.peers()),
            addresses=sorted(self.member.addresses(), key=lambda address: PLACES.index(place(address))),
            rejected={reason.value: count for reason, count in rejected.items()},
            advice={reason.value: reason.remedy for reason in rejected if reason.remedy},
            exchange=ExchangeFigures(**self.gatherer.document()),
            offers={"every": self.pacing.every},
            given=GivenRollouts(**self.given.document()),
            trouble=self.isolation.trouble,
        )

    def peers(self) -> PeerList:
        """Return the known peers, with our score of each."""
        return peers_of(self.roster, self.member.peers(), time.time(), self.member.score)

    def _on_envelope(self, envelope: Envelope) -> None:
        self.roster.heard(envelope.author, time.time())
        self._heard.offer(envelope.author, envelope.group, time.monotonic())
        self.gatherer.on_envelope(envelope)


class Publisher:
    """Sends what the trainer shares when the pace allows it.

    max_age: `round.max_age`. talk: told once when nothing can be sent.
    """

    def __init__(self, member: Member, pacing: Pacing, max_age: int, talk: Callable[[str], None]) -> None:
        self._member, self._talk = member, talk
        self._outgoing = Outgoing(pacing, max_age)
        self._cannot_share = False  # whether the full disk has been reported

    async def run(self) -> None:
        """Send what waits, until cancelled."""
        while True:
            await trio.sleep(TURN_EVERY_S)
            self._send()

    def publish(self, kind: str, body: bytes) -> None:
        """Send a body now, or when it is our turn while it is worth something."""
        self._outgoing.put(kind, body)
        self._send()

    def next_round(self) -> None:
        """Record that one of our rounds is over."""
        self._outgoing.next_round()

    def _send(self) -> None:
        """Seal and send what waits.

        On a full disk no sequence number can be reserved: nothing is sent, and the operator is told once.
        """
        while (message := self._outgoing.pop(time.monotonic())) is not None:
            try:
                self._member.publish(*message)
            except StateUnwritable as error:
                if not self._cannot_share:
                    self._talk(f"sharing is off for now: {error}")
                self._cannot_share = True
            else:
                self._cannot_share = False
