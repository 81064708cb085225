"""The store: it keeps evaluations, rejects invalid ones, and never counts one twice."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import event, make_url
from sqlalchemy.exc import SQLAlchemyError

from judge.config import MAX_ANSWER_CHARACTERS
from judge.errors import DatabaseInUse, JudgeError
from judge.figures.leaderboard import (
    CURVE_POINTS,
    LISTED_ANSWERS,
    WINDOW_QUESTIONS,
    BoardView,
    Record,
    ScoreTally,
)
from judge.store import reader
from judge.store import store as judge_store
from judge.store.database import Database
from judge.store.store import PeerStanding, open_store
from judge.store.windows import turn
from judge.types import Attributes, OpenQuestion, Requester
from p2p.types import PeerId
from swarmd.tasks.answers import ScoredAnswer
from swarmd.tasks.curriculum import TINY_9
from swarmd.types import Completion, Task, TaskRef
from tests.judge.databases import WINDOW

ALICE, BOB = PeerId("alice"), PeerId("bob")
ANSWER = Completion("<answer>1</answer>", True)
RIGHT, WRONG = ScoredAnswer.of(1.0), ScoredAnswer.of(0.0)


def opened(database: Path | str, curriculum: str = "tiny-9 0123") -> Database:
    return open_store(database, curriculum)


@pytest.fixture
def store(database: str) -> Iterator[Database]:
    with closing(opened(database)) as store:
        yield store


def question(number: int, peer: PeerId = ALICE, model: str = "tiny") -> OpenQuestion:
    task, asker = Task(TaskRef("bf", number), "?", {}), Requester("", record=False)
    return OpenQuestion(f"{number:032x}", peer, task, 0.0, 60.0, asker, WINDOW, 0, Attributes(number, model))


def evaluate(
    store: Database, number: int, reward: float, peer: PeerId = ALICE, model: str = "tiny"
) -> Mapping[str, Any]:
    asked = question(number, peer, model)
    store.run(judge_store.asked, asked, 2 * number, float(number))
    return store.run(
        judge_store.graded, asked, [ANSWER], [ScoredAnswer.of(reward)], 0.5, 2 * number + 1, number + 0.5
    )


def record_of(store: Database, peer: str) -> Record | None:
    standing = store.run(reader.standing, peer)
    return standing and standing.record


def the(record: Record | None) -> Record:
    assert record is not None
    return record


def test_the_store_keeps_questions_answers_and_figures(store: Database) -> None:
    for number in range(1, 301):
        told = evaluate(store, number, float(number % 3 == 0))
    assert tuple(told[name] for name in ("n", "score", "number", "answered", "total")) == (
        WINDOW_QUESTIONS,
        0.34,
        300,
        300,
        100.0,
    )
    evaluate(store, 1_000, 1.0, BOB)
    alice = the(record_of(store, ALICE))
    assert (alice.answered, alice.reward, alice.unanswered, alice.last_seen, alice.model) == (
        300,
        100.0,
        0,
        300.5,
        "tiny",
    )
    assert (len(alice.recent), sum(reward for _, reward in alice.recent)) == (WINDOW_QUESTIONS, 34)
    assert (alice.curve[0], alice.curve[-1]) == ((8, 2.0), (300, 100.0)) and len(alice.curve) <= CURVE_POINTS
    board = store.run(reader.board, BoardView())
    assert [(standing.rank, standing.record.peer) for standing in board.standings] == [(1, ALICE)]
    assert (board.listed, board.unlisted, board.answers) == (1, 1, 301)  # bob has one answer
    newest, more = store.run(reader.history, ALICE, 2**63 - 1, 2)
    assert more == 299 and [row["number"] for row in newest] == [300, 299]
    kept = {"answer": ANSWER.text, "reason": "correct", "specialty": "bf", "n": 300, "ended": True}
    assert newest[0] | kept == newest[0]
    assert [row["number"] for row in store.run(reader.history, ALICE, 299, 1)[0]] == [298]
    assert (store.run(judge_store.sequence, ALICE), store.run(judge_store.sequence, PeerId("nobody"))) == (
        601,
        -1,
    )
    assert record_of(store, "nobody") is None


def test_a_page_of_the_board_shows_one_snapshot(
    store: Database, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer graded while a page is read appears in the next page that is read."""
    for number in range(1, LISTED_ANSWERS + 1):
        evaluate(store, number, 1.0)

    def graded_meanwhile(*_: object) -> dict[str, Any]:
        evaluate(store, store.run(judge_store.standing, ALICE).answered + 1, 0.0)
        return {}

    monkeypatch.setattr("judge.store.reader.newest", graded_meanwhile)
    with closing(Database(database, alone=False)) as reading:
        for n in (10, 11):
            (standing,) = reading.run(reader.board, BoardView()).standings
            assert standing.record.score == ScoreTally(10.0, n)


