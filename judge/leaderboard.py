"""From recorded answers to a ranking. Pure.

A model changes while it trains, so what counts is its newest answers: pass@1 is over the last WINDOW of them. Peers are ranked by the
lower end of Wilson's interval: two lucky answers do not beat ninety right ones of a hundred.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from judge.statistics import Interval, wilson
from p2p.types import PeerId

WINDOW = 100  # answers
CURVE_POINTS = 48


@dataclass(frozen=True, slots=True)
class Tally:
    right: int
    answers: int

    @property
    def share(self) -> float:
        return self.right / self.answers if self.answers else 0.0

    @property
    def interval(self) -> Interval:
        return wilson(self.right, self.answers)


@dataclass(frozen=True, slots=True)
class Record:
    """What the store knows of one peer."""

    peer: PeerId
    model: str
    first_seen: float  # seconds since the epoch, by the judge's clock
    last_seen: float
    answered: int  # since the beginning
    unanswered: int  # questions it let pass: they count as nothing, but they are shown
    reward: float  # sum since the beginning
    recent: Sequence[tuple[str, float]]  # (specialty, reward) of the last WINDOW answers, oldest first
    curve: Sequence[tuple[int, float]]  # (answers, reward so far), evenly spaced since the beginning


@dataclass(frozen=True, slots=True)
class Standing:
    rank: int
    record: Record
    recent: Tally
    specialties: Mapping[str, Tally]


def rank(records: Iterable[Record]) -> list[Standing]:
    """Best first: by the lower end of the interval, then pass@1, then the peer id (so that equal peers keep their order)."""
    tallies = [(record, tally(record.recent)) for record in records]
    tallies.sort(key=lambda entry: (-entry[1].interval.low, -entry[1].share, entry[0].peer))
    return [Standing(place, record, recent, by_specialty(record.recent)) for place, (record, recent) in enumerate(tallies, start=1)]


def tally(answers: Sequence[tuple[str, float]]) -> Tally:
    return Tally(sum(reward >= 1.0 for _, reward in answers), len(answers))


def by_specialty(answers: Sequence[tuple[str, float]]) -> Mapping[str, Tally]:
    return {name: tally([a for a in answers if a[0] == name]) for name in sorted({name for name, _ in answers})}


def curve_numbers(answered: int, points: int = CURVE_POINTS) -> tuple[int, ...]:
    """Which answers, of 1..answered, a curve of at most `points` points shows: evenly spaced, the last one always."""
    if answered <= points:
        return tuple(range(1, answered + 1))
    return tuple(sorted({round(1 + i * (answered - 1) / (points - 1)) for i in range(points)}))
