"""Counters of a simulation."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2p.types import Reason
from swarmd.lab.simulation.gossip import Message
from swarmd.lab.simulation.node import Round


@dataclass(slots=True)
class SwarmTally:
    """Counted while it runs."""

    begun: float = 0.0
    published: list[Message] = field(default_factory=list)
    on_shard_0: int = 0
    chosen: int = 0
    ways: list[float] = field(default_factory=list)  # offer sealed to offer here
    delays: list[float] = field(default_factory=list)  # offer sealed to offer here, and chosen to held
    ages: list[float] = field(default_factory=list)  # offer sealed to held
    blob_bytes: int = 0  # fetched, as they travel
    failed: int = 0
    failed_author_gone: int = 0
    failed_with_holders: int = 0  # though somebody in the swarm had it
    rounds: int = 0
    rounds_full: int = 0
    left: int = 0
    refused: Counter[Reason] = field(default_factory=Counter)

    def ended(self, gathering: Round) -> None:
        self.rounds += 1
        self.rounds_full += gathering.held >= gathering.wanted

    def obtained(self, delay: float, age: float, size: int) -> None:
        self.blob_bytes += size
        self.delays.append(delay)
        self.ages.append(age)

    def missed(self, *, author_up: bool, holders: int) -> None:
        self.failed += 1
        self.failed_author_gone += not author_up
        self.failed_with_holders += holders > 0


def quantile(values: Sequence[float], q: float) -> float:
    """Of sorted or unsorted values, nearest rank; 0.0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0
