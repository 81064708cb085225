"""Uploads in the judge's database: their state and their outcome.

Each method is a step of the store (judge/store/store.py), so it is one transaction.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, case, delete, func, insert, select, update

from judge.figures.verification import Upload, Verification, VerifiedAnswer
from judge.store.tables import verifications as table
from p2p.types import PeerId
from swarmd.tasks.answers import added

# Maximum number of ended uploads that are kept per peer.
KEPT_UPLOADS = 5
# Maximum number of attempts to evaluate an upload, if the judge was killed during an evaluation of it.
MAX_TRIES = 2


class VerificationRecords:
    def __init__(self, begin: Callable[[], AbstractContextManager[Connection]]) -> None:
        self._begin = begin

    def sequence(self, peer: PeerId) -> int:
        """Return the highest sequence number of this peer's uploads; -1: none."""
        with self._begin() as db:
            highest = db.scalar(select(func.max(table.c.sequence)).where(table.c.peer == peer))
        return -1 if highest is None else int(highest)

    def queued(self, upload: Upload, sequence: int, at: float) -> None:
        with self._begin() as db:
            db.execute(
                insert(table).values(**asdict(upload), sequence=sequence, at=at, state="queued", tries=0)
            )

    def recovered(self, whole: Sequence[str], at: float) -> Sequence[Upload]:
        """Return the uploads that wait after a start, oldest first; refuse those that cannot be evaluated.

        whole: ids of the files that are complete.
        """
        with self._begin() as db:
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
                    update(table)
                    .where(waiting, lost)
                    .values(state="refused", ended=at, error=error, remedy=remedy)
                )
            db.execute(update(table).where(waiting).values(state="queued"))
            return [_upload(row) for row in db.execute(select(table).where(waiting).order_by(table.c.at))]

    def running(self, id: str) -> None:
        with self._begin() as db:
            db.execute(update(table).where(table.c.id == id).values(state="running", tries=table.c.tries + 1))

    def refused(self, upload: Upload, at: float, error: str, remedy: str) -> None:
        self._end(upload, {"state": "refused", "ended": at, "error": error, "remedy": remedy})

    def done(
        self,
        upload: Upload,
        at: float,
        answers: Sequence[VerifiedAnswer],
        receipt: Mapping[str, str],
    ) -> None:
        right = added(*(answer.reward for answer in answers))
        outcome = {"state": "done", "ended": at, "correct": right, "questions": len(answers), **receipt}
        self._end(upload, {**outcome, "found": json.dumps(answers, ensure_ascii=False)})

    def _end(self, upload: Upload, outcome: Mapping[str, Any]) -> None:
        of_peer = table.c.peer == upload.peer
        with self._begin() as db:
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

    def find(self, id: str) -> tuple[Verification, Sequence[VerifiedAnswer]] | None:
        with self._begin() as db:
            row = db.execute(select(table).where(table.c.id == id)).one_or_none()
        if row is None:
            return None
        return _verification(row), [VerifiedAnswer(*answer) for answer in json.loads(row.found or "[]")]


def newest(db: Connection, peers: Sequence[str]) -> Mapping[str, Verification]:
    """Return the newest finished verification of each peer."""
    columns = [column for column in table.c if column.name not in ("found", "receipt", "signature")]
    done = select(*columns).where(table.c.peer.in_(peers), table.c.state == "done").order_by(table.c.ended)
    return {row.peer: _verification(row) for row in db.execute(done)}


def _upload(row: Row[Any]) -> Upload:
    return Upload(row.id, PeerId(row.peer), row.model, row.lora_rank, row.digest, row.size, row.answers)


def _verification(row: Row[Any]) -> Verification:
    fields = row._mapping
    outcome = {name: fields.get(name) for name in ("ended", "error", "remedy", "receipt", "signature")}
    return Verification(
        _upload(row),
        row.state,
        row.at,
        **outcome,
        right=row.correct or 0.0,
        questions=row.questions or 0,
    )
