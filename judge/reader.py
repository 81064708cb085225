"""Reads the judge's database for pages and JSON. One thread at a time uses it, over a connection of its own: no reader holds up a grade."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, bindparam, func, select

from judge import arms, window_rows
from judge.attributes import Attributes
from judge.database import Database
from judge.leaderboard import BOARD_PAGE, LISTED_ANSWERS, LeaderboardPage, Record, Standing, curve_numbers
from judge.ranks import RankRanges
from judge.receipts import GradedEvaluation, GradedQuestion
from judge.store import RECENT, SAID, Counts
from judge.tables import evaluations, listed, peers
from judge.verified.records import VerificationRecords, newest
from judge.verified.verification import Verification
from judge.windows import QuestionWindow
from swarmd.tasks.scoring import Completion, GradeReason, TaskRef

OPTIONAL = frozenset({"further", *SAID})  # left out of a peer's page where there is nothing
HISTORY_PAGE = 500  # answers of a peer, at most,
HISTORY_BYTES = 192 * 1024  # and at most so many bytes of JSON, but one answer always

_SCORES = select(peers.c.recent_right, peers.c.recent_n, func.count()).where(listed).group_by(peers.c.recent_right, peers.c.recent_n)
_PEER = peers.c.peer == bindparam("of")


class Reader:
    def __init__(self, database: Database) -> None:
        self._database = database
        self.verified = VerificationRecords(database.begin)

    def close(self) -> None:
        self._database.close()

    def board(self, after: int, limit: int = BOARD_PAGE) -> LeaderboardPage:
        """The peers ranked `after` + 1 and on, best first; of equal ones the first by its id."""
        page = select(peers).where(listed).order_by(peers.c.low.desc(), peers.c.peer).limit(limit).offset(after)
        few = peers.c.answered.between(1, LISTED_ANSWERS - 1)
        totals = select(func.count().filter(listed), func.count().filter(few), func.coalesce(func.sum(peers.c.answered), 0))
        with self._database.begin() as db:
            rows = db.execute(page).all()
            verified = newest(db, [row.peer for row in rows])
            ranges = RankRanges({(right, n): many for right, n, many in db.execute(_SCORES)})
            standings = [
                Standing(rank, self._record(db, row, verified), ranges.of(row.recent_right, row.recent_n))
                for rank, row in enumerate(rows, after + 1)
            ]
            many, others, answers = db.execute(totals).one()
        return LeaderboardPage(standings, after, many, others, int(answers))

    def record(self, peer: str) -> Record | None:
        with self._database.begin() as db:
            row = db.execute(select(peers).where(_PEER), {"of": peer}).one_or_none()
            return None if row is None else self._record(db, row, newest(db, [peer]))

    def arms(self, model: str | None) -> arms.ArmsView:
        """Swarm and solo of a model; None: of the one with most peers on its smaller side."""
        with self._database.begin() as db:
            return arms.view(db, model)

    def history(self, peer: str, before: int, limit: int = HISTORY_PAGE) -> tuple[Sequence[Mapping[str, Any]], int | None]:
        """What counts and has a number below `before`, newest first, and where the next page begins; None: it was the last.

        An answer is null where the question lapsed. The task and the answer are there: anybody can score it again.
        """
        found: list[Mapping[str, Any]] = []
        size = 0
        with self._database.begin() as db:
            for row in db.execute(_page(peer, before, limit + 1)).mappings():
                entry = {name: value for name, value in row.items() if value is not None or name not in OPTIONAL}
                entry["ended"] = None if row["ended"] is None else bool(row["ended"])
                if "further" in entry:
                    entry["further"] = json.loads(entry["further"])
                size += len(json.dumps(entry, ensure_ascii=False).encode())
                if found and (len(found) == limit or size > HISTORY_BYTES):
                    return found, int(found[-1]["number"])
                found.append(entry)
        return found, None

    def windows(self, before: int) -> Sequence[QuestionWindow]:
        """Those with a number below `before`, the newest first; a page of them."""
        with self._database.begin() as db:
            return window_rows.read(db, before)

    def evaluation(self, id: str) -> GradedEvaluation | None:
        """One that was answered, with what its receipt says; None: there is none, or it is older than receipts that are made again."""
        c = evaluations.c
        with self._database.begin() as db:
            row = db.execute(select(evaluations).where(c.id == id, c.state == "graded", c.answered_at.is_not(None))).one_or_none()
            if row is None:
                return None
            window = None if row.window_number is None else window_rows.read(db, row.window_number + 1, limit=1)[0]
        further = json.loads(row.further or "[]")
        answers = [Completion(row.answer, bool(row.ended)), *(Completion(other["text"], other["ended"]) for other in further)]
        reasons = [GradeReason(row.reason), *(GradeReason(other["reason"]) for other in further)]
        attributes = Attributes(row.round, row.model, **{name: row._mapping[name] for name in SAID})
        ref = TaskRef(row.specialty, row.n)
        question = GradedQuestion(row.id, row.peer, attributes, ref, window, row.place, row.number, row.answered_at)
        return GradedEvaluation(question, answers, reasons)

    def _record(self, db: Connection, row: Counts, verified: Mapping[str, Verification]) -> Record:
        c = evaluations.c
        numbers = curve_numbers(row.answered + row.unanswered)
        curve = select(c.number, c.total).where(c.peer == row.peer, c.number.in_(numbers)).order_by(c.number)
        recent = db.execute(RECENT, {"of": row.peer}).all()[::-1]
        return Record(
            row.peer, row.model, row.first_seen, row.last_seen, row.answered, row.unanswered, row.reward,
            recent=[(r.specialty, r.reward) for r in recent], curve=[(number, total) for number, total in db.execute(curve)],
            said={name: row._mapping[name] for name in SAID if row._mapping[name] is not None},
            samples=[(r.answers, r.correct or 0) for r in recent if r.answers > 1],
            verified=verified[row.peer].document() if row.peer in verified else None,
        )  # fmt: skip


def _page(peer: str, before: int, limit: int) -> Select[Any]:
    c = evaluations.c
    shown = [c.number, c.round, c.model, c.specialty, c.n, c.asked_at, c.seconds, c.answer, c.ended, c.reward, c.reason, c.total]
    shown += [c.answers, c.correct, c.further, *(c[name] for name in SAID)]
    chosen = select(c.id.label("evaluation"), *shown).where(c.peer == peer, c.number < before)
    return chosen.order_by(c.number.desc()).limit(limit)
