"""Results of a simulation, per node and round."""

from dataclasses import dataclass
from statistics import fmean

from swarmd.lab.simulation.figures import quantile
from swarmd.lab.simulation.ledger import KINDS
from swarmd.lab.simulation.swarm import SimulatedSwarm


@dataclass(frozen=True, slots=True)
class SwarmReport:
    """Means over the nodes unless said. A round is the plan's period. Bytes are those received."""

    nodes: int
    shards: float
    delivered: float  # share of chosen rollouts that were held in time
    offers_delivered: float  # share of (offer, member of its shard) that met within a minute
    rounds_full: float  # share of rounds that got all J
    way_p50: float  # seconds from an offer's sealing until one who listens has it
    way_p95: float
    delay_p50: float  # of what was chosen: that, and from choosing to holding
    delay_p95: float
    age_p50: float  # seconds from the offer's sealing to holding, the wait on the board included
    bytes_per_round: float
    bytes_p95: float  # of the nodes
    bytes_by_kind: dict[str, float]
    messages_per_round: float  # read, of any kind
    parsed_per_round: float  # frames that the inbox looked into, one signature each
    copies: float  # of each frame received, by who received it
    bytes_per_trained: float  # over text trained on, uncompressed
    bytes_per_compressed: float  # over blobs fetched
    compression: float
    digest: str


def report(swarm: SimulatedSwarm, rounds: int) -> SwarmReport:
    """Of what `swarm.measure(rounds)` measured."""
    ledger, tally, plan = swarm.ledger, swarm.tally, swarm.plan
    present = swarm.present
    seconds = swarm.present_seconds
    per = plan.period / seconds  # of one node and round
    by_kind = {kind: sum(ledger.bytes[kind]) * per for kind in KINDS}
    settled = [message for message in tally.published if swarm.events.now - message.sent >= min(60.0, plan.period / 2)]
    expected = sum(message.expected for message in settled)
    reached = sum(min(message.expected, len(message.seen) - 1) for message in settled)
    trained = len(tally.delays) * plan.rollout_bytes
    own = [ledger.of(node.number) / rounds for node in present]
    ended = len(tally.delays) + tally.failed
    return SwarmReport(
        nodes=len(present),
        shards=fmean(node.shards.shards for node in present),
        delivered=len(tally.delays) / ended if ended else 0.0,
        offers_delivered=reached / expected if expected else 0.0,
        rounds_full=tally.rounds_full / tally.rounds if tally.rounds else 0.0,
        way_p50=quantile(tally.ways, 0.5),
        way_p95=quantile(tally.ways, 0.95),
        delay_p50=quantile(tally.delays, 0.5),
        delay_p95=quantile(tally.delays, 0.95),
        age_p50=quantile(tally.ages, 0.5),
        bytes_per_round=sum(by_kind.values()),
        bytes_p95=quantile(own, 0.95),
        bytes_by_kind=by_kind,
        messages_per_round=sum(ledger.work["messages"]) * per,
        parsed_per_round=sum(ledger.work["parsed"]) * per,
        copies=ledger.copies / ledger.firsts if ledger.firsts else 0.0,
        bytes_per_trained=ledger.total() / trained if trained else 0.0,
        bytes_per_compressed=ledger.total() / tally.blob_bytes if tally.blob_bytes else 0.0,
        compression=trained / tally.blob_bytes if tally.blob_bytes else 0.0,
        digest=swarm.events.digest(),
    )
