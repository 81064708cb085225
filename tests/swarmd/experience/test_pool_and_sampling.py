import random
from dataclasses import replace
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.types import PeerId
from swarmd.experience.advantages import within_group
from swarmd.experience.batch import SharingSampler
from swarmd.experience.pool import MAX_USED, Pool, PoolLimits, too_old
from swarmd.experience.sampling import shuffled
from swarmd.types import Completion, TaskRef
from tests.swarmd.experience.conftest import scored


def test_a_rollout_can_be_drawn_until_it_is_older_than_max_age() -> None:
    pool = Pool(max_age=2)
    pool.add([scored(1, 0, 1, heard=5)])
    for now, there in ((5, 1), (6, 1), (7, 1), (8, 0)):
        pool.forget(now)
        assert len(pool) == there and too_old(5, now, 2) is not bool(there)


def test_without_replay_each_rollout_is_trained_on_once() -> None:
    pool = Pool(max_age=2)
    first, second = scored(1, 0, 1), scored(2, 0, 1)
    pool.add([first, second])
    pool.use([first])
    assert list(pool.snapshot()) == [second], "a rollout that was trained on was available again"
    assert pool.add([first, replace(second, round=2)]) == 0
    pool.forget(9)
    assert len(pool) == 0
    again = Pool(max_age=2)
    again.restore(pool.kept(), pool.updates, pool.used)
    for each in (pool, again):  # also after a restart
        late, unused = replace(first, round=9), replace(second, round=9)
        assert each.add([late, unused]) == 1 and list(each.snapshot()) == [unused]


def test_the_memory_of_used_rollouts_is_bounded() -> None:
    pool = Pool(max_age=1)
    pool.restore([], 0, [n.to_bytes(8) for n in range(MAX_USED)])
    batch = [scored(n, 0, 1) for n in range(5)]
    pool.add(batch)
    pool.use(batch)
    assert len(pool.used) == MAX_USED and pool.used[0] == (5).to_bytes(8)


def test_staleness_is_the_number_of_updates_since_a_rollout_was_heard() -> None:
    pool = Pool(max_age=2)
    for now in (1, 2, 3):
        pool.forget(now)
        pool.use([])
        pool.use([])
    pool.add([scored(n, 0, 1, heard=n) for n in (1, 2, 3)])
    assert [kept.since for kept in pool.kept()] == [0, 2, 4]


def test_the_same_experience_counts_once_even_under_another_text() -> None:
    pool = Pool(max_age=2)
    assert pool.add([scored(1, 0, 1), scored(1, 1, 1), scored(1, 0, 1, author="third")]) == 2
    assert (PeerId("other"), TaskRef("bf", 1)) in pool


def test_over_its_capacity_the_pool_drops_the_oldest_rollouts() -> None:
    pool = Pool(max_age=9, capacity=3)
    pool.add([scored(n, 0, 1) for n in range(5)])
    assert [s.rollout.ref.n for s in pool.snapshot()] == [2, 3, 4]


def test_the_uses_of_a_rollout_are_counted() -> None:
    pool = Pool(max_age=2, limits=PoolLimits(PeerId("me"), 2))
    first, second = scored(1, 0, 1), scored(2, 0, 1)
    pool.add([first, second])
    assert [k.uses for k in pool.use([first, scored(9, 0, 1, author="me")])] == [0]
    assert [(k.uses, k.last_use) for k in pool.use([first, second])] == [(1, 1), (0, 0)]
    assert [(k.uses, k.last_use) for k in pool.use([first, second])] == [(2, 2), (1, 2)] and pool.updates == 3


def test_external_rollouts_without_advantage_are_dropped_but_local_ones_kept() -> None:
    batch = SharingSampler()(
        [scored(1, 0, 0, author="me")], [scored(2, 1, 1), scored(3, 0, 1)], random.Random(0)
    )
    assert [s.rollout.ref.n for s in batch] == [1, 3]
    assert Pool(2).add([scored(1, 1, 1)]) == 1, "with another `[sharing] take`, the rollout must stay"
    assert Pool(2, limits=PoolLimits(PeerId("me"), 2)).add([scored(1, 1, 1)]) == 0


def test_the_kept_completions_do_not_depend_on_sender_and_order() -> None:
    texts = [Completion(text, True) for text in ["a", "a", "a", "b", "c", "d"]]
    orders = {shuffled(random.Random(seed).sample(texts, 6), "salt") for seed in range(20)}
    assert len(orders) == 1 and sorted(c.text for c in orders.pop()) == ["a", "a", "a", "b", "c", "d"]


def test_each_completion_is_equally_likely_to_be_kept() -> None:
    texts = [Completion(text, True) for text in "aaaaaab"]
    first = sum(c.text == "b" for salt in range(2000) for c in shuffled(texts, str(salt))[:3])
    assert first / 2000 == pytest.approx(3 / 7, abs=0.03)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 6), st.integers(0, 6), st.integers(0, 9))
def test_a_batch_is_not_larger_than_requested_and_has_no_duplicates(
    mine: int, others: int, i: int, j: int, seed: int
) -> None:
    local = [scored(n, 0, 1, author="me") for n in range(mine)]
    pool = [scored(100 + n, 0, 1) for n in range(others)]
    batch = SharingSampler(n_local=i, n_external=j)(local, pool, random.Random(seed))
    refs = [s.rollout.ref for s in batch]
    assert len(refs) == len(set(refs)) == min(mine, i) + min(others, j)


def test_every_informative_rollout_is_equally_likely() -> None:
    pool = [scored(n, 0, 1) for n in range(6)]
    rng = random.Random(0)
    drawn = [s.rollout.ref.n for _ in range(3000) for s in SharingSampler(n_external=2)([], pool, rng)]
    assert all(abs(drawn.count(n) / len(drawn) - 1 / 6) < 0.02 for n in range(6))


def test_without_external_rollouts_no_random_numbers_are_drawn() -> None:
    pool = [scored(n, 0, 1, specialty=specialty) for n, specialty in enumerate(("bf", "arc_1d"))]
    rng = random.Random(0)
    mine = [scored(n, 0, 1, author="me") for n in range(8)]
    assert SharingSampler(n_local=8, n_external=0)(mine, pool, rng) == mine
    assert rng.getstate() == random.Random(0).getstate()


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=8))
def test_advantages_are_standardised_rewards_and_zero_for_equal_rewards(
    rewards: list[float],
) -> None:
    s, deviation = scored(1, *rewards), pstdev(rewards)
    assert s.informative == (deviation > 0)
    assert within_group(s) == pytest.approx(
        [(r - fmean(rewards)) / deviation if deviation else 0.0 for r in rewards], abs=1e-2
    )
