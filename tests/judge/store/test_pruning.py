"""Pruning deletes old rows without changing any figure, with both kinds of database."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge.figures.leaderboard import CURVE_POINTS, WINDOW_QUESTIONS, BoardView, curve_numbers, curve_step
from judge.store import arms, pruning, reader
from judge.store import store as judge_store
from judge.store.database import Database
from judge.store.pruning import KEPT_POINTS, STEP_PEERS
from judge.store.windows import turn
from judge.types import Attributes
from p2p.types import PeerId
from swarmd.tasks.answers import ScoredAnswer
from swarmd.tasks.sandbox.client import Mark
from tests.judge.store import audit
from tests.judge.store.test_store import ALICE, ANSWER, BOB, opened, question

CURRICULUM = "tiny-9 0123"
MANY = 400


@pytest.fixture
def store(database: str) -> Iterator[Database]:
    with closing(opened(database)) as store:
        yield store


def rows(store: Database, peer: PeerId) -> list[int | None]:
    with store.begin() as db:
        chosen = f"SELECT number FROM evaluations WHERE peer = '{peer}' ORDER BY number"
        return [row[0] for row in db.exec_driver_sql(chosen)]


def counted(
    store: Database, peer: PeerId, number: int, at: float, reward: float, model: str = "tiny"
) -> None:
    """Store one evaluation that counts, of a peer in the swarm."""
    asked = replace(
        question(int.from_bytes(sha256(f"{peer} {number}".encode()).digest()[:7], "big"), peer),
        attributes=Attributes(number, model, sharing="swarm"),
    )
    store.run(judge_store.asked, asked, number, at)
    if number % 7:
        store.run(judge_store.graded, asked, [ANSWER], [ScoredAnswer.of(reward)], 0.5, number, at)
    else:
        store.run(judge_store.lapsed, [asked])


def prune(store: Database, before: float, silent: float, silent_windows: int = 1_000) -> int:
    """Prune everything that is due; return the number of steps."""
    after: str | None = ""
    steps = 0
    while after is not None:
        after, steps = store.run(pruning.prune, after, before, silent, silent_windows), steps + 1
    return steps


def test_a_peer_with_pruned_rows_keeps_its_figures_curve_and_rank(store: Database) -> None:
    rng = random.Random(3)
    for number in range(1, MANY + 1):
        counted(store, ALICE, number, float(number), float(rng.random() < number / MANY))
    void = question(10**6)
    store.run(judge_store.asked, void, MANY + 1, 5.0)
    store.run(judge_store.void, void)
    before = [
        store.run(reader.standing, ALICE),
        store.run(reader.board, BoardView(curves=24)),
        store.run(arms.view, "tiny"),
    ]
    prune(store, before=MANY - 80.0, silent=0.0)
    kept = rows(store, ALICE)
    assert kept == [n for n in range(1, MANY + 1) if n >= MANY - 99 or n % curve_step(MANY, KEPT_POINTS) == 0]
    assert [
        store.run(reader.standing, ALICE),
        store.run(reader.board, BoardView(curves=24)),
        store.run(arms.view, "tiny"),
    ] == before
    # Later answers continue the counts, and the curve still has its data.
    for number in range(MANY + 1, 2 * MANY + 1):
        counted(store, ALICE, number, float(number), 1.0)
    prune(store, before=2_000.0, silent=0.0)
    standing = store.run(reader.standing, ALICE)
    assert standing is not None
    assert [number for number, _ in standing.record.curve] == list(curve_numbers(2 * MANY))
    assert len(rows(store, ALICE)) <= WINDOW_QUESTIONS + 2 * KEPT_POINTS
    _, differences = audit.verify(store.name, CURRICULUM, as_stored(store))
    assert differences == []


def as_stored(store: Database) -> Mark:
    """Return a scorer that gives each answer its stored score, because only the sums are checked here."""
    with store.begin() as db:
        graded = "SELECT reward FROM evaluations WHERE state = 'graded' ORDER BY id"
        stored = iter([row[0] for row in db.exec_driver_sql(graded)])
    return lambda items: [[ScoredAnswer.of(next(stored)) for _ in answers] for _, answers in items]


def test_the_audit_finds_gaps_that_pruning_does_not_explain(tmp_path: Path) -> None:
    changes = (
        "UPDATE peers SET reward = reward {} 1",
        "UPDATE peers SET answered = answered {} 300, unanswered = unanswered - (0 {} 300)",
        "UPDATE evaluations SET total = total {} 99 WHERE number = 16",
        "UPDATE evaluations SET reward = 1 - reward WHERE number = 16",
    )
    with closing(opened(tmp_path / "judge.sqlite3")) as store:
        for number in range(1, MANY + 1):
            counted(store, ALICE, number, float(number), 0.0)
        prune(store, before=MANY - 80.0, silent=0.0)

        def differences(change: str = "SELECT 1") -> list[str]:
            with store.begin() as db:
                db.exec_driver_sql(change)
            return audit.verify(store.name, CURRICULUM, as_stored(store))[1]

        for change in changes:
            assert differences(change.replace("{}", "+")) != [], change
            assert differences(change.replace("{}", "-")) == [], change
        assert differences(f"DELETE FROM evaluations WHERE number = {MANY - 10}") != []


def test_a_silent_peer_that_is_not_on_the_board_is_deleted_completely(store: Database) -> None:
    for number in range(1, 10):
        counted(store, BOB, number, 10.0, 1.0, model="bobs")
        counted(store, ALICE, number, 10.0, 1.0)
    for number in range(10, 20):
        counted(store, ALICE, number, 10.0, 1.0)
    with store.begin() as db:
        total = db.exec_driver_sql("SELECT count(*) FROM arm_bins WHERE model = 'bobs'").scalar_one()
    assert total > 0
    prune(store, before=10.0, silent=10.0)
    assert len(rows(store, BOB)) == 9  # not yet silent for long enough
    prune(store, before=11.0, silent=11.0)
    assert (rows(store, BOB), store.run(judge_store.sequence, BOB)) == ([], -1)
    assert rows(store, ALICE) == list(range(1, 20))  # on the board
    with store.begin() as db:
        for table in ("progress", "arm_bins", "arm_values"):
            models = db.exec_driver_sql(f"SELECT DISTINCT model FROM {table}").scalars().all()
            assert "bobs" not in models
    counted(store, BOB, 1, 12.0, 1.0)  # the peer may return as a new peer
    assert rows(store, BOB) == [1]


def test_pruning_handles_a_few_peers_in_each_step(store: Database) -> None:
    for number in range(STEP_PEERS + 1):
        counted(store, PeerId(f"peer {number}"), 1, 1.0, 1.0)
    assert prune(store, before=0.0, silent=0.0) == 3
    assert prune(store, before=9.0, silent=9.0) == 3
    assert prune(store, before=9.0, silent=9.0) == 1


def test_a_peer_is_compared_in_only_a_few_models(store: Database) -> None:
    for number in range(1, 40):
        counted(store, ALICE, number, 1.0, 1.0, model=f"model {number}")
    with store.begin() as db:
        assert db.exec_driver_sql("SELECT count(*) FROM progress").scalar_one() == arms.PEER_MODELS


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(2, CURVE_POINTS))
def test_pruning_at_any_time_does_not_change_a_curve(a: int, b: int, points: int) -> None:
    earlier, later = sorted((a, b))
    step = curve_step(earlier, KEPT_POINTS)
    assert all(number % step == 0 for number in curve_numbers(later, points)[:-1])


def test_a_peer_on_the_board_is_deleted_after_a_long_silence(store: Database) -> None:
    """Time in which the judge was down, or by which its clock jumped, does not count as silence."""
    for number in range(1, 20):
        counted(store, ALICE, number, 10.0, 1.0)
        counted(store, BOB, number, 20.0, 1.0)

    def after(now: float) -> tuple[int, int]:
        store.run(turn, now, 5, CURRICULUM, lambda: bytes(32))
        prune(store, before=now - 10, silent=now - 10, silent_windows=3)
        return len(rows(store, ALICE)), len(rows(store, BOB))

    assert [after(now) for now in (15.0, 20.0, 1_000.0)] == [(19, 19)] * 3
    assert after(1_005.0) == (0, 19) and store.run(judge_store.sequence, ALICE) == -1
    assert [after(now) for now in (1_010.0, 9_000.0)] == [(0, 19), (0, 0)]


def test_a_peer_is_not_deleted_before_its_sequence_number_is_old(store: Database) -> None:
    counted(store, ALICE, int(31.0 * 1e9), 10.0, 1.0)
    prune(store, before=30.0, silent=30.0)
    assert store.run(judge_store.sequence, ALICE) == int(31.0 * 1e9)
    prune(store, before=32.0, silent=32.0)
    assert store.run(judge_store.sequence, ALICE) == -1
