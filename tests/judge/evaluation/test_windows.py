"""Question windows: the judge commits to them before they open, and reveals them once all questions are
closed.

They are kept after kill -9 and clock changes.
"""

import asyncio
from collections.abc import Callable
from contextlib import closing
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge import config
from judge.evaluation.questions import WindowQuestions
from judge.store.database import Database
from judge.store.store import open_store
from judge.store.windows import REVEAL_S, due, read, turn
from judge.types import QuestionWindow
from p2p.types import PeerId
from swarmd.tasks import held_out
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.held_out import checked_receipt, commitment, place_in_set
from swarmd.tasks.source import tasks_of
from testbed.signing_peer import SigningPeer
from tests.doubles import TIMEOUT_S
from tests.judge.conftest import Court, open_court
from tests.judge.databases import on_each_database

DAY = 86_400


class Seeds:
    """Returns the numbers 1, 2, 3 … as seeds of 32 bytes."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def __call__(self) -> bytes:
        return next(self._numbers).to_bytes(32, "big")


@given(st.lists(st.integers(-3 * DAY, 5 * DAY), max_size=20), st.integers(60, 2 * DAY))
def test_one_window_is_open_and_the_next_is_published_under_any_clock(steps: list[int], seconds: int) -> None:
    now, made, new = 1.8e9, [], Seeds()
    for step in steps:
        now += step
        before = len(made)
        made += due(made[-1] if made else None, now, seconds, "0123", new)
        assert [window.number for window in made] == list(range(1, len(made) + 1))
        assert len(made) - before <= 2 and made[-1].terms.opens > now
        for a, b in pairwise(made):
            set_back = a.published > b.published + seconds  # then b is the first with the right clock
            assert (
                b.terms.opens
                == (int(b.published) + seconds if set_back else max(a.terms.closes, b.terms.opens))
                < b.terms.closes
            )
        assert made[-1].terms.opens <= now + 3 * seconds
        assert all(window.terms.opens >= int(window.published) for window in made)


def test_a_later_window_is_published_one_window_before_it_opens() -> None:
    first, second = due(None, 1000.5, 60, "0123", Seeds())
    assert (first.terms.opens, first.terms.closes, second.terms.opens) == (1000, 1060, 1060)
    assert due(second, 1059.9, 60, "0123", Seeds()) == []
    (third,) = due(second, 1060.0, 60, "0123", Seeds())
    assert third.published == 1060.0 and third.terms.opens == 1120


def turned(
    store: Database, now: float, new: Callable[[], bytes]
) -> tuple[QuestionWindow, QuestionWindow, int]:
    return store.run(turn, now, 60, TINY_9.digest, new)


def test_a_commitment_survives_a_kill_and_its_seed_is_revealed_in_time(database: str) -> None:
    new = Seeds()
    with closing(open_store(database, "tiny-9 0123")) as store:
        first, second, hidden = turned(store, 1000.0, new)
        assert (first.number, second.number, hidden, first.opened) == (1, 2, 0, 1000.0)
    with closing(open_store(database, "tiny-9 0123")) as store:  # closing writes nothing, as with kill -9
        assert turned(store, 1030.0, new) == (first, second, 0)
        with closing(Database(database, alone=False)) as reading:
            second_now, third, hidden = turned(store, 1060.0, new)
            assert (second_now.seed, hidden) == (second.seed, 1) and all(
                w.revealed is None for w in reading.run(read, 2**63 - 1)
            )
            assert turned(store, 1060.0 + REVEAL_S, new) == (second_now, third, 0)
            told = reading.run(read, 2)[0].document()
            assert (
                told["seed"] == first.seed.hex()
                and commitment(first.terms, bytes.fromhex(told["seed"])) == first.commitment
            )
            assert [w.document()["seed"] for w in reading.run(read, 2**63 - 1)[:2]] == [None, None]
        # The clock was set back, but questions of a revealed window are not asked again.
        assert turned(store, 900.0, new)[0].number == 2
        late = turned(store, 5000.0, new)[0]  # the judge was down for longer than a window
        assert (late.number, late.terms.opens, late.published) == (5, 5000, 5000.0)


def test_each_peer_gets_its_questions_in_order() -> None:
    window = due(None, 1000.0, 60, TINY_9.digest, Seeds())[0]
    questions = WindowQuestions(tasks_of("tiny-9"), window, remembered=1)
    drawn = [questions(PeerId("alice")) for _ in range(3)]
    assert [one.place for one in drawn] == [0, 1, 2]
    for one in drawn:
        index = place_in_set(window.seed, "alice", one.place, 1_000)
        assert one.task == held_out.question(tasks_of("tiny-9"), window.seed, index)
    questions(PeerId("bob"))  # this displaces alice from memory
    questions.ask_from(PeerId("alice"), 1, 3)  # but the store knows alice's place
    assert questions(PeerId("alice")).place == 3
    questions.ask_from(PeerId("alice"), 7, 900)  # a place of another window, which is ignored
    assert questions(PeerId("alice")).place == 4


@pytest.mark.anyio
async def test_an_error_does_not_end_the_judges_background_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config, "EXPIRE_S", 0.01)
    async with open_court(str(tmp_path / "judge.sqlite3"), tmp_path) as court, asyncio.timeout(TIMEOUT_S):
        before, court.wall.now = court.wall.now, float("inf")  # an unexpected fault
        while "failed, and goes on" not in caplog.text:
            await asyncio.sleep(0.01)
        court.wall.now = before + court.service.settings.window
        while court.service._questions.window.number == 1:
            await asyncio.sleep(0.01)


@on_each_database
@pytest.mark.anyio
async def test_over_http_anyone_can_check_an_evaluation_after_its_window_closed(court: Court) -> None:
    peer = court.peer()
    handed = (await court.ask(peer, answers=2)).json()["evaluations"][0]
    listed = (await court.http.get("/v1/windows")).json()
    assert [window["number"] for window in listed["windows"]] == [2, 1] and listed["more_before"] is None
    assert handed["commitment"] == listed["windows"][1]["commitment"]
    graded = (await court.answer(peer, handed["evaluation"], "x", "y")).json()
    court.wall.now += DAY
    await court.service._turn_windows()
    assert (await court.http.get("/v1/windows?before=2")).json()["windows"][0]["seed"] is None
    court.wall.now += REVEAL_S
    await court.service._turn_windows()
    document = (await court.http.get(f"/v1/evaluations/{handed['evaluation']}")).json()
    # Byte for byte.
    assert (document["receipt"], document["signature"]) == (graded["receipt"], graded["signature"])
    said: Any = checked_receipt(document)
    assert (
        said["commitment"] == handed["commitment"] == document["window"]["commitment"] and said["place"] == 0
    )
    assert [given["text"] for given in document["answers"]] == ["x", "y"]
    index = place_in_set(bytes.fromhex(document["window"]["seed"]), peer.identity.peer_id, 0, 1_000)
    task = held_out.question(tasks_of("tiny-9"), bytes.fromhex(document["window"]["seed"]), index)
    assert (task.ref.specialty, task.ref.n, task.question) == (
        said["specialty"],
        said["n"],
        handed["question"],
    )
    for unknown in ("0" * 32, "x"):
        assert (await court.http.get(f"/v1/evaluations/{unknown}")).status_code == 404
    newer = (await court.ask(peer)).json()["evaluations"][0]
    assert newer["window"] == 2 and newer["commitment"] != handed["commitment"]


@pytest.mark.anyio
async def test_a_clock_that_was_years_ahead_does_not_keep_a_window_open_for_years(
    database: str, tmp_path: Path
) -> None:
    async with open_court(database, tmp_path) as court:
        before = court.wall.now
        for ahead in (9 * 365 * DAY, 9 * 365 * DAY + REVEAL_S, 0, DAY - 1, DAY, DAY + REVEAL_S):
            court.wall.now = before + ahead
            await court.service._turn_windows()
            if ahead == 0:  # questions revealed while the clock was wrong are not asked again
                assert (court.service._questions.window.number, court.service._next_window.number) == (3, 5)
        windows = (await court.http.get("/v1/windows")).json()["windows"]
        assert [(w["number"], w["opens"] - before, w["seed"] is None) for w in windows[:3]] == [
            (6, 2 * DAY, True),
            (5, DAY, True),
            (4, (9 * 365 + 1) * DAY, False),  # this window never opened
        ]
        assert windows[1]["published"] == before and windows[1]["opened"] == before + DAY
        assert court.service._questions.window.number == 5


@on_each_database
@pytest.mark.anyio
async def test_a_window_with_an_open_question_is_not_revealed(court: Court) -> None:
    peer, number = court.peer(), court.service._questions.window.number
    await court.ask(peer)
    court.wall.now += DAY
    for _ in range(2):
        await court.service._turn_windows()
        court.wall.now += 2 * REVEAL_S
    assert (await court.http.get(f"/v1/windows?before={number + 1}")).json()["windows"][0]["seed"] is None
    court.monotonic.now += 61.0
    await court.service.expire()
    await court.service._turn_windows()
    assert (await court.http.get(f"/v1/windows?before={number + 1}")).json()["windows"][0]["seed"] is not None


@pytest.mark.anyio
async def test_after_a_kill_a_peer_gets_the_next_questions(database: str, tmp_path: Path) -> None:
    """Questions open at the kill do not count, and are not asked again in the window."""
    peer, texts = SigningPeer(1), []
    for life in range(2):
        async with open_court(database, tmp_path, seed=life) as court:
            texts += [
                handed["question"] for handed in (await court.ask(peer, questions=2)).json()["evaluations"]
            ]
            seed = court.service._questions.window.seed
    places = [place_in_set(seed, peer.identity.peer_id, place, 1_000) for place in range(4)]
    assert texts == [held_out.question(tasks_of("tiny-9"), seed, place).question for place in places]


@pytest.mark.anyio
async def test_a_lapsed_question_counts_as_wrong_but_one_lost_to_a_kill_does_not_count(
    database: str, tmp_path: Path
) -> None:
    """Several questions have several answers each; meanwhile the wall clock is set back and forward."""
    peer = SigningPeer(1)
    async with open_court(database, tmp_path) as court:
        first = (await court.ask(peer, questions=4, answers=4)).json()["evaluations"]
        right = await court.right_answer(peer, first[0]["evaluation"])
        await court.answer(peer, first[0]["evaluation"], *[right] * 4)
        for step in (-3 * DAY, 3 * DAY):
            court.wall.now += step  # deadlines follow the monotonic clock only
            await court.service.expire()
        assert (await court.answer(peer, first[1]["evaluation"], *[right] * 4)).status_code == 200
        court.monotonic.now += 61.0
        assert (await court.answer(peer, first[2]["evaluation"], *[right] * 4)).status_code == 410
        row = (await court.http.get(f"/v1/peers/{peer.identity.peer_id}")).json()
        assert (row["answered"], row["unanswered"], row["n"]) == (2, 2, 4)
        # Lapsed questions also count as wrong in pass@k. Of four answers, the first is greedy and three are
        # samples.
        assert list(row["pass_at"]) == ["1", "2"]
        assert row["pass_at"]["2"]["n"] == 4 and row["pass_at"]["1"]["score"] == row["right"] / 4
        await court.ask(peer, questions=3)
    async with open_court(database, tmp_path) as court:
        after = (await court.http.get(f"/v1/peers/{peer.identity.peer_id}")).json()
        assert {**after, "last_seen": 0} == {**row, "last_seen": 0}
