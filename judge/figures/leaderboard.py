"""Scores of peers and their order on the leaderboard. Pure.

The score is the mean reward (pass@1 if rewards are 0 or 1) over a peer's last WINDOW_QUESTIONS, because a
model changes while it trains. A question that was not answered in time counts as wrong, so skipping hard ones
gains nothing. Peers are ranked by the lower end of the interval that is valid at all moments together
(`intervals.always`): two lucky answers do not beat 90 right ones of 100, and collecting keys does not pay. Of
1,000 keys of a node that is right in 60 %, the luckiest is ranked by 0.69; by Wilson's interval it would be
0.80. Peers with fewer than LISTED_ANSWERS answers are not on the board.

Ranks that differ only by chance are shown as ties. Every listed peer gets an exact interval (Clopper and
Pearson), wide enough that all intervals are right at once with 95 % (Šidák). A peer is certainly behind the
peers whose interval lies above its own, and certainly ahead of those whose interval lies below. So its true
rank lies in between, for all peers at once (Klein, Wright and Wieczorek, JRSS C 69, 2020). This is valid for
one look at the board, not for repeated looks.

Nodes also state how many rollouts they share and use, but nothing proves these counts. Learners and teachers
are therefore chosen by rank: keys and counts are free, ranks are not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from judge.figures.intervals import LEVEL, Interval, always, wilson
from p2p.types import PeerId
from swarmd.tasks.answers import added, pass_at

Reals = NDArray[np.float64]


# First and last rank that a peer may have.
RankRange = tuple[int, int]


def rank_ranges(peers: Mapping[tuple[float, int], int]) -> Mapping[tuple[float, int], RankRange]:
    """Return the rank range of each score: a score is (sum of the rewards, number of questions).

    peers: the number of peers with each score.
    """
    if not peers:
        return {}
    right, n, many = (
        np.array(column, dtype=float)
        for column in zip(*((*score, m) for score, m in peers.items()), strict=True)
    )
    tail = (1 - (1 - LEVEL) ** (1 / many.sum())) / 2
    with np.errstate(invalid="ignore"):
        low = np.where(right > 0, betaincinv(right, n - right + 1, tail), 0.0)
        high = np.where(right < n, betaincinv(right + 1, n - right, 1 - tail), 1.0)
    above, below = _weight_above(low, many, high), _weight_above(-high, many, -low)
    ranges = zip((1 + above).astype(int).tolist(), (many.sum() - below).astype(int).tolist(), strict=True)
    return dict(zip(peers, ranges, strict=True))


def _weight_above(values: Reals, weights: Reals, than: Reals) -> Reals:
    """For each threshold in `than`, return the total weight of the values above it."""
    order = np.argsort(values)
    sums = np.concatenate([[0.0], np.cumsum(weights[order])])
    return np.asarray(sums[-1] - sums[np.searchsorted(values[order], than, side="right")])


WINDOW_QUESTIONS = 100
LISTED_ANSWERS = 10
BOARD_PAGE_PEERS = 50
CURVE_POINTS = 48
# The guarantees of each tier, for the pages and the JSON.
TIERS = MappingProxyType(
    {
        "reported": (
            "Reported: the node answered over the network. This proves that the holder of the key sent these"
            " answers in time. It proves nothing about a model: a node can work the right answers out without"
            " one."
        ),
        "verified": (
            "Verified: the node uploaded its weights, and the judge ran them itself."
            " These weights, named by their SHA-256, scored so on these questions, which were drawn"
            " afterwards. It does not prove that this node trained them."
        ),
    }
)


@dataclass(frozen=True, slots=True)
class ScoreTally:
    right: float  # sum of the rewards; with rewards of 0 and 1, the number of right answers
    answers: int

    @property
    def share(self) -> float:
        return self.right / self.answers if self.answers else 0.0

    @property
    def interval(self) -> Interval:
        return wilson(self.right, self.answers)

    @property
    def rank_by(self) -> float:
        return always(self.right, self.answers).low


@dataclass(frozen=True, slots=True)
class Record:
    """All stored figures of one peer."""

    peer: PeerId
    model: str
    first_seen: float  # seconds since the epoch, by the judge's clock
    last_seen: float
    answered: int  # questions answered, over the peer's lifetime
    unanswered: int  # questions not answered in time
    reward: float  # sum of rewards, over the peer's lifetime
    score: ScoreTally  # over the last WINDOW_QUESTIONS
    recent: Sequence[
        tuple[str, float]
    ] = ()  # (specialty, reward) of the last WINDOW_QUESTIONS questions, oldest first
    curve: Sequence[tuple[int, float]] = ()  # (questions, reward so far), evenly spaced over the lifetime
    # The attributes that the peer last stated (judge/types.py).
    said: Mapping[str, Any] = field(default_factory=dict)
    # (sampled answers, right ones) of each recent question (last WINDOW_QUESTIONS) with several answers.
    samples: Sequence[tuple[int, int]] = ()
    # Its newest verified evaluation (judge/figures/verification.py).
    verified: Mapping[str, Any] | None = None

    @property
    def tier(self) -> str:
        return "reported" if self.verified is None else "verified"

    @property
    def always(self) -> ScoreTally:
        """The tally of all its questions that count, over its lifetime."""
        return ScoreTally(self.reward, self.answered + self.unanswered)

    @property
    def pass_at(self) -> Mapping[int, tuple[float, int]]:
        """Pass@k for k = 1, 2, 4, 8 over the questions with at least k samples, with their number."""
        shares = {
            k: [pass_at(k, answers, right) for answers, right in self.samples if answers >= k]
            for k in (1, 2, 4, 8)
        }
        return {k: (sum(each) / len(each), len(each)) for k, each in shares.items() if each}


@dataclass(frozen=True, slots=True)
class BoardView:
    """Filter, order and page of a leaderboard request."""

    after: int = 0  # number of matching peers before this page
    limit: int = BOARD_PAGE_PEERS
    search: str = ""  # text to find in names and id
    model: str = ""
    tier: str = ""  # one of TIERS
    seen_since: float = 0.0  # seconds since the epoch
    sort: str = "rank"  # one of the values of BoardQuery (judge/api/reading.py)
    curves: int = 0  # points of each peer's curve; 0: no curves
    whole: bool = False  # whether to add the newest answers by specialty


@dataclass(frozen=True, slots=True)
class Standing:
    rank: int
    record: Record
    # The range of ranks that chance cannot exclude (`rank_ranges`); None if it was not requested.
    ties: RankRange | None = None


@dataclass(frozen=True, slots=True)
class LeaderboardPage:
    """One page of the leaderboard."""

    standings: Sequence[Standing]
    after: int  # number of peers before this page
    listed: int  # peers on all pages
    unlisted: int  # peers with too few answers
    answers: int  # sum over all peers
    matching: int  # listed peers that match the view
    models: Sequence[str] = ()  # the most frequent models

    @property
    def more_after(self) -> int | None:
        end = self.after + len(self.standings)
        return end if end < self.matching and self.standings else None


def tally(answers: Sequence[tuple[str, float]]) -> ScoreTally:
    return ScoreTally(added(*(reward for _, reward in answers)), len(answers))


def by_specialty(answers: Sequence[tuple[str, float]]) -> Mapping[str, ScoreTally]:
    names = sorted({name for name, _ in answers})
    return {of: tally([(name, reward) for name, reward in answers if name == of]) for of in names}


def curve_step(answered: int, points: int) -> int:
    """Return the smallest power of two that has at most `points` multiples among 1..answered.

    With powers of two, the multiples of a later, larger step are among the multiples of this step.
    """
    return 1 << (max(1, -(-answered // points)) - 1).bit_length()


def curve_numbers(answered: int, points: int = CURVE_POINTS) -> tuple[int, ...]:
    """Choose the answer numbers, of 1..answered, that a curve of at most `points` points shows.

    They are evenly spaced, and the last is included. Pruning keeps them (judge/store/pruning.py).
    """
    step = curve_step(answered, points - 1)
    return tuple(sorted({*range(step, answered + 1, step), answered} - {0}))