def test_serving_a_backup_with_another_key_gives_a_message(
    store: Database, caplog: pytest.LogCaptureFixture
) -> None:
    for key in "aab":
        store.run(judge_store.agree, store.name, f"--key of {key}, --deadline 60")
    (said,) = caplog.messages
    assert said.endswith(
        "was of a judge with --key of a; this one has --key of b. Receipts stay signed by the key they have"
    )


def test_only_changed_settings_are_named(store: Database, caplog: pytest.LogCaptureFixture) -> None:
    store.run(judge_store.agree, store.name, "--key of a, --deadline 60, --window 9")
    store.run(judge_store.agree, store.name, "--key of a, --deadline 90, --window 5")
    (said,) = caplog.messages
    assert said.endswith("of a judge with --deadline 60, --window 9; this one has --deadline 90, --window 5")


def test_a_page_of_answers_has_a_bounded_number_of_bytes(store: Database) -> None:
    """The answers have maximum length, in characters with the longest JSON, so few fit on a page.

    The pages together have all answers.
    """
    for number, letter in enumerate("x\x01é\U0001f600" * 3, start=1):
        asked = question(number)
        store.run(judge_store.asked, asked, 2 * number, 0.0)
        store.run(
            judge_store.graded,
            asked,
            [Completion(letter * MAX_ANSWER_CHARACTERS, True)],
            [WRONG],
            0.5,
            2 * number + 1,
            0.0,
        )
    seen: list[int] = []
    before: int | None = 2**63 - 1
    while before is not None:
        page, before = store.run(reader.history, ALICE, before)
        assert len(json.dumps(page, ensure_ascii=False).encode()) <= 256 * 1024
        seen += [row["number"] for row in page]
        assert before in (None, seen[-1])
    assert seen == list(range(12, 0, -1))


def test_stored_answers_take_no_more_bytes_than_they_were_sent_in(store: Database) -> None:
    """A network's bytes are limited as they are sent, and all of them are stored."""
    asked, given = replace(question(1), answers=16), Completion("é" * 1_000, True)
    store.run(judge_store.asked, asked, 1, 0.0)
    store.run(judge_store.graded, asked, [given] * 16, [WRONG] * 16, 0.5, 2, 0.0)
    with store.begin() as db:
        assert db.exec_driver_sql("SELECT length(further) FROM evaluations").scalar_one() < 16_500


@pytest.mark.net
def test_a_page_of_answers_is_read_row_by_row(postgresql: Callable[[], str]) -> None:
    """A client may request 500 rows of 16 long answers each, of which only one fits on a page."""
    cursors: list[object] = []
    with closing(opened(postgresql())) as store:

        @event.listens_for(store.engine, "before_cursor_execute")
        def note(_: object, cursor: object, statement: str, *__: object) -> None:
            cursors.extend([cursor] * ("evaluations.further" in statement))

        assert store.run(reader.history, ALICE, 9) == ([], None)
    (cursor,) = cursors
    assert isinstance(cursor, psycopg.ServerCursor)


