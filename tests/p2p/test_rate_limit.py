"""The token bucket, buckets by key, and bans of peers that send too much."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.rate_limit import RateLimit, TokenBucket, TokenBuckets, counted

NOW = 1_900_000_000.0


def test_a_bucket_refills() -> None:
    buckets = TokenBuckets[str](rate=0.5, burst=3)
    # Another peer's is its own
    asked = [("a", 10.0)] * 3 + [("a", 11.0), ("b", 11.0), ("a", 12.0), ("a", 12.0)]
    waits = [buckets.of(who, now).wait(now) for who, now in asked]
    assert waits == pytest.approx([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 2.0])


@given(st.floats(0.1, 1e7), st.floats(0.0, 2e9), st.lists(st.integers(1, 5_000), max_size=20))
def test_who_waits_as_told_gets_on(rate: float, now: float, wanted: list[int]) -> None:
    """However little is missing by rounding, on a clock that stands still otherwise."""
    bucket = TokenBucket(rate, 5_000.0, now)
    for tokens in wanted:
        for _ in range(5):
            if not (wait := bucket.wait(now, tokens)):
                break
            assert now + wait > now
            now += wait
        else:
            pytest.fail(f"{bucket.left} of {tokens} tokens after five waits")


def test_a_bucket_stays_within_one_burst_of_credit_and_debt() -> None:
    bucket = TokenBucket(rate=2.0, burst=10.0, now=NOW)
    assert bucket.refill(NOW + 1000) == 10
    bucket.spend(1e9)
    assert bucket.left == -10 and bucket.refill(NOW) == -10 and bucket.refill(NOW + 6) == 2


def test_buckets_are_bounded() -> None:
    buckets = TokenBuckets[str](rate=1e-9, burst=1, most=10)
    for i in range(1_000):
        buckets.of(str(i), 0.0).spend(1)
    assert buckets.of("999", 0.0).left == 0 and len(buckets._buckets) == 10  # the newest are remembered


def test_a_rate_limit_passes_a_busy_swarm_and_bans_flooders() -> None:
    limit = RateLimit({"frames": TokenBuckets(200, 600), "broken": TokenBuckets(1, 30)})
    assert all(limit.pay("mesh", NOW + n / 150, "frames") for n in range(5000))
    flood = [limit.pay("flood", NOW + n / 10_000, "frames") for n in range(1000)]
    assert flood.index(False) < 700 and limit.banned("flood", NOW + 1) and not limit.banned("mesh", NOW + 1)
    assert [limit.pay("junk", NOW + n / 100, "broken") for n in range(40)].index(False) == 30
    assert limit.banned("junk", NOW + 60) and not limit.banned("junk", NOW + 61)
    assert limit.pay("junk", NOW + 61, "broken")


def test_bans_double_and_are_forgotten_after_a_quiet_day() -> None:
    limit, now = RateLimit({"frames": TokenBuckets(200, 600)}), NOW

    def flood() -> float:
        while limit.pay("flood", now, "frames"):
            pass
        return next(seconds for seconds in range(1, 2000) if not limit.banned("flood", now + seconds))

    bans = []
    for _ in range(6):
        bans.append(flood())
        now += bans[-1]
    assert bans == [60, 120, 240, 480, 960, 960]
    now += 24 * 3600
    assert flood() == 60
    assert [limit.ban_again("often", now + n) for n in range(1100)][-1] == 960


def test_what_has_run_is_counted_no_more_and_takes_no_place() -> None:
    running = Counter[str]()
    with counted(running, "a"):
        with counted(running, "a"):
            assert running["a"] == 2
        assert running["a"] == 1
    assert not running
