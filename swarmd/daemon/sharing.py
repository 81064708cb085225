"""A swarm member that shares rollouts; used by the node and by programs (`swarmd.library`)."""

import random
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import trio
from msgspec import structs

from p2p.engines.traffic import Traffic
from p2p.identity import Identity, nickname
from p2p.member import Member
from p2p.sequence import SequenceFile
from p2p.types import Envelope, PeerId, PeerRequest, Reason, Started
from swarmd.config.config import NodeConfig
from swarmd.config.own_strategy import load_take
from swarmd.daemon.diagnosis.isolation_watch import IsolationWatch
from swarmd.daemon.inviting import PLACES, place
from swarmd.daemon.local_api.roster import Roster
from swarmd.daemon.local_api.status import peers_of
from swarmd.daemon.membership import engine_builder, introduce, nearby, topic_of
from swarmd.exchange import offers
from swarmd.exchange.acknowledgements import AcknowledgementCounter, Acknowledger
from swarmd.exchange.driver import Driver
from swarmd.exchange.events import Deliver
from swarmd.exchange.exchange import KINDS, Exchange
from swarmd.exchange.replay import Recording
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.state.folder import EVENTS_FILE, IDENTITY_FILE
from swarmd.state.status import PeerList, SwarmLabel, SwarmPart


class Participant:
    """A swarm member with the parts that exchange rollouts for it.

    member               key and p2p engine; its inbox admits frames before any other part sees them
    driver, exchange     run the exchange: which rollouts to send, when; which to fetch, and from which peer
    roster, isolation    know which peers are heard, and why none is
    acknowledged         counts how often other nodes trained on our rollouts, as they report it
    """

    def __init__(
        self,
        config: NodeConfig,
        folder: Path,
        model: str,
        deliver: Callable[[Deliver], None],
        doing: Callable[[], str],
        talk: Callable[[str], None],
        traffic: Traffic | None = None,
    ) -> None:
        """Build the member, without running it. Raises ConfigError if the configuration cannot be used.

        Args:
            folder: the state folder.
            model: the model's name, as told to other nodes.
            deliver: called with each rollout of another node.
            doing: returns the member's answer when peers ask what it does.
            talk: called with messages for the operator.
            traffic: counts and limits the bytes.
        """
        self._config = config
        load_take(config.sharing.take)
        self.curriculum = curriculum = curriculum_of(config)
        self.roster, rng = Roster(), random.Random(secrets.randbits(64))
        self.exchange = Exchange(curriculum, config.round, config.sharing, model, rng)
        self.exchange.record = Recording(self.exchange, config, folder / EVENTS_FILE, talk)
        self.driver = Driver(self.exchange, deliver, talk, self.roster.bad)
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
            admitted=self._admitted,
            folder=folder,
            knows=KINDS.__contains__,
        )
        self.member.completes[offers.KIND] = lambda body: offers.addressed(
            body, self.member.engine.reached_at()
        )
        self.acknowledged = self.member.answers[PeerRequest.USED] = AcknowledgementCounter(
            lambda: self.exchange.shared
        )
        self._acknowledger = Acknowledger(self.member.engine.request, self.member.engine.connected, time.time)
        runs = introduce(self.member, curriculum, doing)
        self.isolation = IsolationWatch(
            self.member, config.swarm, curriculum.name, self.roster, time.time, runs
        )

    async def run(self, *, task_status: Started) -> None:
        """Take part until cancelled. Started (`nursery.start`) once other nodes can reach this one.

        Run the driver in another task, from the first event on; events wait in a queue until then.
        """
        async with trio.open_nursery() as nursery:
            if self._config.swarm.engine != "none":
                nursery.start_soon(self.isolation.run)
                nursery.start_soon(self._acknowledger.run)
            await nursery.start(self.member.run)
            if self._config.swarm.engine != "none" and self._config.swarm.mdns == "on":
                # It announces the member's addresses, so the member must be listening already.
                nursery.start_soon(nearby(self.member).run)
            task_status.started("")

    def used(self, used: Sequence[tuple[PeerId, str]]) -> None:
        """Record the author and specialty of each rollout of another node that was trained on."""
        for author, specialty in used:
            self.roster.useful(author, specialty)
        self._acknowledger.used(author for author, _ in used)

    def heard(self) -> int:
        """Return how many peers are heard, connected or not. This is the peer count shown to users."""
        return len(self.roster.present(time.time()))

    def status(self) -> SwarmPart:
        """Return the status of the swarm and of this node's part in it."""
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
            exchange=structs.replace(self.exchange.market.figures(), bytes_out=self.member.blobs.sent),
            offers={"every": self.exchange.pacing.every},
            shared=self.acknowledged.figures(),
            trouble=self.isolation.trouble,
        )

    def peers(self) -> PeerList:
        """Return the known peers, with this node's score for each."""
        return peers_of(
            self.roster, self.member.peers(), time.time(), self.member.score, self.exchange.market.authors
        )

    def _admitted(self, envelope: Envelope) -> None:
        self.roster.heard(envelope.author, time.time())
        if not self.driver.admitted(envelope):
            self.member.ignore(Reason.BACKLOG)
