"""Honest nodes of the simulation: the product's `Exchange` with a trainer that only counts.

In small swarms each node also has a real `p2p.member.Member`, so frames pass its inbox and its reputation
checks. In swarms of more than OWN_ADMISSION nodes, each frame is checked once, and all nodes get the same
envelope.
"""

import itertools
import math
import random
from collections.abc import Collection, Sequence
from unittest.mock import patch

from benchmarks.network.simulation.network import (
    EPOCH,
    SWARM_ID,
    TOPIC,
    Arrived,
    Asked,
    Event,
    Frame,
    Generated,
    Join,
    Link,
    LookAround,
    Network,
    NextRound,
    Node,
)
from p2p.blobs.blobs import BlobStore
from p2p.engines.memory import MemoryEngine, MemorySwarm
from p2p.envelope import seal
from p2p.identity import Identity
from p2p.member import Member
from p2p.netgroup import share_group_of_host
from p2p.types import Envelope, Handlers, Peer, PeerId, Reason
from swarmd.config.config import RoundConfig
from swarmd.exchange import exchange as machine
from swarmd.exchange import offers
from swarmd.exchange.events import (
    Admitted,
    Answered,
    Ask,
    Cancel,
    Connected,
    Deliver,
    Hold,
    Output,
    Report,
    RoundBegan,
    Send,
    Share,
    Tick,
    WakeAt,
)
from swarmd.exchange.events import Event as ExchangeEvent
from swarmd.exchange.pacing import Heard
from swarmd.experience.strategies import SharingSettings
from swarmd.tasks.curriculum import SAPO_9, TRAINING_TASKS
from swarmd.types import Completion, Rollout, TaskRef

OWN_ADMISSION = 300  # largest swarm in which each node has a `Member`
ROUND = RoundConfig()
LOCAL_ROLLOUTS = ROUND.local  # a round; all of them are shared
CHARACTERS = 1024  # of a completion; a rollout has two completions
GENERATION = 0.8  # share of a round that passes before its rollouts are shared
KEPT_BYTES = 64 * 1024  # bytes of blobs that a node without a `Member` keeps
_TEXT = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz0123456789 ", k=1 << 17))


class Ears(Heard):
    """Hears offers for all nodes of a large swarm, because all of them hear the same.

    heard: the shared memory. tries: whether this node's fetches count; they count for one node alone.
    """

    def __init__(self, heard: Heard, *, tries: bool) -> None:
        super().__init__()
        self._shared, self._tries_count = heard, tries

    def offer(self, author: PeerId, group: str, now: float) -> None:
        """Do nothing: `SharedEars` has counted the offer."""

    def tried(self, author: PeerId, served: bool) -> None:
        if self._tries_count:
            self._shared.tried(author, served)

    def authors(self, now: float) -> float:
        return self._shared.authors(now)

    def rates(self, now: float) -> tuple[float, float]:
        return self._shared.rates(now)


class LastingHeard(Heard):
    """A memory of heard offers that recomputes its figures at most once a second."""

    def __init__(self) -> None:
        super().__init__()
        self._at, self._found = -1, (0.0, (0.0, 0.0))

    def authors(self, now: float) -> float:
        return self._figures(now)[0]

    def rates(self, now: float) -> tuple[float, float]:
        return self._figures(now)[1]

    def _figures(self, now: float) -> tuple[float, tuple[float, float]]:
        if int(now) != self._at:
            self._at, self._found = int(now), (super().authors(now), super().rates(now))
        return self._found


class SharedEars(Node):
    """Hears each frame once for all nodes of a large swarm."""

    def __init__(self, network: Network) -> None:
        super().__init__(network, Identity(bytes(31) + b"\1"), network.link(0))
        self.heard = LastingHeard()

    def take(self, event: Event) -> None:
        assert isinstance(event, Arrived)
        self.heard.offer(event.frame.envelope.author, "", self.network.now)


