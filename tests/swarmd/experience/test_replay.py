"""The pool with replay, its strategies and its guard, tested over random histories."""

import math
import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.types import PeerId
from swarmd.experience.batch import SharingSampler
from swarmd.experience.pool import Pool, PoolEntry, PoolLimits
from swarmd.experience.replay_schedule import FIRST_REST_ROUNDS, GuardState, ReplaySchedule
from swarmd.experience.sampling import Replay
from swarmd.experience.strategies import Sharing
from swarmd.types import Completion, Rollout, Scored, TaskRef, Tokens

ME = PeerId("me")
REWARDS = ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0))


def scored(n: int, rewards: tuple[float, ...] = (0.0, 1.0), author: str = "me", born: int = 1) -> Scored:
    completions = tuple(Completion(str(r), True) for r in rewards)
    tokens = Tokens(((1,), (2,)), ((-0.5,), (-0.25,))) if author == "me" else None
    return Scored(Rollout(TaskRef("bf", n), completions, PeerId(author)), "q", rewards, born, tokens)


def numbers(pool: Pool) -> list[int]:
    return [s.rollout.ref.n for s in pool]


def fill(pool: Pool, rollouts: list[Scored]) -> None:
    """Add the rollouts one by one, in the order of their arrival."""
    for s in rollouts:
        if s.rollout.author == ME:
            pool.add_own([s])
        else:
            pool.add([s])


histories = st.lists(
    st.tuples(st.sampled_from(["me", "a", "b", "c"]), st.sampled_from(REWARDS)), max_size=60
).map(lambda drawn: [scored(n, rewards, author) for n, (author, rewards) in enumerate(drawn)])
shares = st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.8])


@settings(derandomize=True, max_examples=150)
@given(histories, st.integers(1, 20), shares, shares, shares)
def test_the_pool_never_exceeds_a_limit(
    history: list[Scored], capacity: int, delta: float, crowd: float, each: float
) -> None:
    pool = Pool(9, capacity, PoolLimits(ME, 9, delta, crowd, each))
    for s in history:
        fill(pool, [s])
        authors = Counter(x.rollout.author for x in pool)
        assert len(pool) <= capacity and authors.total() - authors[ME] <= math.floor(crowd * capacity)
        assert all(n <= max(1, math.floor(each * capacity)) for author, n in authors.items() if author != ME)
        assert numbers(pool) == sorted(numbers(pool)), "the oldest rollouts were not dropped first"
        if s.rollout.author == ME or (s.informative and math.floor(crowd * capacity)):
            assert list(pool)[-1] == s, "the latest rollout was dropped"
        assert pool.external_share == ((authors.total() - authors[ME]) / len(pool) if len(pool) else 0.0)


@settings(derandomize=True, max_examples=150)
@given(histories, st.integers(1, 20), shares)
def test_positive_bias_keeps_the_latest_and_of_the_rest_the_latest_informative(
    history: list[Scored], capacity: int, delta: float
) -> None:
    pool = Pool(9, capacity, PoolLimits(ME, 9, delta))
    fill(pool, history)
    taken = [s for s in history if s.rollout.author == ME or s.informative]
    older = math.floor(delta * capacity)
    fresh = taken[len(taken) - min(len(taken), capacity - older) :]
    rest = [s for s in taken[: len(taken) - len(fresh)] if s.rewards == (0.0, 1.0)]
    assert list(pool) == [*rest[max(0, len(rest) - older) :], *fresh]


def test_an_author_over_its_share_loses_its_own_oldest_rollouts() -> None:
    pool = Pool(9, 10, PoolLimits(ME, 9, author_share=0.2))
    fill(
        pool,
        [
            scored(1, author="a"),
            scored(2),
            scored(3, author="a"),
            scored(4, author="a"),
            scored(5, author="b"),
        ],
    )
    assert numbers(pool) == [2, 3, 4, 5]


def test_an_authors_excess_displaces_no_other_authors_rollouts() -> None:
    pool = Pool(9, 10, PoolLimits(ME, 9, external_share=0.5, author_share=0.2))
    pool.add(scored(n, author="b" if n < 2 else "a") for n in range(7))
    assert numbers(pool) == [0, 1, 5, 6]


