"""Uploads in the judge's database: their state and their outcome.

Each public function is a step (judge/store/store.py).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, case, delete, func, insert, select, update

from judge.figures.leaderboard import ScoreTally
from judge.figures.verification import Upload, VerifiedAnswer, described
from judge.store.tables import verifications as table
from p2p.types import PeerId
from swarmd.tasks.answers import added

# Maximum number of ended uploads that are kept per peer.
KEPT_UPLOADS = 5
# Maximum number of attempts to evaluate an upload, if the judge was killed during an evaluation of it.
MAX_TRIES = 2


def sequence(db: Connection, peer: PeerId) -> int:
    """Return the highest sequence number of this peer's uploads; -1: none."""
    highest = db.scalar(select(func.max(table.c.sequence)).where(table.c.peer == peer))
    return -1 if highest is None else int(highest)


def queued(db: Connection, upload: Upload, sequence: int, at: float) -> None:
    db.execute(insert(table).values(**asdict(upload), sequence=sequence, at=at, state="queued", tries=0))


def recovered(db: Connection, whole: Sequence[str], at: float) -> Sequence[Upload]:
    """Return the uploads that wait after a start, oldest first; refuse those that cannot be evaluated.

    whole: ids of the files that are complete.
    """
    waiting = table.c.state.in_(("queued", "running"))
    for lost, error, remedy in (
        (
            table.c.tries >= MAX_TRIES,
            "the judge stopped twice while it evaluated these weights",
            "Upload them again; tell the judge's operator if it recurs.",
        ),
        (
            table.c.id.not_in(whole),
            "the judge no longer has the weights",
            "Upload them again.",
        ),
    ):
        db.execute(
            update(table).where(waiting, lost).values(state="refused", ended=at, error=error, remedy=remedy)
        )
    db.execute(update(table).where(waiting).values(state="queued"))
    return [_upload(row) for row in db.execute(select(table).where(waiting).order_by(table.c.at))]


def running(db: Connection, id: str) -> None:
    db.execute(update(table).where(table.c.id == id).values(state="running", tries=table.c.tries + 1))


def refused(db: Connection, upload: Upload, at: float, error: str, remedy: str) -> None:
    _end(db, upload, {"state": "refused", "ended": at, "error": error, "remedy": remedy})


def done(
    db: Connection,
    upload: Upload,
    at: float,
    answers: Sequence[VerifiedAnswer],
    receipt: Mapping[str, str],
) -> None:
    right = added(*(answer.reward for answer in answers))
    outcome = {"state": "done", "ended": at, "correct": right, "questions": len(answers), **receipt}
    _end(db, upload, {**outcome, "found": json.dumps(answers, ensure_ascii=False)})


def _end(db: Connection, upload: Upload, outcome: Mapping[str, Any]) -> None:
    of_peer = table.c.peer == upload.peer
    db.execute(update(table).where(table.c.id == upload.id).values(**outcome))
    newest_first = case((table.c.state == "done", 0), else_=1), table.c.ended.desc()
    kept = (
        select(table.c.id)
        .where(of_peer, table.c.ended.is_not(None))
        .order_by(*newest_first)
        .limit(KEPT_UPLOADS)
    )
    db.execute(
        delete(table).where(
            of_peer, table.c.ended.is_not(None), table.c.id.not_in(kept), table.c.id != upload.id
        )
    )


def find(db: Connection, id: str) -> tuple[Row[Any], Sequence[VerifiedAnswer]] | None:
    """Return an upload, and each question with its greedy answer if it is done."""
    if (row := db.execute(select(table).where(table.c.id == id)).one_or_none()) is None:
        return None
    return row, [VerifiedAnswer(*answer) for answer in json.loads(row.found or "[]")]


def newest(db: Connection, peers: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
    """Return the document of each peer's newest upload that is done."""
    columns = [column for column in table.c if column.name not in ("found", "receipt", "signature")]
    done = select(*columns).where(table.c.peer.in_(peers), table.c.state == "done").order_by(table.c.ended)
    return {row.peer: document(row) for row in db.execute(done)}


def document(row: Row[Any]) -> Mapping[str, Any]:
    """Return the JSON document of an upload and its outcome so far."""
    said = {**described(_upload(row), row.at), "state": row.state}
    if row.state == "refused":
        said |= {"error": row.error, "remedy": row.remedy}
    if row.state == "done":
        score = ScoreTally(row.correct, row.questions)
        said |= {
            "ended": row.ended,
            "score": score.share,
            "low": score.interval.low,
            "high": score.interval.high,
            "right": score.right,
            "n": score.answers,
        }
    return said


def _upload(row: Row[Any]) -> Upload:
    return Upload(row.id, PeerId(row.peer), row.model, row.lora_rank, row.digest, row.size, row.answers)