class Line(MemoryEngine):
    """A member's p2p engine on the simulated network."""

    def __init__(self, node: "Honest", handlers: Handlers) -> None:
        super().__init__(MemorySwarm(), node.id, handlers)
        self.node = node
        self.banned: dict[PeerId, float] = {}  # end of the ban

    def publish(self, frame: bytes) -> None:
        self.node.network.gossip(self.node, frame, honest=True)

    def shut_out(self, peer: PeerId, seconds: float) -> None:
        self.banned[peer] = self.node.network.now + seconds

    def reached_at(self) -> str:
        return self.node.link.address

    def peers(self) -> Sequence[Peer]:
        return [
            Peer(peer, f"/ip4/{other.link.host}/tcp/4001", "outbound", 0.0)
            for peer, other in self.node.connected.items()
        ]

    def bans(self, peer: PeerId) -> bool:
        return self.banned.get(peer, 0.0) > self.node.network.now


class Honest(Node):
    """One honest node.

    Args:
        number: the node's number, which it keeps after a restart.
        life: counts the node's starts, from 0.
        round_number: the trainer's last round.
    """

    def __init__(
        self,
        network: Network,
        identity: Identity,
        link: Link,
        number: int,
        life: int = 0,
        round_number: int = 0,
    ) -> None:
        super().__init__(network, identity, link)
        self.number, self.life, self.round = number, life, round_number
        self._rng = random.Random(f"{network.seed} {number} {life}")
        low, high = network.scenario.rounds_s
        self.seconds = low * (high / low) ** random.Random(f"{network.seed} {number}").random()
        self._group = share_group_of_host(link.host) or ""
        self.exchange = self._build_exchange()
        self.wake_at = math.inf
        self.runs = True  # whether the trainer begins another round after this one
        self.unserved: set[PeerId] = set()  # peers that did not answer one of our questions with a blob
        self._began_at, self._tally, self._filled_at, self.had = 0.0, network.tally, math.inf, 0
        self._trained = False  # whether a round has begun
        self.member, self.line = self._build_member()
        self._store = self.member.blobs if self.member else BlobStore(KEPT_BYTES)
        self._sequence = itertools.count(1)

    def _build_exchange(self) -> machine.Exchange:
        ears, rng = (
            self.network.ears,
            random.Random(f"exchange {self.network.seed} {self.number} {self.life}"),
        )
        if isinstance(ears, SharedEars):
            shared = Ears(ears.heard, tries=self.number == 0)
            with patch.object(machine, "Heard", lambda: shared):
                return machine.Exchange(SAPO_9, ROUND, SharingSettings(), "simulated", rng)
        return machine.Exchange(SAPO_9, ROUND, SharingSettings(), "simulated", rng)

    def _build_member(self) -> tuple[Member | None, "Line | None"]:
        if self.network.scenario.nodes > OWN_ADMISSION:
            return None, None
        lines: list[Line] = []

        def build(handlers: Handlers) -> Line:
            lines.append(Line(self, handlers))
            return lines[0]

        member = Member(
            self.identity,
            TOPIC,
            build,
            sequence=itertools.count(1 + (self.life << 32)),
            clock=lambda: EPOCH + self.network.now,
            admitted=lambda envelope: self.handle(Admitted(envelope)),
            knows=machine.KINDS.__contains__,
        )
        member.completes[offers.KIND] = lambda body: offers.addressed(body, self.link.address)
        return member, lines[0]

    # Events.

    def take(self, event: Event) -> None:
        match event:
            case Arrived(frame, via):
                self._hear(frame, via)
            case Asked():
                self._answer(event)
            case Join():
                self.network.join(self)
                self._begin_round()
            case LookAround():
                self.looked()
                self.handle(Connected(tuple(self.connected)))
            case NextRound():
                self._end_round()
            case Generated():
                self.handle(Share(tuple(self.rollouts()), self.round))
            case Tick():
                # A later `WakeAt` may have replaced this one.
                if self.network.now == self.wake_at:
                    self.handle(event)
            case Answered(number, reply):
                if (ask := self.open.pop(number, None)) is not None:
                    if not isinstance(reply, bytes) or len(reply) <= 1:
                        self.unserved.add(ask.peer)
                    self.handle(event)
            case Admitted() | Connected() | RoundBegan() | Share():
                self.handle(event)
            case _:
                raise AssertionError(event)

    def handle(self, event: ExchangeEvent) -> None:
        """Hand an event to the exchange, and perform the outputs."""
        for output in self.exchange.handle(event, self.network.now):
            self._perform(output)

    def _perform(self, output: Output) -> None:
        network = self.network
        match output:
            case Send(kind, body):
                self._send(kind, body)
            case Hold(blob):
                self._store.put(blob.data)
            case Ask(number):
                assert number not in self.open, "the number of an open question was used again"
                self.open[number] = output
                network.tally.questions += 1
                if self.member is not None and self.member.reputation.shunned(
                    output.peer, EPOCH + network.now
                ):
                    network.at(network.now, self, Answered(number, b""))
                else:
                    network.ask(self, output)
            case Cancel(number):
                self.unserved.add(self.open.pop(number).peer)
            case Deliver(rollout):
                self._deliver(rollout)
            case Report(peer, reason):
                self._report(peer, reason)
            case WakeAt(time):
                assert time > network.now, "the exchange asked to be woken in the past"
                self.wake_at = time
                if time < math.inf:
                    network.at(time, self, Tick())

    # Gossip and blobs.

    def _hear(self, frame: Frame, via: PeerId) -> None:
        if self.member is not None and self.line is not None:
            if not self.line.bans(via):
                self.member.deliver(frame.raw, via)
            return
        sent = frame.envelope
        author = self.connected.get(sent.author)
        group = author._group if isinstance(author, Honest) else ""
        self.handle(
            Admitted(Envelope(sent.author, sent.sequence, sent.sent_at, sent.kind, sent.body, via, group))
        )

    def _send(self, kind: str, body: bytes) -> None:
        if self.member is not None:
            self.member.publish(kind, body)
            return
        if kind == offers.KIND:
            body = offers.addressed(body, self.link.address)
        now = self.network.now
        frame = seal(self.identity, SWARM_ID, next(self._sequence), EPOCH + now, kind, body)
        self.network.gossip(self, frame, honest=True)

    def _answer(self, asked: Asked) -> None:
        asker, ask = asked
        if ask.number not in asker.open:
            # The question was cancelled.
            return
        if self.line is not None and self.line.bans(asker.id):
            self.network.reply(self, asked, None)
        else:
            self.network.reply(self, asked, self._store.answer(asker.id, ask.question))

    # The trainer.

    def rollouts(self) -> Collection[Rollout]:
        """Return the rollouts of a round: random tasks, with texts that hardly compress."""
        return [self._rollout() for _ in range(LOCAL_ROLLOUTS)]

    def _rollout(self) -> Rollout:
        at = self._rng.randrange(len(_TEXT) - 2 * CHARACTERS)
        texts = _TEXT[at : at + CHARACTERS], _TEXT[at + CHARACTERS : at + 2 * CHARACTERS]
        ref = TaskRef(self._rng.choice(SAPO_9.specialties), self._rng.randrange(TRAINING_TASKS))
        return Rollout(ref, tuple(Completion(text, True) for text in texts), self.id)

    def _begin_round(self) -> None:
        network = self.network
        self.round += 1
        self._began_at, self._tally, self._filled_at, self.had = network.now, network.tally, math.inf, 0
        self.handle(RoundBegan(self.round, {} if self._trained else None))
        self._trained = True
        length = self.seconds * self._rng.uniform(0.9, 1.1)
        network.at(network.now + GENERATION * length, self, Generated())
        network.at(network.now + length, self, NextRound())

    def _end_round(self) -> None:
        now, tally = self.network.now, self._tally
        if tally is self.network.tally:
            # The whole round lies within the measured time.
            tally.rounds += 1
            tally.full += self.had >= ROUND.wanted
            tally.places += min(self.had, ROUND.wanted)
            tally.waits.append(min(self._filled_at, now) - self._began_at)
        if self.runs:
            self._begin_round()

    def _deliver(self, rollout: Rollout) -> None:
        self.had += 1
        self.network.tally.delivered += 1
        self.network.tally.hostile += rollout.author in self.network.hostile
        if self.had == ROUND.wanted:
            self._filled_at = self.network.now

    def _report(self, peer: PeerId, reason: Reason) -> None:
        tally = self.network.tally
        if self.member is not None:
            self.member.report(peer, reason)
        if peer in self.network.hostile:
            tally.blamed[reason.name] += 1
        elif reason is Reason.UNSERVED and peer in self.unserved:
            tally.unserved += 1
        else:
            tally.wrong += 1
