"""Comparison of swarm and solo: normalised rounds, statistical tests, and the figures in the database."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from scipy import stats

from judge.figures.comparison import (
    ArmData,
    ArmsView,
    BinSums,
    comparison_document,
    curve,
)
from judge.figures.intervals import always, evidence, paired_test
from judge.figures.rounds import HORIZONS, MAX_ROUND, MISSED_BINS, PeerProgress, advance, bin_end, bin_of
from judge.store import arms
from judge.store import store as judge_store
from judge.store.database import Database
from judge.types import Attributes
from p2p.types import PeerId
from testbed.recounted_arms import recounted
from tests.judge.conftest import Court
from tests.judge.databases import on_each_database
from tests.judge.store.audit import reading
from tests.judge.store.test_store import ANSWER, RIGHT, WRONG, opened, question


def test_every_round_is_in_exactly_one_bin() -> None:
    ends = [bin_end(bin) for bin in range(bin_of(MAX_ROUND - 1) + 1)]
    assert all(one < other for one, other in pairwise(ends))
    for first, (bin, end) in zip([0, *ends], enumerate(ends), strict=False):
        assert bin_of(first) == bin_of(end - 1) == bin
    assert (bin_end(31), bin_end(32), ends[-1]) == (160, 170, MAX_ROUND)
    assert [bin_end(bin) for bin in HORIZONS] == [40, 160, 640, 2560, 10240]


def walked(*evaluations: tuple[int, float], sharing: str = "swarm") -> tuple[PeerProgress, dict[int, float]]:
    """Add a peer's (round, reward) pairs; return its progress and its cumulative rewards at bin ends."""
    progress, values = None, {}
    for round_number, reward in evaluations:
        progress, closed = advance(progress, sharing, round_number, reward)
        values |= {bin_end(bin): value * bin_end(bin) for bin, value in closed.items()}
    assert progress is not None
    return progress, values


def test_cumulative_reward_counts_rounds_and_not_evaluations() -> None:
    once, often = (
        walked((1, 1.0), (7, 0.0), (12, 1.0)),
        walked((1, 1.0), (2, 1.0), (3, 1.0), (7, 0.0), (8, 0.0), (12, 1.0)),
    )
    assert once[1] == often[1] == {5: 5.0, 10: 5.0}
    # A bin without evaluations has the mean before it.
    assert walked((1, 1.0), (2, 0.0), (16, 1.0))[1] == {5: 2.5, 10: 5.0, 15: 7.5}
    # Bins before the first evaluation have the first mean.
    assert walked((12, 1.0), (15, 0.0))[1] == {5: 5.0, 10: 10.0, 15: 15.0}


def test_evaluations_after_a_long_absence_or_a_changed_mode_do_not_count() -> None:
    progress, values = walked((1, 1.0), (5, 1.0))
    assert values == {5: 5.0}
    assert advance(progress, "swarm", 3, 1.0) == (progress, {})  # of a bin that has ended
    # The peer was away for too long.
    assert (
        walked((1, 1.0), (5 * MISSED_BINS, 1.0), (5 * (2 * MISSED_BINS + 2), 1.0), (500, 0.0))[0].counts
        is False
    )
    for missed, counts in ((MISSED_BINS, True), (MISSED_BINS + 1, False)):
        assert walked((5 * missed, 1.0))[0].counts is counts  # or its first evaluation came too late
        assert walked((1, 1.0), (5 * (missed + 1), 1.0))[0].counts is counts
    assert walked((1, 1.0), (2**62, 1.0), (2**62 + 1, 0.0)) == (
        replace(walked((1, 1.0))[0], counts=False),
        {},
    )
    other, closed = advance(progress, "solo", 10, 1.0)
    assert (other.counts, other.sharing, closed) == (False, "swarm", {})  # swarm, then solo
    assert advance(other, "swarm", 10, 1.0) == (other, {})


def sums(values: list[float]) -> BinSums:
    return len(values), sum(values), sum(value**2 for value in values)


