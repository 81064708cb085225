"""Checks a judge's database. It reads one snapshot, so the judge may continue to write."""

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import Connection, RowMapping, select
from sqlalchemy.exc import SQLAlchemyError

from judge.errors import JudgeError
from judge.figures.leaderboard import WINDOW_QUESTIONS
from judge.store.database import Database
from judge.store.tables import about, evaluations, peers
from swarmd.tasks.answers import added
from swarmd.tasks.sandbox.client import Completion, Mark, TaskRef

# Rows read at a time.
ROWS = 500
_COUNTED = (peers.c.answered + peers.c.unanswered).label("counted")


def verify(database: Path | str, curriculum: str, mark: Mark) -> tuple[int, list[str]]:
    """Score every stored answer again, and compute each peer's figures again.

    curriculum: name and digest. Return the number of answers, and a line for each difference.
    """
    with reading(database) as db:
        held = db.scalar(select(about.c.value).where(about.c.name == "curriculum"))
        if held != curriculum:
            raise JudgeError(
                f"the database holds answers to {held}, not to {curriculum}; give its --curriculum"
            )
        answers = 0
        found: list[str] = []
        graded = select(evaluations).where(evaluations.c.state == "graded").order_by(evaluations.c.id)
        for part in db.execute(graded).mappings().partitions(ROWS):
            answers += len(part)
            found += _scored_otherwise(part, mark)
        return answers, [*found, *_counted_otherwise(db)]


def _scored_otherwise(rows: Sequence[RowMapping], mark: Mark) -> Iterator[str]:
    further = [json.loads(row["further"] or "[]") for row in rows]
    items = []
    for row, others in zip(rows, further, strict=True):
        answers = [
            Completion(row["answer"], bool(row["ended"])),
            *(Completion(other["text"], other["ended"]) for other in others),
        ]
        items.append((TaskRef(row["specialty"], row["n"]), answers))
    for row, others, scores in zip(rows, further, mark(items), strict=True):
        given = [row, *others]
        stored = (row["correct"], *((each["reward"], each["reason"]) for each in given))
        again = (
            sum(score.reward >= 1 for score in scores),
            *((score.reward, score.reason.value) for score in scores),
        )
        if stored != again:
            yield f"evaluation {row['id']}: stored {stored}, found {again}"


def _counted_otherwise(db: Connection) -> Iterator[str]:
    """Check that each peer's questions are numbered 1, 2, 3 … and add up to the peer's totals.

    If earlier questions were pruned, the totals at the first remaining row are accepted if they are possible.
    """
    c = evaluations.c
    counting = (
        select(c.peer, c.number, c.reward, c.total, c.state, _COUNTED)
        .join(peers, peers.c.peer == c.peer)
        .where(c.number.is_not(None))
        .order_by(c.peer, c.number)
    )
    sums: dict[str, tuple[int, int, float]] = {}
    pruned: set[str] = set()
    newest: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW_QUESTIONS))
    for row in db.execute(counting):
        number, answered, reward = sums.get(row.peer, (0, 0, 0.0))
        gap, earned = row.number - number - 1, added(row.total, -row.reward, -reward)
        # A peer's newest questions are never pruned.
        if gap > 0 and row.number <= row.counted - WINDOW_QUESTIONS + 1 and 0 <= earned <= gap:
            pruned.add(row.peer)
            number, reward = number + gap, added(reward, earned)
        number, reward = number + 1, added(reward, row.reward)
        sums[row.peer] = number, answered + (row.state == "graded"), reward
        newest[row.peer].append(row.reward)
        stored, again = (row.number, row.total), (number, reward)
        if stored != again:
            yield f"question {row.number} of {row.peer}: stored {stored}, found {again}"
    totals = select(
        peers.c.peer, _COUNTED, peers.c.answered, peers.c.reward, peers.c.recent_n, peers.c.recent_right
    )
    for peer, *kept in db.execute(totals):
        number, answered, reward = sums.get(peer, (0, 0, 0.0))
        # How many pruned questions were answered is unknown.
        answered = max(answered, min(kept[1], number)) if peer in pruned else answered
        found = [number, answered, reward, len(newest[peer]), added(*newest[peer])]
        if kept != found:
            yield f"peer {peer}: stored {tuple(kept)}, found {tuple(found)}"


@contextmanager
def reading(database: Path | str) -> Iterator[Connection]:
    """Open one snapshot of a database, unaffected by concurrent writes. May raise JudgeError."""
    with closing(Database(database, alone=False)) as opened:
        try:
            with opened.engine.execution_options(stream_results=True).begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise JudgeError(
                f"{opened.name}: {getattr(error, 'orig', None) or error}. Free some space, or read its log."
            ) from None
