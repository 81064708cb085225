"""The audit of a judge's database finds differences, with both kinds of database."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from judge import cli
from judge.errors import JudgeError
from judge.store import store as judge_store
from judge.store.database import Database
from judge.store.store import open_store
from p2p.types import PeerId
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import tasks_of
from swarmd.types import Completion
from tests.judge.store import audit
from tests.judge.store.test_store import ALICE, BOB, evaluate, question

CURRICULUM = f"tiny-9 {TINY_9.digest}"
HOSTILE = 'a\\ \0 "quoted", \r\n =1+1'


def fill(database: str, verifier: Verifier) -> None:
    """Store real questions with right, wrong and hostile answers, scored as the judge does.

    One further question lapsed, and one is void.
    """
    tasks = tasks_of("tiny-9")
    with closing(open_store(database, CURRICULUM)) as store:
        for number in range(1_000_000_001, 1_000_000_009):
            asked = question(number, BOB if number % 2 else ALICE)
            task = tasks.task(asked.task.ref)
            assert task is not None
            text = HOSTILE if number % 3 == 0 else f"<answer>{solution(tasks, task)}</answer>"
            store.run(judge_store.asked, asked, number, 0.0)
            ((reason,),) = verifier.judge([(task.ref, [Completion(text, True)])])
            store.run(judge_store.graded, asked, [Completion(text, True)], [reason], 0.5, number, 1.0)
        for number in (1, 2):
            store.run(judge_store.asked, question(number), 3 * 10**9 + number, 2.0)
        store.run(judge_store.lapsed, [question(1)])


def change(database: str, statement: str) -> None:
    with closing(Database(database)) as opened, opened.begin() as db:
        db.exec_driver_sql(statement)


def test_the_audit_scores_stored_answers_again(database: str, verifier: Verifier) -> None:
    fill(database, verifier)
    assert audit.verify(database, CURRICULUM, verifier.judge) == (8, [])
    with pytest.raises(JudgeError, match="--curriculum"):
        audit.verify(database, "sapo-9 0", verifier.judge)
    right = "(SELECT min(id) FROM evaluations WHERE reward = 1)"
    change(database, f"UPDATE evaluations SET reward = 0, reason = 'wrong' WHERE id = {right}")
    answers, differences = audit.verify(database, CURRICULUM, verifier.judge)
    assert answers == 8
    assert "stored (1, (0.0, 'wrong')), found (1, (1.0, 'correct'))" in differences[0]
    # The totals differ, too.
    assert any("of bob" in line or "of alice" in line for line in differences[1:])


def test_a_peer_with_a_higher_total_than_its_answers_is_found(database: str, verifier: Verifier) -> None:
    fill(database, verifier)
    change(database, "UPDATE peers SET reward = reward + 1 WHERE peer = 'alice'")
    _, (difference,) = audit.verify(database, CURRICULUM, verifier.judge)
    assert difference.startswith("peer alice: ")


def test_a_backup_made_by_sqlite_serves_as_the_same_judge(tmp_path: Path, verifier: Verifier) -> None:
    database, copy = str(tmp_path / "judge.sqlite3"), str(tmp_path / "copy.sqlite3")
    fill(database, verifier)
    with closing(open_store(database, CURRICULUM)), closing(sqlite3.connect(database)) as other:
        other.execute("VACUUM INTO ?", (copy,))
    assert audit.verify(copy, CURRICULUM, verifier.judge) == (8, [])
    with closing(open_store(copy, CURRICULUM)) as store:
        evaluate(store, 11, 1.0, PeerId("carol"))


def test_a_missing_database_is_reported_and_not_created(tmp_path: Path) -> None:
    absent = CliRunner().invoke(cli.app, ["moderate", "log", "--database", str(tmp_path / "none")])
    assert "there is no database" in str(absent.exception)
    assert not (tmp_path / "none").exists()