def test_local_and_external_rollouts_have_separate_age_limits() -> None:
    pool = Pool(2, 10, PoolLimits(ME, 4))
    fill(pool, [scored(1), scored(2, author="a")])
    for t, there in ((3, [1, 2]), (4, [1]), (5, [1]), (6, [])):
        pool.forget(t)
        assert numbers(pool) == there


def test_later_answers_to_the_same_question_replace_earlier_ones() -> None:
    pool = Pool(9, 10, PoolLimits(ME, 9))
    fill(pool, [scored(1, born=1), scored(2, born=1), scored(1, born=5)])
    assert [(s.rollout.ref.n, s.round) for s in pool] == [(2, 1), (1, 5)]
    fill(pool, [scored(3, author="a", born=1), scored(3, author="a", born=5)])
    assert [s.round for s in pool if s.rollout.ref.n == 3] == [1], (
        "another author refreshed its earlier rollout"
    )


def test_an_external_rollout_keeps_the_log_probabilities_of_its_first_use() -> None:
    pool = Pool(9, 10, PoolLimits(ME, 9))
    mine, theirs = scored(1), scored(2, author="a")
    fill(pool, [mine, theirs])
    asked: list[Scored] = []

    def now(batch: object, value: float) -> list[Tokens]:
        asked.extend(batch)
        return [Tokens(((7,), (8,)), ((value,), (value,))) for _ in batch]

    first = pool.remember([mine, theirs], partial(now, value=-1.0))
    again = pool.remember(pool.snapshot(), partial(now, value=-2.0))
    assert asked == [theirs]
    assert first[0] == mine and first[1].tokens is not None and first[1].tokens.logprobs == ((-1.0,), (-1.0,))
    assert list(again) == list(first)


def test_a_saved_pool_is_restored_unchanged() -> None:
    pool = Pool(9, 10, PoolLimits(ME, 9))
    fill(pool, [scored(n) for n in range(6)])
    pool.use(pool.snapshot()[:3])
    pool.forget(2)
    pool.use(pool.snapshot()[:1])
    again = Pool(9, 10, PoolLimits(ME, 9))
    again.restore(pool.kept(), pool.updates, pool.used, pool.before)
    assert again.kept() == pool.kept() and again.updates == 2 and again.before == {2: 1}
    assert pool.used == (), "a local rollout was used up"
    smaller = Pool(9, 4, PoolLimits(ME, 9))
    smaller.restore(pool.kept(), pool.updates, pool.used)
    assert numbers(smaller) == [2, 3, 4, 5]
    off = Pool(9)
    off.restore(pool.kept(), pool.updates, pool.used)
    assert len(off) == 0, "with replay switched off, a local rollout was available again"
    off.restore([], 0, (), {n: n for n in range(30)})
    assert off.before == {n: n for n in range(20, 30)}, "the wrong rounds were restored"


@settings(derandomize=True, max_examples=100)
@given(
    st.lists(st.integers(0, 3), max_size=20),
    st.integers(0, 12),
    st.integers(0, 9),
)
def test_a_batch_has_no_duplicates_and_as_many_rollouts_as_possible(
    uses: list[int], batch: int, seed: int
) -> None:
    kept = [PoolEntry(scored(n), u, u) for n, u in enumerate(uses)]
    pool = Pool(9, 99, PoolLimits(ME, 9))
    pool.restore(kept, 0, ())
    sample = Replay(pool, ReplaySchedule(4), batch, SharingSampler(), fresh=2)
    drawn = [s.rollout.ref.n for s in sample([], pool.snapshot(), random.Random(seed))]
    assert len(drawn) == len(set(drawn)) == min(batch, len(kept))


def replay(batch: int, updates: int = 4) -> tuple[Pool, Replay]:
    pool = Pool(9, 8, PoolLimits(ME, 9))
    schedule = ReplaySchedule(updates)
    return pool, Replay(pool, schedule, batch, SharingSampler(n_local=2, n_external=2), fresh=2)


def test_local_rollouts_may_be_more_than_half_of_a_batch() -> None:
    pool = Pool(9, 40, PoolLimits(ME, 9))
    fill(pool, [*(scored(n) for n in range(24)), *(scored(24 + n, author="abcde"[n % 5]) for n in range(10))])
    sample = Replay(pool, ReplaySchedule(4), 8, SharingSampler(), fresh=2)
    own = [
        sum(s.rollout.author == ME for s in sample([], pool.snapshot(), random.Random(seed)))
        for seed in range(20)
    ]
    assert max(own) > 5 and 4 < sum(own) / 20 < 7