def test_an_evaluation_is_graded_only_once(store: Database) -> None:
    evaluate(store, 1, 1.0)
    with pytest.raises(SQLAlchemyError):
        store.run(judge_store.graded, question(1), [ANSWER], [RIGHT], 0.5, 9, 9.0)
    assert the(record_of(store, ALICE)).answered == 1  # the whole transaction was rolled back
    with pytest.raises(SQLAlchemyError):
        store.run(judge_store.asked, question(1), 10, 10.0)
    evaluate(store, 2, 1.0)  # the next transaction works


def test_a_question_that_lapses_counts_as_wrong(store: Database) -> None:
    evaluate(store, 1, 1.0)
    store.run(judge_store.asked, question(2), 4, 2.0)
    store.run(judge_store.lapsed, [question(2)])
    record = the(record_of(store, ALICE))
    assert (record.answered, record.unanswered, record.reward, record.score) == (1, 1, 1.0, ScoreTally(1, 2))
    assert record.always == ScoreTally(1, 2)
    assert record.curve == [(1, 1.0), (2, 1.0)]
    with pytest.raises(SQLAlchemyError):
        store.run(judge_store.graded, question(2), [ANSWER], [RIGHT], 0.5, 5, 2.0)
    store.run(judge_store.lapsed, [question(2)])
    assert record_of(store, ALICE) == record  # the answer does not count again
    newest, _ = store.run(reader.history, ALICE, 2**63 - 1)
    kept = [(row["number"], row["reward"], row["answer"], row["ended"]) for row in newest]
    assert kept == [(2, 0.0, None, None), (1, 1.0, ANSWER.text, True)]
    assert newest[0]["reason"] == "not answered in time"
    evaluate(store, 3, 1.0)
    assert the(record_of(store, ALICE)).score == ScoreTally(2, 3)


def test_the_board_lists_peers_in_the_order_of_their_ranks(database: str) -> None:
    """A peer is listed from ten answers on.

    A few lucky answers rank below many good answers; ties keep their order; each peer is on exactly one page.
    """
    right = {
        "steady": (90, 100),
        "lucky": (10, 10),
        "a": (5, 10),
        "b": (5, 10),
        "poor": (10, 100),
        "few": (9, 9),
    }
    with closing(opened(database)) as store:
        numbers = iter(range(1, 10_000))
        for name, (good, answers) in right.items():
            for i in range(answers):
                evaluate(store, next(numbers), float(i < good), PeerId(name))
        board = store.run(reader.board, BoardView())
        assert [standing.record.peer for standing in board.standings] == ["steady", "lucky", "a", "b", "poor"]
        assert (board.listed, board.unlisted, board.more_after) == (5, 1, None)
        ties = [standing.ties for standing in board.standings if standing.ties]
        assert ties == [(1, 4), (1, 4), (1, 5), (1, 5), (3, 5)]  # too few answers to separate the peers
        seen, after = [], 0
        while after is not None:
            page = store.run(reader.board, BoardView(after=after, limit=2))
            seen += [(standing.rank, standing.record.peer) for standing in page.standings]
            after = page.more_after  # type: ignore[assignment]
        assert seen == list(enumerate(["steady", "lucky", "a", "b", "poor"], 1))
        for _ in range(60):
            store.run(judge_store.asked, question(n := next(numbers), PeerId("steady")), 2 * n, 0.0)
            store.run(judge_store.lapsed, [question(n, PeerId("steady"))])
        # The peer "steady" left sixty questions unanswered.
        assert store.run(reader.board, BoardView()).standings[0].record.peer == "lucky"


def test_only_one_judge_may_use_a_database_at_a_time(database: str) -> None:
    with closing(opened(database)), pytest.raises(DatabaseInUse, match="another judge"):
        opened(database)
    opened(database).close()


def test_a_password_is_not_shown() -> None:
    with pytest.raises(JudgeError) as refused:
        opened("postgresql://judge:secret@127.0.0.1:1/judge?connect_timeout=2")
    assert "secret" not in str(refused.value) and "judge:***@127.0.0.1:1" in str(refused.value)


