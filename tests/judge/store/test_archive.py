"""Copies, exports and checks of a judge's database, by the command line, on both kinds of database."""

import csv
import io
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from judge import cli
from judge.errors import DatabaseUnusable
from judge.store import archive
from judge.store.database import Database
from judge.store.reader import Reader
from judge.store.store import Store
from p2p.types import PeerId
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.grading import solution
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import tasks_of
from swarmd.types import Completion
from tests.disk import on_disk
from tests.judge.store.test_store import ALICE, BOB, evaluate, question

CURRICULUM = f"tiny-9 {TINY_9.digest}"
HOSTILE = 'a\\ \0 "quoted", \r\n =1+1'


def fill(database: str, verifier: Verifier) -> None:
    """Real questions with right, wrong and hostile answers, as the judge scores them.

    One that lapsed, one that is void.
    """
    tasks = tasks_of("tiny-9")
    with closing(Store(database, CURRICULUM)) as store:
        for number in range(1_000_000_001, 1_000_000_009):
            asked = question(number, BOB if number % 2 else ALICE)
            task = tasks.task(asked.task.ref)
            assert task is not None
            text = HOSTILE if number % 3 == 0 else f"<answer>{solution(tasks, task)}</answer>"
            store.asked(asked, number, 0.0)
            ((reason,),) = verifier.judge([(task.ref, [Completion(text, True)])])
            store.graded(asked, [Completion(text, True)], [reason], 0.5, number, 1.0)
        for number in (1, 2):
            store.asked(question(number), 3 * 10**9 + number, 2.0)
        store.lapsed([question(1)])


def change(database: str, statement: str) -> None:
    with closing(Database(database)) as opened, opened.begin() as db:
        db.exec_driver_sql(statement)


def test_verify_scores_stored_answers_again(database: str, verifier: Verifier) -> None:
    fill(database, verifier)
    assert archive.verify(database, CURRICULUM, verifier.judge) == (8, [])
    with pytest.raises(DatabaseUnusable, match="--curriculum"):
        archive.verify(database, "sapo-9 0", verifier.judge)
    right = "(SELECT min(id) FROM evaluations WHERE reward = 1)"
    change(database, f"UPDATE evaluations SET reward = 0, reason = 'wrong' WHERE id = {right}")
    answers, differences = archive.verify(database, CURRICULUM, verifier.judge)
    assert answers == 8
    assert "stored (1, (0.0, 'wrong')), found (1, (1.0, 'correct'))" in differences[0]
    # The totals no longer add up
    assert any("of bob" in line or "of alice" in line for line in differences[1:])


def test_a_peer_with_more_than_it_earned_is_found(database: str, verifier: Verifier) -> None:
    fill(database, verifier)
    change(database, "UPDATE peers SET reward = reward + 1 WHERE peer = 'alice'")
    _, (difference,) = archive.verify(database, CURRICULUM, verifier.judge)
    assert difference.startswith("peer alice: ")


def test_a_backup_that_fails_leaves_nothing_that_looks_like_one(tmp_path: Path) -> None:
    Store(database := tmp_path / "judge.sqlite3", CURRICULUM).close()
    change(str(database), "DROP TABLE moderation")  # damaged
    with pytest.raises(DatabaseUnusable, match="no such table"):
        archive.backup(database, (folder := tmp_path / "backups") / "copy.sqlite3")
    assert list(folder.iterdir()) == []


def test_a_backup_outlasts_a_power_cut(tmp_path: Path) -> None:
    Store(tmp_path / "judge.db", CURRICULUM).close()
    with on_disk() as names:
        archive.backup(tmp_path / "judge.db", tmp_path / "copy.db")
    assert "copy.db" in names