def test_a_loud_author_gets_no_more_than_an_equal_share_of_a_batch() -> None:
    pool = Pool(9, 40, PoolLimits(ME, 9))
    fill(pool, [scored(n, author="a" if n < 24 else ("b", "c", "me", "me")[n % 4]) for n in range(40)])
    sample = Replay(pool, ReplaySchedule(4), 8, SharingSampler(), fresh=2)
    drawn = [sample([], pool.snapshot(), random.Random(seed)) for seed in range(20)]
    assert max(sum(s.rollout.author == "a" for s in batch) for batch in drawn) == 3


def test_an_author_whose_text_rarely_passes_the_gate_is_rarely_drawn() -> None:
    pool = Pool(9, 40, PoolLimits(ME, 9))
    fill(pool, [*(scored(n) for n in range(8)), *(scored(8 + n, author="ab"[n % 2]) for n in range(8))])
    sharing = Sharing(pass_rates={PeerId("a"): 1 / 8})
    sample = Replay(pool, ReplaySchedule(4), 4, SharingSampler(), 2, sharing)
    drawn = [s.author for seed in range(500) for s in sample([], pool.snapshot(), random.Random(seed))]
    assert 0 < drawn.count(PeerId("a")) < 0.1 * drawn.count(PeerId("b"))


def test_while_replay_rests_the_batch_is_the_papers() -> None:
    pool, sample = replay(8)
    fill(pool, [scored(1), scored(2, author="a", born=1), scored(3, author="a", born=4)])
    pool.forget(6)
    local = [scored(8, born=6), scored(9, born=6)]
    pool.add_own(local)
    sample.schedule.state = GuardState(resting=3)
    assert [s.rollout.ref.n for s in sample(local, pool.snapshot(), random.Random(0))] == [8, 9, 3]


@pytest.mark.parametrize(
    ("scheduled", "seen", "trips"),
    [
        # By the share of clipped ratios: a burst, a slow rise, noise.
        (partial(ReplaySchedule, 4), [(0.2, 0.0)], True),
        (partial(ReplaySchedule, 4), [(0.1, 0.0)] * 40, True),
        (partial(ReplaySchedule, 4), [(0.06, 0.0), (0.13, 0.0), (0.05, 0.0)] * 100, False),
        # By drift alone: the policy has moved away from the sampling policy, although few ratios are clipped.
        (partial(ReplaySchedule, 4, drift_limit=0.1), [(0.0, 0.25)], True),
        (partial(ReplaySchedule, 4, drift_limit=0.1), [(0.0, 0.12)] * 40, True),
        (partial(ReplaySchedule, 4), [(0.05, 0.25)] * 40, False),
        # One update a round is never guarded.
        (ReplaySchedule, [(1.0, 1.0)] * 50, False),
    ],
)
def test_the_guard_acts_on_a_burst_and_a_slow_rise_but_not_on_noise(
    scheduled: Callable[[], ReplaySchedule], seen: list[tuple[float, float]], trips: bool
) -> None:
    schedule = scheduled()
    updates = schedule.updates
    assert any(schedule.observe(*each) for each in seen) is trips
    after = (1, FIRST_REST_ROUNDS) if trips else (updates, 0)
    assert (schedule.updates, schedule.state.resting) == after


def test_rests_double_so_that_aggressive_settings_become_a_plain_run() -> None:
    schedule, updates = ReplaySchedule(4), []
    for _ in range(2000):
        updates.append(schedule.updates)
        schedule.observe(0.5 if schedule.updates > 1 else 0.0)
    assert updates[:10] == [4, *[1] * FIRST_REST_ROUNDS, 2], (
        "the updates were not halved after the first rest"
    )
    assert updates.count(2) <= 10 and max(updates[1:]) == 2


def test_the_next_rest_is_shorter_after_a_long_healthy_time() -> None:
    schedule = ReplaySchedule(4)
    for _ in range(2):
        assert schedule.observe(0.5)
        while schedule.resting:
            assert not schedule.observe(0.0)
    healthy = []
    while schedule.state.rests:
        healthy.append(schedule.state.rests)
        schedule.observe(0.05)
    assert healthy == [2] * 2 * FIRST_REST_ROUNDS + [1] * FIRST_REST_ROUNDS  # each as long as its rest was
