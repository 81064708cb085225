"""The token bucket, buckets by key, and bans of peers that send too much."""

import itertools
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.rate_limit import MAX_PIECE, Claim, RateLimit, SharedRate, TokenBucket, TokenBuckets, counted

NOW = 1_900_000_000.0


def test_a_bucket_refills() -> None:
    buckets = TokenBuckets[str](rate=0.5, burst=3)
    # Another peer has a separate bucket.
    asked = [("a", 10.0)] * 3 + [("a", 11.0), ("b", 11.0), ("a", 12.0), ("a", 12.0)]
    waits = [buckets.of(who, now).wait(now) for who, now in asked]
    assert waits == pytest.approx([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 2.0])


@given(st.floats(0.1, 1e7), st.floats(0.0, 2e9), st.lists(st.integers(1, 5_000), max_size=20))
def test_waiting_as_long_as_told_always_suffices(rate: float, now: float, wanted: list[int]) -> None:
    """This holds even if rounding leaves a tiny wait, and the clock does not move otherwise."""
    bucket = TokenBucket(rate, 5_000.0, now)
    for tokens in wanted:
        for _ in range(5):
            if not (wait := bucket.wait(now, tokens)):
                break
            assert now + wait > now
            now += wait
        else:
            pytest.fail(f"{bucket.left} of {tokens} tokens after five waits")


def test_a_buckets_credit_and_debt_are_at_most_one_burst() -> None:
    bucket = TokenBucket(rate=2.0, burst=10.0, now=NOW)
    assert bucket.refill(NOW + 1000) == 10
    bucket.spend(1e9)
    assert bucket.left == -10 and bucket.refill(NOW) == -10 and bucket.refill(NOW + 6) == 2


def test_the_number_of_buckets_is_bounded() -> None:
    buckets = TokenBuckets[str](rate=1e-9, burst=1, most=10)
    for i in range(1_000):
        buckets.of(str(i), 0.0).spend(1)
    assert (
        buckets.of("999", 0.0).left == 0 and len(buckets._buckets) == 10
    )  # only the latest buckets are kept


RATE = 128 * 1024.0
HONEST = ("8.8", "8.8.8.8", 1)
Path = tuple[object, ...]


def used(flows: dict[Path, float], seconds: float, away: float = 0.0) -> Counter[Path]:
    """Return each flow's bytes of a shared rate. Each flow claims pieces of its size, one after another.

    away: seconds from each grant to the next claim of the honest flow; the other flows claim at once.
    """
    shared, got, now = SharedRate(RATE, 2 * MAX_PIECE, 0.0), Counter[Path](), 0.0
    ready, later = list(flows), float("inf")

    def grant(flow: Path) -> None:
        nonlocal later
        got[flow] += int(flows[flow])
        if flow == HONEST and away:
            later = now + away
        else:
            ready.append(flow)

    while now < seconds:
        if later <= now:
            ready.append(HONEST)
            later = float("inf")
        while ready:
            flow = ready.pop()
            shared.put(flow, Claim(flows[flow], partial(grant, flow)))
        wait = shared.serve(now)
        if not ready:
            now = max(min(now + wait, later), now + 1e-6)
    return got


CROWDS: dict[str, list[Path]] = {
    "circuits of one machine": [("1.1", "1.1.1.1", n) for n in range(128)],
    "machines of one group": [("1.1", f"1.1.1.{n}", n) for n in range(128)],
    "a circuit of the honest node's machine": [(*HONEST[:2], 2)],
    "circuits in the honest node's group": [(HONEST[0], "8.8.1.1", n) for n in range(2, 20)],
}


@pytest.mark.parametrize("theirs", [64.0, 1024.0, MAX_PIECE])
@pytest.mark.parametrize("ours", [200.0, 1024.0, MAX_PIECE])
@pytest.mark.parametrize("crowd", CROWDS)
def test_a_shared_rate_is_shared_by_group_machine_and_connection(
    crowd: str, ours: float, theirs: float
) -> None:
    got = used({HONEST: ours, **dict.fromkeys(CROWDS[crowd], theirs)}, seconds=4)
    assert got[HONEST] >= 0.95 * 2 * RATE - MAX_PIECE
    assert 4 * RATE <= got.total() <= 4 * RATE + 3 * MAX_PIECE


def test_a_flow_with_pauses_waits_for_at_most_one_piece_of_other_flows() -> None:
    crowd: dict[Path, float] = dict.fromkeys(CROWDS["circuits of one machine"], MAX_PIECE)
    got = used({HONEST: 1024.0, **crowd}, seconds=30, away=0.05)
    assert got[HONEST] >= 1024 * 30 / (0.05 + MAX_PIECE / RATE + 1024 / RATE)
    assert got.total() >= 30 * RATE


@pytest.mark.parametrize("size", [64.0, MAX_PIECE])
def test_newcomers_take_turns_with_waiting_flows(size: float) -> None:
    """Each hostile claim is by a new machine in the honest node's group, and two of them always wait."""
    shared, got, machines = SharedRate(RATE, RATE, 0.0), Counter[str](), itertools.count()

    def honest() -> None:
        got["honest"] += 1
        shared.put(HONEST, Claim(size, honest))

    def newcomer() -> None:
        got["newcomers"] += 1
        shared.put((HONEST[0], next(machines), 0), Claim(size, newcomer))

    for grant in (honest, newcomer, newcomer):
        grant()
    for n in range(1000):
        shared.serve(10 + n * size / RATE)
    assert got.total() >= 1000 and got["honest"] >= got.total() / 5
    assert len(shared._parts[HONEST[0]]._parts) <= 8 * MAX_PIECE / size


def test_a_large_claim_does_not_need_a_full_bucket() -> None:
    shared, got = SharedRate(1000.0, 500.0, 0.0), list[str]()
    assert shared.piece == 250
    for size, name in ((500, "first"), (250, "second")):
        shared.put(("a",), Claim(size, partial(got.append, name)))
    assert shared.serve(0.0) == 0 and got == ["first"]
    assert shared.serve(0.01) == pytest.approx(0.24) and got == ["first", "second"]


def test_a_cancelled_claim_costs_nothing_and_a_short_path_goes_first() -> None:
    shared, got = SharedRate(1000.0, 500.0, 0.0), list[str]()
    claims = [Claim(400, partial(got.append, name)) for name in "abcd"]
    for claim, by in zip(claims, (("x", 1), ("x", 1), ("y", 1), ()), strict=True):
        shared.put(by, claim)
    claims[0].size = 0
    assert shared.serve(0.0) == pytest.approx(0.3) and got == ["d", "c"]
    shared.serve(9.0)
    assert got == ["d", "c", "a", "b"] and shared.waiting == 0


def test_the_message_limit_allows_a_busy_swarm_and_bans_flooders() -> None:
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


def test_finished_work_is_no_longer_counted() -> None:
    running = Counter[str]()
    with counted(running, "a"):
        with counted(running, "a"):
            assert running["a"] == 2
        assert running["a"] == 1
    assert not running