@pytest.mark.parametrize("lent", [True, False], ids=["by the transaction", "by the session"])
def test_a_connection_pooler_in_transaction_mode_is_rejected(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, lent: bool
) -> None:
    """With such a pooler (Supabase, PgBouncer), a lock does not exclude other processes.

    See goauthentik/authentik#23876.
    """
    address = request.getfixturevalue("postgresql")()
    # A pooler reports another process id than the server's.
    process = "SELECT 7" if lent else "SELECT -pg_backend_pid()"
    monkeypatch.setattr("judge.store.database._PROCESS", process)
    refusal = pytest.raises(JudgeError, match=r"transaction mode.*session mode")
    with refusal if lent else nullcontext(), closing(opened(address)):
        pass


def test_without_the_postgresql_extra_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(JudgeError, match=r"pip install 'swarmd\[judge-postgres\]'"):
        opened("postgresql://judge@127.0.0.1:1/judge")


@pytest.mark.parametrize("address", ["mysql://judge@/judge", "://", "sqlite://"])
def test_a_file_that_is_not_a_database_is_rejected(address: str) -> None:
    with pytest.raises(JudgeError, match="postgresql://user@host/name"):
        opened(address)


def test_any_stored_text_is_read_unchanged(store: Database) -> None:
    text = "a\0b \\0 \\ \\\\0 <answer>\U0001f9ab\r\n\u202e</answer>"
    store.run(judge_store.asked, replace(question(1), attributes=Attributes(1, "m\0\\", name="\0")), 1, 0.0)
    store.run(judge_store.graded, question(1), [Completion(text, False)], [WRONG], 0.5, 2, 0.0)
    ((row,), _) = store.run(reader.history, ALICE, 2**63 - 1)
    assert (row["answer"], row["ended"], row["model"], row["name"]) == (text, False, "m\0\\", "\0")


def test_open_questions_are_void_after_a_restart(database: str) -> None:
    with closing(opened(database)) as store:
        evaluate(store, 1, 1.0)
        store.run(judge_store.asked, question(2), 5, 5.0)
        before = record_of(store, ALICE)
    with closing(opened(database)) as store:
        assert record_of(store, ALICE) == before
        # The open question does not count, because the peer is not at fault.
        assert (the(record_of(store, ALICE)).unanswered, store.run(judge_store.sequence, ALICE)) == (0, 5)
        with pytest.raises(SQLAlchemyError):
            store.run(judge_store.graded, question(2), [ANSWER], [RIGHT], 0.5, 6, 6.0)


def test_a_database_of_another_version_is_rejected(database: str) -> None:
    opened(database).close()
    with closing(Database(database)) as found, found.begin() as db:
        db.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(JudgeError, match="another version"):
        opened(database)


def test_a_failed_step_does_not_undo_other_steps_of_its_transaction(store: Database) -> None:
    """Several steps share a transaction; if one fails, the others are still stored."""
    evaluate(store, 1, 1.0)
    asked = [(judge_store.asked, (question(n), n, 0.0)) for n in (2, 3)]
    assert store.together(asked) == [None, None]
    steps = [(judge_store.graded, (question(n), [ANSWER], [RIGHT], 0.5, 10 + n, 1.0)) for n in (2, 1, 3, 3)]
    outcomes = store.together(steps)
    assert [type(outcome) for outcome in outcomes] == [dict, SQLAlchemyError, dict, SQLAlchemyError]
    assert [outcomes[place]["answered"] for place in (0, 2)] == [2, 3]
    assert store.together([(judge_store.sequence, (ALICE,)), (judge_store.standing, (ALICE,))]) == [
        13,
        PeerStanding(13, 3, 1, 1),
    ]


