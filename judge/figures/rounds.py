"""Normalised rounds: rewards by the number of training rounds of a peer (SAPO, section 6 and Figure 3). Pure.

Nodes come and go, so two of them cannot be compared by the time of day or the count of evaluations. The
normalised round of an evaluation is the node's own round, signed with its request: the number of updates of
its model since the node began.

Rounds are grouped into bins: 5 rounds each up to round 160, then 16 bins to each doubling. A bin's reward is
the mean of its evaluations times its rounds, so a peer that is evaluated more often does not earn more. A bin
without an evaluation takes the mean of the bin before it; bins before the first evaluation take its mean.
Cumulative reward is the sum over bins.

Rules, for one peer and one model:
1. Its arm (swarm or solo) is the one that it stated first. If it states the other arm later, it no longer
   counts.
2. A bin counts when it is over: at the first evaluation of a later bin. A later evaluation for an earlier bin
   is ignored, so a figure that was shown never changes.
3. After more than MISSED_BINS bins without an evaluation the peer no longer counts. This includes a peer
   whose first evaluation comes that late.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

BIN_ROUNDS = 5
PER_DOUBLING = 16
MISSED_BINS = 16
# Later rounds are not compared.
MAX_ROUND = BIN_ROUNDS * 2**20
# Bins that end at round 40, 160, 640, 2,560 and 10,240; the anytime test is computed at these
# (judge/figures/intervals.py).
HORIZONS = (7, 31, 63, 95, 127)


def bin_of(round_number: int) -> int:
    steps = round_number // BIN_ROUNDS
    shift = max(0, steps.bit_length() - PER_DOUBLING.bit_length())
    return PER_DOUBLING * shift + (steps >> shift)


@cache
def bin_end(bin: int) -> int:
    """Return the first round after the bin."""
    shift = max(0, bin // PER_DOUBLING - 1)
    return ((bin - PER_DOUBLING * shift + 1) << shift) * BIN_ROUNDS


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """The progress of one peer with one model."""

    sharing: str  # "swarm" or "solo", as the peer stated first
    bin: int  # the newest bin, which is not over yet
    answers: int = 0  # in that bin
    reward: float = 0.0  # sum of the rewards in that bin
    earned: float | None = None  # reward in all bins that are over; None: there is none yet
    counts: bool = True


def advance(
    before: PeerProgress | None, sharing: str, round_number: int, reward: float
) -> tuple[PeerProgress, Mapping[int, float]]:
    """Return the progress after one more evaluation, and the bins that it closes.

    The value of a bin is the cumulative reward at its end, divided by its rounds: in [0, 1].
    """
    bin = bin_of(round_number) if round_number < MAX_ROUND else bin_of(MAX_ROUND) + MISSED_BINS
    if before is None:
        return PeerProgress(sharing, bin, 1, reward, counts=bin <= MISSED_BINS), {}
    if not before.counts or bin < before.bin:
        return before, {}
    if sharing != before.sharing or bin > before.bin + MISSED_BINS + 1:
        return replace(before, counts=False), {}
    if bin == before.bin:
        return replace(before, answers=before.answers + 1, reward=before.reward + reward), {}
    mean = before.reward / before.answers
    earned, behind = (0.0, 0) if before.earned is None else (before.earned, before.bin)
    closed = {}
    for over in range(behind, bin):
        earned += mean * (bin_end(over) - (bin_end(over - 1) if over else 0))
        closed[over] = earned / bin_end(over)
    return PeerProgress(sharing, bin, 1, reward, earned), closed