def test_a_curves_interval_is_students_t() -> None:
    good = {bin: sums([0.5 + 0.01 * peer for peer in range(6)]) for bin in range(6)} | {
        6: sums([0.5, 0.6, 0.7])
    }
    poor = {bin: sums([0.1 + 0.01 * peer for peer in range(80 if bin < 5 else 7)]) for bin in range(7)} | {
        7: sums([0.2])
    }
    swarm, solo = curve(good), curve(poor)
    assert (solo["round"][4:], solo["peers"][4:]) == ([25, 30, 35, 40], [80, 7, 7, 1])
    assert np.isnan(solo["low"][-1]) and np.isnan(solo["high"][-1])
    rewards = [5 * (0.5 + 0.01 * peer) for peer in range(6)]
    interval = stats.t.interval(0.95, 5, 5 * 0.525, stats.sem(rewards))
    assert [swarm[name][0] for name in ("reward", "low", "high")] == pytest.approx([5 * 0.525, *interval])


def test_without_a_difference_the_evidence_is_a_fair_game() -> None:
    """Over all signs of the differences, the evidence exceeds a value v in at most 1 / v of the cases."""
    sizes = np.array([0.1, 0.03, 0.2, 0.11, 0.07, 0.01, 0.09, 0.3, 0.12, 0.05])
    most = np.array([evidence(sizes * np.array(signs)) for signs in product((-1, 1), repeat=len(sizes))])
    for times in (2, 5, 10, 20, 100):
        assert (most >= times).mean() <= 1 / times
    assert (most >= 20).mean() > 0.005  # but it can grow large
    assert evidence(np.zeros(3)) == 1.0 == evidence(np.zeros(0))


def test_the_anytime_test_needs_pairs_and_finds_the_better_side() -> None:
    good, poor = [0.5 + 0.01 * i for i in range(30)], [0.3 + 0.01 * i for i in range(40)]
    assert paired_test({}, {}).p == 1.0 and paired_test({31: good[:3]}, {31: poor}).better is None
    found = paired_test({31: good}, {31: poor})
    assert (found.better, [(at.round, at.pairs) for at in found.horizons]) == (True, [(160, 30)])
    assert paired_test({31: poor}, {31: good}).better is False
    for swarm, solo, verdict in ((good, poor, "better"), (poor, good, "worse")):
        view = ArmsView([], "tiny", ArmData({}, {31: swarm}), ArmData({}, {31: solo}))
        assert comparison_document(view)["anytime"]["verdict"] == verdict
    # Later data do not reverse a finding.
    assert paired_test({31: [*good, *poor]}, {31: [*poor, *good]}).p == pytest.approx(found.p)
    less = paired_test({31: good, 63: poor[:28]}, {31: poor, 63: good[:28]})
    assert (less.better, less.p) == (True, found.p), "not the horizon with the most evidence was used"
    won = np.mean([(2 / (1 + np.exp(-2 * bet))) ** 30 for bet in (0.25, 0.5, 1.0, 2.0)])
    assert found.horizons[0].evidence == pytest.approx(won / 2) == pytest.approx(len(HORIZONS) / found.p)