def test_a_question_with_several_answers_is_stored(store: Database) -> None:
    """All answers are stored. The first counts for the score, the other three for pass@k."""
    for number, right in enumerate((0, 1, 4), 1):
        asked = replace(question(number), answers=4)
        store.run(judge_store.asked, asked, number, 0.0)
        answers = [Completion(str(place), True) for place in range(4)]
        reasons = [RIGHT if place >= 4 - right else WRONG for place in range(4)]
        assert store.run(judge_store.graded, asked, answers, reasons, 0.5, 10 + number, 0.0)[
            "reward"
        ] == float(right == 4)
    evaluate(store, 4, 1.0)
    alice = the(record_of(store, ALICE))
    assert alice.score == ScoreTally(2, 4) and alice.pass_at == {
        1: (pytest.approx(4 / 9), 3),
        2: (pytest.approx(5 / 9), 3),
    }
    (one, newest, *_), _ = store.run(reader.history, ALICE, 2**63 - 1)
    assert "further" not in one and (one["answers"], one["correct"]) == (1, 1)
    assert (newest["answers"], newest["correct"], newest["answer"]) == (4, 4, "0")
    assert newest["further"][2] == {"text": "3", "ended": True, "reason": "correct", "reward": 1.0}


def test_graded_rewards_are_summed_exactly_and_stored_with_each_answer(store: Database) -> None:
    store.run(turn, 0.0, 60, TINY_9.digest, lambda: bytes(32))
    for number in range(1, 11):
        asked = replace(question(number), answers=2)
        store.run(judge_store.asked, asked, number, 0.0)
        found = store.run(
            judge_store.graded,
            asked,
            [ANSWER] * 2,
            [ScoredAnswer.of(0.1), ScoredAnswer.of(0.7)],
            0.5,
            20 + number,
            0.0,
        )
    assert (found["total"], found["score"]) == (1.0, 0.1)
    alice = the(record_of(store, ALICE))
    assert (alice.reward, alice.score.right, alice.pass_at) == (1.0, 1.0, {1: (0.0, 10)})
    _, graded = store.run(reader.evaluation, f"{3:032x}") or ({}, None)
    assert graded is not None and list(graded.scores) == [ScoredAnswer.of(0.1), ScoredAnswer.of(0.7)]


def test_a_peers_self_description_is_stored_with_its_evaluations(store: Database) -> None:
    """A peer has its latest self-description; each question keeps the one from when it was asked."""
    said = {
        "name": "<b>otter</b>",
        "sharing": "swarm",
        "local": 4,
        "external": 0,
        "strategy": "uniform",
        "version": "1",
        "hardware": "cpu",
    }
    store.run(judge_store.asked, replace(question(1), attributes=Attributes(1, "tiny", **said)), 1, 0.0)  # type: ignore[arg-type] # numbers and texts
    store.run(judge_store.graded, question(1), [ANSWER], [RIGHT], 0.5, 2, 0.0)
    assert the(record_of(store, ALICE)).said == said
    evaluate(store, 2, 1.0)
    assert the(record_of(store, ALICE)).said == {}
    (newest, first), _ = store.run(reader.history, ALICE, 2**63 - 1)
    assert first.items() >= said.items() and not said.keys() & newest.keys()


@pytest.mark.net
def test_a_database_that_cannot_store_every_name_is_rejected(request: pytest.FixtureRequest) -> None:
    address = request.getfixturevalue("postgresql")()
    for encoding in ("SQL_ASCII", "LATIN1"):  # SQL_ASCII is the default without a locale
        with psycopg.connect(address, autocommit=True) as admin:
            as_c = "TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
            admin.execute(f"CREATE DATABASE {encoding} ENCODING '{encoding}' {as_c}")
    where = make_url(address).set(database="sql_ascii").render_as_string()
    with closing(opened(where)) as store:
        evaluate(store, 1, 1.0, model="Sówka 🦦")
        assert the(record_of(store, ALICE)).model == "Sówka 🦦"
    with pytest.raises(JudgeError, match=r"(?s)the encoding LATIN1.*ENCODING 'UTF8'"):
        opened(where.replace("sql_ascii", "latin1"))


@pytest.mark.net
def test_a_silently_lost_database_server_is_noticed(request: pytest.FixtureRequest) -> None:
    address = request.getfixturevalue("postgresql")()
    for more, seconds in (("", "30"), ("&keepalives_idle=7", "7")):
        with closing(Database(address + more)) as database, database.begin() as db:
            connection: Any = db.connection.driver_connection
            said = connection.info.get_parameters()
            assert (said["keepalives_idle"], said["tcp_user_timeout"]) == (seconds, "60000")
