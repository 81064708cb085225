"""The judge's database: SQLite, one connection, one thread at a time. A commit survives kill -9 and a power cut (WAL, synchronous=FULL).

Times are seconds since the epoch by the judge's own clock, given by the caller. Errors of the disk reach the caller as sqlite3.Error.
"""

import fcntl
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from judge.errors import DatabaseInUse, DatabaseUnusable
from judge.leaderboard import BOARD_PAGE, LISTED_ANSWERS, WINDOW, LeaderboardPage, Record, ScoreTally, Standing, curve_numbers, tally
from judge.sessions import OpenQuestion
from p2p.types import PeerId
from swarmd.tasks.scoring import Completion, GradeReason

SCHEMA_VERSION = 2
LAPSED = "not answered in time"  # the reason of a question that counts as wrong without an answer
PROBE_BYTES = 16 * 1024
HISTORY_PAGE = 500  # answers of a peer, at most,
HISTORY_BYTES = 192 * 1024  # and at most so many bytes of JSON, but one answer always

_SCHEMA = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE peers (
    peer TEXT PRIMARY KEY, model TEXT NOT NULL, first_seen REAL NOT NULL, last_seen REAL NOT NULL, sequence INTEGER NOT NULL,
    answered INTEGER NOT NULL DEFAULT 0, unanswered INTEGER NOT NULL DEFAULT 0, reward REAL NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE evaluations (
    id TEXT PRIMARY KEY, peer TEXT NOT NULL REFERENCES peers, round INTEGER NOT NULL, model TEXT NOT NULL,
    specialty TEXT NOT NULL, n INTEGER NOT NULL, asked_at REAL NOT NULL,
    state TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'graded', 'unanswered', 'void')),
    number INTEGER, reward REAL, reason TEXT, total REAL, seconds REAL, answer TEXT, ended INTEGER,
    CHECK ((state = 'graded') = (number IS NOT NULL AND reward IS NOT NULL AND answer IS NOT NULL))
) STRICT;
CREATE UNIQUE INDEX evaluations_graded ON evaluations (peer, number) WHERE number IS NOT NULL;
CREATE INDEX evaluations_open ON evaluations (state) WHERE state = 'open';
"""
# What counts has a number: graded answers, and since schema 2 questions that lapsed. `low`: the lower end of the score's interval.
_SCHEMA_2 = f"""
ALTER TABLE peers ADD COLUMN low REAL NOT NULL DEFAULT 0;
DROP INDEX IF EXISTS peers_seen;
CREATE INDEX peers_board ON peers (low DESC, peer) WHERE answered >= {LISTED_ANSWERS};
"""


@dataclass(frozen=True, slots=True)
class Grade:
    """One answer, scored and recorded."""

    evaluation: str  # its id
    reward: float
    reason: str
    specialty: str
    answered: int  # answers of this peer, this one included
    total: float  # its rewards so far
    score: float  # pass@1 of its newest questions,
    n: int  # so many


class Store:
    """Opened in one thread at a time; the caller sees to that (the app gives it a thread of its own)."""

    def __init__(self, path: Path, curriculum: str) -> None:
        """`curriculum`: name and digest; one database holds one curriculum. Raises DatabaseInUse, DatabaseUnusable."""
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = path.with_name(path.name + ".lock").open("w")
        except OSError as error:
            raise DatabaseUnusable(f"cannot write the database {path}: {error.strerror}; give another file with --database") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back by the kernel however this process ends
        except OSError:
            self._lock.close()
            raise DatabaseInUse(f"another judge is using {path}; stop it, or give this one another file with --database") from None
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5)
            self._prepare(curriculum)
        except sqlite3.Error as error:
            self._lock.close()
            raise DatabaseUnusable(
                f"{path} cannot be used as the judge's database: {error}; restore it from a backup, or give another file with --database"
            ) from None
        except DatabaseUnusable:
            self.close()
            raise

    def _prepare(self, curriculum: str) -> None:
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("PRAGMA foreign_keys=ON")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._db.executescript(f"BEGIN; {_SCHEMA} {_SCHEMA_2} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        elif version == 1:
            self._move_to_2()
        elif version != SCHEMA_VERSION:
            raise DatabaseUnusable(
                f"{self._path} was written by another version of the judge (schema {version}, this one knows {SCHEMA_VERSION}); "
                "run that version, or give another file with --database"
            )
        with self._write():
            self._db.execute("INSERT OR IGNORE INTO about VALUES ('curriculum', ?)", (curriculum,))
            held = self._db.execute("SELECT value FROM about WHERE name = 'curriculum'").fetchone()[0]
            if held != curriculum:
                raise DatabaseUnusable(
                    f"{self._path} holds answers to {held}, and this judge asks {curriculum}; "
                    "start it with the same --curriculum, or give another file with --database"
                )
            # Questions that were open at the last stop cannot be answered any more. That is not the peers' fault.
            self._db.execute("UPDATE evaluations SET state = 'void' WHERE state = 'open'")

    def _move_to_2(self) -> None:
        with self._write():
            for statement in filter(str.strip, _SCHEMA_2.split(";")):
                self._db.execute(statement)
            for (peer,) in self._db.execute("SELECT peer FROM peers").fetchall():
                self._place(peer)
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def sequence(self, peer: PeerId) -> int:
        """The highest sequence number recorded for this peer; -1: none."""
        row = self._db.execute("SELECT sequence FROM peers WHERE peer = ?", (peer,)).fetchone()
        return -1 if row is None else int(row["sequence"])

    def answered(self, peer: PeerId) -> int:
        row = self._db.execute("SELECT answered FROM peers WHERE peer = ?", (peer,)).fetchone()
        return 0 if row is None else int(row["answered"])

    def asked(self, question: OpenQuestion, round_number: int, model: str, sequence: int, at: float) -> None:
        with self._write():
            self._db.execute(
                "INSERT INTO peers (peer, model, first_seen, last_seen, sequence) VALUES (?, ?, ?, ?, ?) ON CONFLICT (peer) "
                "DO UPDATE SET model = excluded.model, last_seen = excluded.last_seen, sequence = max(sequence, excluded.sequence)",
                (question.peer, model, at, at, sequence),
            )
            ref = question.task.ref
            self._db.execute(
                "INSERT INTO evaluations (id, peer, round, model, specialty, n, asked_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (question.id, question.peer, round_number, model, ref.specialty, ref.n, at),
            )

    def graded(self, question: OpenQuestion, answer: Completion, reason: GradeReason, seconds: float, sequence: int, at: float) -> Grade:
        """Record a scored answer. `seconds`: from question to answer, by the judge's monotonic clock."""
        with self._write():
            peer = self._db.execute(
                "UPDATE peers SET answered = answered + 1, reward = reward + ?, last_seen = ?, sequence = max(sequence, ?) WHERE peer = ? "
                "RETURNING answered, answered + unanswered AS number, reward",
                (reason.reward, at, sequence, question.peer),
            ).fetchone()
            done = self._db.execute(
                "UPDATE evaluations SET state = 'graded', number = ?, reward = ?, reason = ?, total = ?, seconds = ?, answer = ?, "
                "ended = ? WHERE id = ? AND state = 'open'",
                (peer["number"], reason.reward, reason.value, peer["reward"], seconds, answer.text, answer.ended, question.id),
            )
            if done.rowcount != 1:
                raise sqlite3.IntegrityError(f"evaluation {question.id} is not open")  # undone as a whole: nothing counts twice
            recent = self._place(question.peer)
        specialty, answered, total = question.task.ref.specialty, peer["answered"], peer["reward"]
        return Grade(question.id, reason.reward, reason.value, specialty, answered, total, recent.share, recent.answers)

    def lapsed(self, questions: Sequence[OpenQuestion]) -> None:
        """Record questions that were not answered in time: they count as wrong."""
        with self._write():
            for question in questions:
                done = self._db.execute(
                    "UPDATE evaluations SET state = 'unanswered', reward = 0, reason = ?, (number, total) = "
                    "(SELECT answered + unanswered + 1, reward FROM peers WHERE peer = ?) WHERE id = ? AND state = 'open'",
                    (LAPSED, question.peer, question.id),
                )
                if done.rowcount == 1:
                    self._db.execute("UPDATE peers SET unanswered = unanswered + 1 WHERE peer = ?", (question.peer,))
                    self._place(question.peer)

    def _place(self, peer: str) -> ScoreTally:
        """The tally of its newest questions; its place on the board follows from it."""
        recent = tally(self._recent(peer))
        self._db.execute("UPDATE peers SET low = ? WHERE peer = ?", (recent.interval.low if recent.answers else 0.0, peer))
        return recent

    def _recent(self, peer: str) -> Sequence[tuple[str, float]]:
        """Specialty and reward of the newest questions that count, oldest first."""
        rows = self._db.execute(
            "SELECT specialty, reward FROM evaluations WHERE peer = ? AND number IS NOT NULL ORDER BY number DESC LIMIT ?", (peer, WINDOW)
        ).fetchall()
        return [(row["specialty"], row["reward"]) for row in reversed(rows)]

    def probe(self, at: float) -> None:
        """Write about as much as a question and its answer need; sqlite3.Error where that is not possible."""
        with self._write():
            self._db.execute("INSERT OR REPLACE INTO about VALUES ('probe', ?)", (f"{at} ".ljust(PROBE_BYTES, "."),))

    def void(self, question: OpenQuestion) -> None:
        """The judge could not score the answer: the question does not count."""
        with self._write():
            self._db.execute("UPDATE evaluations SET state = 'void' WHERE id = ? AND state = 'open'", (question.id,))

    def board(self, after: int, limit: int = BOARD_PAGE) -> LeaderboardPage:
        """The peers ranked `after` + 1 and on, best first; of equal ones the first by its id."""
        rows = self._db.execute(
            f"SELECT * FROM peers WHERE answered >= {LISTED_ANSWERS} ORDER BY low DESC, peer LIMIT ? OFFSET ?",  # noqa: S608 - a constant
            (limit, after),
        ).fetchall()
        listed, others, answers = self._db.execute(
            f"SELECT count(*) FILTER (WHERE answered >= {LISTED_ANSWERS}), count(*) FILTER (WHERE answered BETWEEN 1 AND "  # noqa: S608
            f"{LISTED_ANSWERS - 1}), total(answered) FROM peers"
        ).fetchone()
        return LeaderboardPage(
            [Standing(after + place, self._record(row)) for place, row in enumerate(rows, 1)], after, listed, others, int(answers)
        )

    def record(self, peer: str) -> Record | None:
        row = self._db.execute("SELECT * FROM peers WHERE peer = ?", (peer,)).fetchone()
        return None if row is None else self._record(row)

    def history(self, peer: str, before: int, limit: int = HISTORY_PAGE) -> tuple[Sequence[Mapping[str, Any]], int | None]:
        """What counts and has a number below `before`, newest first, and where the next page begins; None: it was the last.

        An answer is null where the question lapsed. The task and the answer are there: anybody can score it again.
        """
        found: list[Mapping[str, Any]] = []
        size = 0
        rows = self._db.execute(
            "SELECT id AS evaluation, number, round, model, specialty, n, asked_at, seconds, answer, ended, reward, reason, total "
            "FROM evaluations WHERE peer = ? AND number < ? ORDER BY number DESC LIMIT ?",
            (peer, before, limit + 1),
        )
        for row in rows:
            entry = {**dict(row), "ended": None if row["ended"] is None else bool(row["ended"])}
            size += len(json.dumps(entry, ensure_ascii=False).encode())
            if found and (len(found) == limit or size > HISTORY_BYTES):
                return found, int(found[-1]["number"])
            found.append(entry)
        return found, None

    def _record(self, row: sqlite3.Row) -> Record:
        numbers = curve_numbers(row["answered"] + row["unanswered"])
        marks = ",".join("?" * len(numbers))
        curve = self._db.execute(
            f"SELECT number, total FROM evaluations WHERE peer = ? AND number IN ({marks}) ORDER BY number",  # noqa: S608 - marks are ?,?,?
            (row["peer"], *numbers),
        ).fetchall()
        return Record(
            row["peer"], row["model"], row["first_seen"], row["last_seen"], row["answered"], row["unanswered"], row["reward"],
            recent=self._recent(row["peer"]), curve=[(r["number"], r["total"]) for r in curve],
        )  # fmt: skip

    @contextmanager
    def _write(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk may have ended it already
                self._db.execute("ROLLBACK")
            raise