def test_the_anytime_interval_holds_while_the_model_learns() -> None:
    rng, missed = np.random.default_rng(1), 0
    shares = 0.05 + 0.5 * np.arange(600) / 600
    truth = np.cumsum(shares) / np.arange(1, 601)
    for _ in range(100):
        right = np.cumsum(rng.random(600) < shares)
        looks = [always(int(right[n - 1]), n) for n in (5, 10, 20, 40, 80, 160, 320, 600)]
        missed += any(
            not at.low <= truth[n - 1] <= at.high
            for at, n in zip(looks, (5, 10, 20, 40, 80, 160, 320, 600), strict=True)
        )
    assert missed <= 5
    assert (always(0, 0).low, always(0, 0).high, always(7, 7).high, always(0, 9).low) == (0.0, 1.0, 1.0, 0.0)
    widths = [always(n // 4, n).high - always(n // 4, n).low for n in (20, 200, 2_000, 20_000)]
    assert all(wide > 2 * narrow for wide, narrow in pairwise(widths))


@pytest.fixture
def store(database: str) -> Iterator[Database]:
    with closing(opened(database)) as store:
        yield store


def test_the_stores_figures_equal_a_recomputation(store: Database, database: str) -> None:
    """The recomputation uses all evaluations of two models.

    Some peers are in the swarm, some are solo, some change halfway, and some are away for long.
    """
    rng, number = random.Random(3), 0
    steps: list[tuple[Callable[..., object], tuple[object, ...]]] = []
    for peer in range(10):
        round_number = 0
        for step in range(14):
            number, round_number = number + 1, round_number + rng.choice((1, 2, 9, -3, 30))
            said = "swarm" if peer % 2 and not (peer == 5 and step > 8) else "solo"
            attributes = Attributes(
                max(0, round_number), "tiny\0" if peer > 2 else "other", sharing=None if peer == 9 else said
            )
            asked = replace(question(number, PeerId(f"peer {peer}")), attributes=attributes)
            steps.append((judge_store.asked, (asked, number, float(number))))
            if step == 3:
                steps.append((judge_store.lapsed, ([asked],)))
            else:
                steps.append(
                    (
                        judge_store.graded,
                        (asked, [ANSWER], [rng.choice((RIGHT, WRONG))], 0.25, number, float(number)),
                    )
                )
    assert not any(isinstance(outcome, Exception) for outcome in store.together(steps))
    with reading(database) as db:
        view = arms.view(db, None)
    assert view.model == "tiny\0" and {model for model, *_ in view.sizes} == {"tiny\0", "other"}
    assert (
        max(sums[0] for sums in view.swarm.bins.values()) == 3 and len(view.swarm.finishers[HORIZONS[0]]) > 0
    )
    with reading(database) as db:
        for table, rows in recounted(db).rows():
            kept = db.execute(table.select()).mappings()
            assert sorted(map(rounded, rows)) == sorted(rounded(dict(row)) for row in kept), table.name


def rounded(row: dict[str, object]) -> str:
    return str({key: round(value, 9) if isinstance(value, float) else value for key, value in row.items()})


@on_each_database
@pytest.mark.anyio
async def test_the_comparison_is_served_over_http(court: Court) -> None:
    for sharing in ("swarm", "solo"):
        peer, asker = court.peer(), {"model": "arms", "sharing": sharing}
        for round_number in (1, 6, 11):
            asked = await court.ask(peer, round=round_number, asker=asker)
            evaluation = asked.json()["evaluations"][0]["evaluation"]
            right = sharing == "swarm" or round_number == 1
            text = await court.right_answer(peer, evaluation) if right else "<answer>no</answer>"
            assert (await court.answer(peer, evaluation, text)).status_code == 200
    found = (await court.http.get("/v1/comparison?model=arms")).json()
    assert found["model"] == "arms" and {"model": "arms", "swarm": 1, "solo": 1} in found["models"]
    both = {"round": [5, 10], "peers": [1, 1], "low": [None, None], "high": [None, None]}
    assert [found["swarm"], found["solo"]] == [{**both, "reward": [5.0, last]} for last in (10.0, 5.0)]
    assert found["anytime"] == {"verdict": "not known", "p": 1.0, "horizons": []}
    head = await court.http.head("/v1/comparison")
    assert (head.status_code, head.content) == (200, b"")
    nothing = (await court.http.get("/v1/comparison?model=nobody's")).json()
    assert nothing["swarm"]["round"] == []
    assert (await court.http.get(f"/v1/comparison?model={'x' * 101}")).status_code == 422


def test_a_comparison_in_json_has_no_infinity() -> None:
    certain, one = ArmData({9: sums([0.5] * 6)}, {}), ArmData({9: sums([0.25])}, {})
    found = comparison_document(ArmsView([], "tiny", certain, one))
    assert found["solo"]["low"] == found["solo"]["high"] == [None]
    assert found["swarm"]["low"] == found["swarm"]["high"] == found["swarm"]["reward"] == [25.0]
    json.dumps(found, allow_nan=False)
