"""A swarm of simulated nodes: rounds, churn and growth, over the daemon's own pure code. Deterministic by seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from p2p.blobs.providers import Providers
from p2p.shards.shards import Shards, authors_of, shards_of
from p2p.topic import Topic
from p2p.types import Envelope, PeerId
from swarmd.exchange import offers
from swarmd.exchange.offers import Offered
from swarmd.lab.simulation.events import Events
from swarmd.lab.simulation.fetches import OPENING, Fetch, Fetches
from swarmd.lab.simulation.figures import SwarmTally
from swarmd.lab.simulation.gossip import Gossip, Message
from swarmd.lab.simulation.internet import HOMES, Internet, Weather
from swarmd.lab.simulation.ledger import Ledger
from swarmd.lab.simulation.node import EPOCH, Round, SimulatedNode, build, new_board, offered_in

LOOK_EVERY = 10.0  # seconds between two looks at the shards, as `p2p.member` has it
JITTER = 0.1  # of a round's length, either way
AT_LEAST = 5.0  # seconds: `swarmd.exchange.gathering.AT_LEAST`, whose module runs on trio
OFFER = offers.KIND


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    """What is simulated. Seconds."""

    nodes: int
    seed: int = 0
    period: float = 60.0  # of a round
    wanted: int = 4  # J
    rollouts: int = 8  # of a set
    rollout_bytes: int = 4096  # of text
    weather: Weather = HOMES
    arriving: float = 60.0  # the nodes come one by one within so long
    session: float = 0.0  # mean time until a node goes away; 0: it stays
    absence: float = 120.0  # mean time until it is back
    authors: float | None = None  # of a shard; by default as p2p.shards.shards has it
    formed: bool = False  # the swarm is there already: each node knows into how many shards it is cut, and whom it hears
    useful: float = 0.5  # share of what is fetched that proves useful, and its author with it


class SimulatedSwarm:
    def __init__(self, plan: SwarmPlan, text: str) -> None:
        """text: what the rollouts are cut from, so that they compress as text does."""
        self.plan, self._text = plan, text
        self.rng = random.Random(plan.seed)
        self.events, self.ledger, self.tally = Events(), Ledger(), SwarmTally()
        self.internet = Internet(random.Random(self.rng.getrandbits(64)), plan.weather)
        self.nodes: list[SimulatedNode] = []
        self.gossip = Gossip(self.events, self.internet, self.ledger, random.Random(self.rng.getrandbits(64)), self._delivered)
        self._numbers: dict[PeerId, int] = {}
        self._fetches = Fetches(self.events, self.internet, self.ledger, self.gossip, self.nodes, self._numbers, self._fetched)
        self._under_way: dict[int, dict[bytes, Fetch]] = {}
        self._present_seconds = self._counted_at = 0.0
        self._swarm_id = Topic("simulated", "0" * 16).swarm_id
        for _ in range(plan.nodes):
            self.events.at(self.rng.random() * plan.arriving, self._join)

    def run(self, seconds: float) -> None:
        self.events.run(self.events.now + seconds)

    def measure(self, rounds: int) -> None:
        """Forget what was counted so far, and let so many rounds pass. What was begun and not ended within them does not count."""
        self.restart_count()
        self.run(rounds * self.plan.period)

    def expect(self, seconds: float) -> None:
        """One node more, so long from now."""
        self.events.after(seconds, self._join)

    def restart_count(self) -> None:
        self.ledger.clear()
        self._present_seconds, self._counted_at = 0.0, self.events.now
        self.tally = SwarmTally(begun=self.events.now)

    @property
    def present_seconds(self) -> float:
        """Node-seconds since `measure` began."""
        self._count_present()
        return self._present_seconds

    def _count_present(self) -> None:
        """Before the number of present nodes changes."""
        now = self.events.now
        self._present_seconds += self.gossip.present * (now - self._counted_at)
        self._counted_at = now

    @property
    def present(self) -> list[SimulatedNode]:
        """The honest nodes that are up."""
        return [node for node in self.nodes if self.gossip.up(node.number) and node.lie is None]

    # Coming and going.

    def _join(self) -> None:
        self._start(self._add())

    def intruder(self, lie: bytes) -> SimulatedNode:
        """A node more, now, that answers so when it is asked how large the swarm is, listens in shard 0 and does nothing else."""
        node = self._add()
        node.lie = lie
        self.gossip.start(node.number)
        return node

    def _add(self) -> SimulatedNode:
        number = self.internet.add()
        self.ledger.add()
        self.gossip.add()
        shards = shards_of(self.plan.nodes, self.plan.authors or authors_of()) if self.plan.formed else 1
        node = build(number, self.rng, self._swarm_id, self.events.now, self.plan.authors, shards)
        self.nodes.append(node)
        self._numbers[node.name] = number
        return node

    def _start(self, node: SimulatedNode) -> None:
        node.life += 1
        now, rng = self.events.now, node.rng
        self._under_way[node.number] = {}
        self._count_present()
        self.gossip.start(node.number)
        self.events.after(rng.random() * LOOK_EVERY, self._look, node, node.life)
        self.events.after(1.0, self._ask, node, node.life)
        self.events.after(rng.random() * self.plan.period, self._round, node, node.life)
        if self.plan.session:
            self.events.at(now + rng.expovariate(1 / self.plan.session), self._stop, node)

    def _stop(self, node: SimulatedNode) -> None:
        """Killed: what it held in memory is lost, its key and what it has seen are not."""
        node.life += 1
        self.tally.left += 1
        self._count_present()
        self.gossip.stop(node.number)
        node.held.clear()
        node.came.clear()
        node.visits.clear()
        node.board, node.providers, node.gathering, node.waiting = new_board(), Providers(), None, None
        self.events.after(node.rng.expovariate(1 / self.plan.absence), self._again, node)

    def _again(self, node: SimulatedNode) -> None:
        node.shards = Shards(node.rng, self.events.now, authors=self.plan.authors)
        self._start(node)

    # Shards.

    def _ask(self, node: SimulatedNode, life: int) -> None:
        """It asks some members what they take the swarm to be. Who is not connected is dialled, and hung up on a while later."""
        if node.life != life:
            return
        for name in node.shards.whom(self.events.now):
            other = self._numbers[name]
            if not self.gossip.up(other):
                continue
            wait = self.gossip.connect(node.number, other, "visit")
            if self.gossip.links[node.number].get(other) == "visit":
                node.visits[other] = self.events.now
            self.ledger.bytes["questions"][other] += OPENING
            self.ledger.bytes["questions"][node.number] += OPENING
            there_and_back = wait + 4 * self.internet.way(node.number, other)
            self.events.after(there_and_back, self._answered, node, life, self.nodes[other])
        self.events.after(LOOK_EVERY, self._ask, node, life)

    def _answered(self, node: SimulatedNode, life: int, other: SimulatedNode) -> None:
        if node.life == life and self.gossip.up(other.number):
            now = self.events.now
            node.shards.answered(other.name, other.shards.answer(now) if other.lie is None else other.lie, now)

    def _look(self, node: SimulatedNode, life: int) -> None:
        if node.life != life:
            return
        now, number = self.events.now, node.number
        connected = {self.nodes[other].name: str(other) for other in self.gossip.links[number]}
        node.placement = node.shards.look(now, connected, {name for name in connected if node.reputation.proved(name)})
        inside, wanted = self.gossip.inside[number], {0, *node.placement.listening}
        if inside != wanted:
            for shard in sorted(inside - wanted):
                self.gossip.leave(number, shard)
            for shard in sorted(wanted - inside):
                self.gossip.join(number, shard)
            self.gossip.tidy(number)
        self._fetches.tidy(node)
        if node.waiting is not None and node.placement.home is not None:
            body, node.waiting = node.waiting, None
            self._publish(node, body, node.placement.home)
        self.events.after(LOOK_EVERY, self._look, node, life)

    def _publish(self, node: SimulatedNode, body: bytes, shard: int) -> None:
        now = self.events.now
        message = Message(node.seal(OFFER, body, now), shard, node.number, "offers", now)
        self.gossip.publish(message)
        self.tally.published.append(message)
        self.tally.on_shard_0 += shard == 0

    def _delivered(self, number: int, message: Message, via: int) -> bool:
        node, now = self.nodes[number], self.events.now
        if node.lie is not None:
            return True
        self.ledger.work["parsed"][number] += 1
        envelope = node.inbox.receive(message.frame, EPOCH + now, self.nodes[via].name)
        if not isinstance(envelope, Envelope):
            self.tally.refused[envelope.reason] += 1
            return envelope.reason.verdict.value == "accept"
        if envelope.kind != OFFER:
            return True
        node.shards.heard(envelope.author, message.shard, now, proven=node.reputation.proved(envelope.author))
        node.providers.note(envelope.author)
        self.tally.ways.append(now - message.sent)
        found = offered_in(envelope)
        node.board.add(found)
        for item in found:
            node.came.setdefault(item.id, (message.sent, now, via))
        self._fill(node)
        return True

    # Rounds.

    def _round(self, node: SimulatedNode, life: int) -> None:
        """One ends and the next begins: its rollouts are offered, and those for the next are chosen and fetched while it lasts."""
        if node.life != life:
            return
        gathering, node.gathering = node.gathering, None
        if gathering is not None:
            self.tally.ended(gathering)
        node.round += 1
        body, blobs = node.produce(self._text, self.plan.rollouts, self.plan.rollout_bytes)
        node.board.next_round()
        for fetch in list(self._under_way[node.number].values()):
            if self.events.now - fetch.since >= AT_LEAST or node.board.too_old(fetch.item):
                self._fetches.cancel(fetch)
        node.forget()
        node.held.update(dict.fromkeys(blobs, node.round))
        if node.placement.home is None:
            node.waiting = body
        else:
            self._publish(node, body, node.placement.home)
        node.gathering = Round(self.plan.wanted, self.plan.wanted - len(self._under_way[node.number]))
        self._fill(node)
        length = self.plan.period * node.rng.uniform(1 - JITTER, 1 + JITTER)
        self.events.after(length, self._round, node, life)

    def _fill(self, node: SimulatedNode) -> None:
        """As `Gatherer` does: choose what is missing from what is on offer."""
        gathering = node.gathering
        if gathering is None or gathering.missing <= 0:
            return
        chosen: Sequence[Offered] = node.board.choose(gathering.missing, node.rng)
        gathering.missing -= len(chosen)
        for item in chosen:
            via = node.came[item.id][2] if item.id in node.came else node.number
            self.tally.chosen += 1
            self._under_way[node.number][item.id] = self._fetches.begin(node, item, self._numbers[item.author], via)

    def _fetched(self, fetch: Fetch, here: bool) -> None:
        node, now = fetch.node, self.events.now
        if self._under_way[node.number].pop(fetch.item.id, None) is None:
            return
        gathering = node.gathering
        if here:
            node.held[fetch.item.id] = node.round
            sealed, arrived, _ = node.came.get(fetch.item.id, (now, now, 0))
            if node.rng.random() < self.plan.useful:
                node.reputation.vouch(fetch.item.author, 1, EPOCH + now)
            self.tally.obtained(arrived - sealed + now - fetch.since, now - sealed, fetch.item.size)
            if gathering is not None:
                gathering.held += 1
        else:
            author = self._numbers[fetch.item.author]
            holders = sum(self.gossip.up(other.number) and fetch.item.id in other.held for other in self.nodes)
            self.tally.missed(author_up=self.gossip.up(author), holders=holders)
            if gathering is not None:
                gathering.missing += 1
                self._fill(node)
