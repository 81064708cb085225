"""The ranges of ranks that are compatible with chance."""

import numpy as np
from scipy import stats

from judge.figures.leaderboard import (
    LEVEL,
    LISTED_ANSWERS,
    WINDOW_QUESTIONS,
    ScoreTally,
    rank_ranges,
)


def test_overlapping_peers_are_tied() -> None:
    scores = {(90, 100): 1, (50, 100): 1, (45, 100): 2, (10, 100): 1, (10, 10): 1}
    ranges = rank_ranges(scores)
    found = {score: ranges[score] for score in scores}
    apart = {(90, 100): (1, 2), (50, 100): (2, 5), (45, 100): (2, 5), (10, 100): (6, 6)}
    assert found == apart | {(10, 10): (1, 5)}  # ten answers do not separate luck from skill
    assert rank_ranges({(3, 10): 1})[3, 10] == (1, 1)
    assert rank_ranges({(0, 20): 1, (4, 20): 1})[4, 20] == (1, 2), (
        "a peer without a right answer was ranked above another"
    )
    rank_ranges({})


def test_two_peers_are_ranked_apart_if_their_exact_intervals_are_disjoint() -> None:
    each = (1 - LEVEL) ** 0.5  # Šidák's correction for two intervals
    for right in range(21):
        above = (
            stats.binomtest(right, 20).proportion_ci(each, "exact").low
            > stats.binomtest(4, 20).proportion_ci(each, "exact").high
        )
        assert (
            rank_ranges({(right, 20): 1, (4, 20): 1} if right != 4 else {(4, 20): 2})[right, 20][1] == 1
        ) is bool(above)


def test_equal_peers_are_rarely_ranked_apart() -> None:
    rng, apart = np.random.default_rng(1), 0
    for _ in range(200):
        scores, counts = np.unique(rng.binomial(100, 0.1, 100), return_counts=True)
        ranges = rank_ranges(
            {(int(right), 100): int(many) for right, many in zip(scores, counts, strict=True)}
        )
        apart += any(ranges[int(right), 100] != (1, 100) for right in scores)
    assert apart <= 0.05 * 200


def test_the_luckiest_of_many_equal_keys_ranks_little_above_the_average() -> None:
    """A node that is right in 60 % has 200 keys, since keys cost nothing.

    Each key's rank is read after every question from the tenth on.
    """
    rng, ranked, shown = np.random.default_rng(0), [], []
    for _ in range(21):
        right = (rng.random((200, WINDOW_QUESTIONS)) < 0.6).cumsum(axis=1).max(axis=0)
        tallies = [ScoreTally(int(right[n - 1]), n) for n in range(LISTED_ANSWERS, WINDOW_QUESTIONS + 1)]
        ranked.append(max(tally.rank_by for tally in tallies))
        shown.append(max(tally.interval.low for tally in tallies))
    assert np.median(ranked) < 0.66 < 0.72 < np.median(shown)