def test_a_backup_that_was_killed_is_made_again_and_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite closes a file without a word where it cannot put its log into it, as on a full disk."""
    Store(database := tmp_path / "judge.sqlite3", CURRICULUM).close()
    copy, copied = tmp_path / "copy", archive._copied

    def cut_off(source: Path, to: Path) -> int:
        Path(f"{to}-wal").touch()
        return 1

    monkeypatch.setattr(archive, "_copied", cut_off)
    with pytest.raises(DatabaseUnusable, match="could not be completed"):
        archive.backup(database, copy)
    assert sorted(tmp_path.glob("*copy*")) == []
    monkeypatch.setattr(archive, "_copied", copied)
    # What a killed backup leaves: no process has this id.
    Store(tmp_path / ".copy.999999999" / "copy", "another").close()
    assert archive.backup(database, copy) == 1
    Store(copy, CURRICULUM).close()
    assert {path.name for path in tmp_path.glob("*copy*")} == {"copy", "copy.lock"}


def test_a_backup_serves_as_the_same_judge(database: str, tmp_path: Path, verifier: Verifier) -> None:
    """To a file, and back from the file to an empty database of the first kind.

    Nothing is lost or changed.
    """
    fill(database, verifier)
    copy = tmp_path / "copy.sqlite3"
    with closing(Store(database, CURRICULUM)) as store:  # the judge goes on
        rows = archive.backup(database, copy)
        before = [
            (Reader(store.database).standing(peer), Reader(store.database).history(peer, 2**63 - 1))
            for peer in (ALICE, BOB)
        ]
    assert rows == 1 + 2 + 10
    with closing(Store(copy, CURRICULUM)) as store:
        assert [
            (Reader(store.database).standing(peer), Reader(store.database).history(peer, 2**63 - 1))
            for peer in (ALICE, BOB)
        ] == before
        evaluate(store, 11, 1.0, PeerId("carol"))
    for taken in (copy, database):
        with pytest.raises(DatabaseUnusable, match="left as it is"):
            archive.backup(copy, taken)


def test_csv_has_every_question_and_answer(database: str, verifier: Verifier) -> None:
    fill(database, verifier)
    written = io.StringIO(newline="")
    assert archive.export(database, written) == 10
    rows = list(csv.DictReader(io.StringIO(written.getvalue(), newline="")))
    assert [row["state"] for row in rows].count("graded") == 8
    assert HOSTILE in {row["answer"] for row in rows}


def test_backup_export_and_verify_as_commands(tmp_path: Path, verifier: Verifier) -> None:
    database = str(tmp_path / "judge.sqlite3")
    fill(database, verifier)
    of = ["--database", database, "--curriculum", "tiny-9"]
    runner = CliRunner()
    Store(empty := tmp_path / "empty", CURRICULUM).close()
    nothing = runner.invoke(cli.app, ["verify", "--database", str(empty), "--curriculum", "tiny-9"])
    assert isinstance(nothing.exception, cli.NothingToVerify) and str(empty) in str(nothing.exception)
    assert (
        f"8 answers scored again, 0 differences: {database}" in runner.invoke(cli.app, ["verify", *of]).output
    )
    said = runner.invoke(cli.app, ["backup", str(tmp_path / "copy"), *of]).output
    assert "13 rows copied. Keep " in said and ".key too" in said
    assert (
        "10 questions written"
        in runner.invoke(cli.app, ["export", str(tmp_path / "answers.csv"), *of]).output
    )
    assert runner.invoke(cli.app, ["export", "-", *of]).output.startswith("id,peer,round,")
    assert isinstance(runner.invoke(cli.app, ["export", str(tmp_path), *of]).exception, cli.CannotWrite)
    change(database, "UPDATE peers SET answered = 100")
    assert runner.invoke(cli.app, ["verify", *of]).exit_code == 1
    absent = runner.invoke(
        cli.app, ["verify", "--database", str(tmp_path / "none"), "--curriculum", "tiny-9"]
    )
    assert isinstance(absent.exception, DatabaseUnusable)
    for act in (["moderate", "log"], ["export", str(tmp_path / "left")]):
        absent = runner.invoke(cli.app, [*act, "--database", str(tmp_path / "none")])
        assert "there is no database" in str(absent.exception)
    assert not (tmp_path / "none").exists() and not (tmp_path / "left").exists()  # neither is left behind
