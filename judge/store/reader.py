"""Read the judge's database for pages and JSON, over a separate connection: a reader never delays a grade.

Each public function is a step (judge/store/store.py).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    bindparam,
    exists,
    func,
    or_,
    select,
)

from judge.figures.leaderboard import (
    CURVE_POINTS,
    LISTED_ANSWERS,
    BoardView,
    LeaderboardPage,
    Record,
    ScoreTally,
    Standing,
    curve_numbers,
    rank_ranges,
)
from judge.store import moderation, tables, windows
from judge.store.store import RECENT, SAID, Counts
from judge.store.tables import evaluations, peers, verifications
from judge.store.verifications import newest
from judge.types import Attributes, GradedEvaluation, QuestionWindow
from swarmd.tasks.sandbox.client import Completion, GradeReason, ScoredAnswer, TaskRef

OPTIONAL = frozenset({"further", *SAID})  # omitted from a peer's page if empty
# Answers of a peer on a page: at most HISTORY_PAGE and HISTORY_BYTES of JSON, but at least one.
HISTORY_PAGE = 500
HISTORY_BYTES = 80_000
# Models offered as a filter.
MODELS_OFFERED = 12
GROUPS = ("model", "version", "sharing", "hardware", "strategy")
# Rows of each group, the most frequent values first.
GROUP_ROWS = 8
HOUR, DAY = 3_600, 86_400

listed = tables.listed & peers.c.peer.not_in(moderation.BANNED_PEERS)
_SCORES = (
    select(peers.c.recent_right, peers.c.recent_n, func.count())
    .where(listed)
    .group_by(peers.c.recent_right, peers.c.recent_n)
)
_PEER = peers.c.peer == bindparam("of")
_BEST_FIRST = (peers.c.low.desc(), peers.c.peer)
_FEW = peers.c.answered.between(1, LISTED_ANSWERS - 1)
_TOTALS = select(
    func.count().filter(listed), func.count().filter(_FEW), func.coalesce(func.sum(peers.c.answered), 0)
)
_RANKED = (
    select(peers.c.peer, func.row_number().over(order_by=_BEST_FIRST).label("rank")).where(listed).subquery()
)
_SHOWN_NAMES = peers.c.peer.not_in(moderation.HIDDEN_PEERS)
_FREQUENT = (
    select(peers.c.model)
    .where(listed, _SHOWN_NAMES)
    .group_by(peers.c.model)
    .order_by(func.count().desc(), peers.c.model)
    .limit(MODELS_OFFERED)
)
_BEFORE = (peers.c.low > bindparam("low")) | (
    (peers.c.low == bindparam("low")) & (peers.c.peer < bindparam("of"))
)
_RANK = select(func.count()).select_from(peers).where(listed, _BEFORE)
# Number of questions before the last WINDOW_QUESTIONS.
_OLDER = peers.c.answered + peers.c.unanswered - peers.c.recent_n
# Two shares of right answers of the listed nodes that were asked more than WINDOW_QUESTIONS: in all questions
# except the last WINDOW_QUESTIONS, and in those. Each node has the same weight in both figures; otherwise a
# node that was asked more would dominate the early figure.
_PROGRESS = select(
    func.count(),
    func.avg((peers.c.reward - peers.c.recent_right) / _OLDER),
    func.avg(peers.c.recent_right / peers.c.recent_n),
).where(listed, _OLDER > 0)

_e = evaluations.c
_SHOWN = [
    _e.number,
    _e.round,
    _e.model,
    _e.specialty,
    _e.n,
    _e.asked_at,
    _e.seconds,
    _e.answer,
    _e.ended,
    _e.reward,
    _e.reason,
    _e.total,
    _e.answers,
    _e.correct,
    _e.further,
    *(_e[name] for name in SAID),
]
_COUNTS = select(_e.id.label("evaluation"), *_SHOWN)
# Streamed row by row: a row may have 16 long answers, and a page holds only a few such rows.
_HISTORY = (
    _COUNTS.where(_e.peer == bindparam("of"), _e.number < bindparam("before"))
    .order_by(_e.number.desc())
    .limit(bindparam("limit"))
    .execution_options(stream_results=True)
)
_EVALUATION = _COUNTS.add_columns(_e.peer, _e.window_number, _e.place, _e.answered_at).where(
    _e.id == bindparam("id"), _e.number.is_not(None)
)
_CURVE = (
    select(_e.number, _e.total)
    .where(_e.peer == bindparam("of"), _e.number.in_(bindparam("numbers", expanding=True)))
    .order_by(_e.number)
)
_SORTED: Mapping[str, Sequence[ColumnElement[Any]]] = {
    "rank": (),
    "score": ((peers.c.recent_right * 1.0 / peers.c.recent_n).desc(),),
    "questions": ((peers.c.answered + peers.c.unanswered).desc(),),
    "reward": (peers.c.reward.desc(),),
    "seen": (peers.c.last_seen.desc(),),
    "new": (peers.c.first_seen.desc(),),
}


def board(db: Connection, view: BoardView) -> LeaderboardPage:
    """Return the listed peers that match the view. Equal peers are in the order of their ids."""
    wanted = _wanted(view)
    many, others, answers = db.execute(_TOTALS).one()
    matching = (
        db.execute(select(func.count()).select_from(peers).where(listed, *wanted)).scalar_one()
        if wanted
        else many
    )
    rows = _ranked_rows(db, view, wanted)
    verified = newest(db, [row.peer for _, row in rows])
    read = partial(_whole if view.whole else _brief, points=view.curves, hidden=moderation.hidden(db))
    ranges = rank_ranges({(right, n): many for right, n, many in db.execute(_SCORES)})
    standings = [
        Standing(rank, read(db, row, verified), ranges[row.recent_right, row.recent_n]) for rank, row in rows
    ]
    models = db.execute(_FREQUENT).scalars().all()
    return LeaderboardPage(standings, view.after, many, others, int(answers), matching, models)


def standing(db: Connection, peer: str) -> Standing | None:
    """Return a peer with its rank; the rank is 0 if the peer is not listed."""
    if (row := db.execute(select(peers).where(_PEER), {"of": peer}).one_or_none()) is None:
        return None
    shown = row.answered >= LISTED_ANSWERS and peer not in moderation.banned(db)
    rank = db.execute(_RANK, {"low": row.low, "of": peer}).scalar_one() + 1 if shown else 0
    return Standing(rank, _whole(db, row, newest(db, [peer]), CURVE_POINTS, moderation.hidden(db)))


def history(
    db: Connection, peer: str, before: int, limit: int = HISTORY_PAGE
) -> tuple[Sequence[Mapping[str, Any]], int | None]:
    """Return a peer's evaluations numbered below `before`, newest first, and the next page's `before`.

    The latter is None on the last page. The answer is null if the question lapsed. Task and answer are
    included, so anyone can score them again.
    """
    found: list[Mapping[str, Any]] = []
    size = 0
    hidden = peer in moderation.hidden(db)
    with db.execute(_HISTORY, {"of": peer, "before": before, "limit": limit + 1}) as rows:
        for row in rows.mappings():
            entry = _entry(row, hidden)
            size += len(json.dumps(entry, ensure_ascii=False).encode())
            if found and (len(found) == limit or size > HISTORY_BYTES):
                return found, int(found[-1]["number"])
            found.append(entry)
    return found, None


def evaluation(db: Connection, id: str) -> tuple[Mapping[str, Any], GradedEvaluation | None] | None:
    """Return an evaluation that counts, as in `history` with its peer, and the data of its receipt.

    The receipt's data is None if the question lapsed. The result is None if there is no such evaluation.
    """
    if (row := db.execute(_EVALUATION, {"id": id}).mappings().one_or_none()) is None:
        return None
    entry = _entry(row, row["peer"] in moderation.hidden(db))
    (window,) = windows.read(db, row["window_number"] + 1, limit=1)
    return entry, None if row["answer"] is None else _graded(row, window)


def health(db: Connection, now: float) -> Mapping[str, Any]:
    """Return the state of the swarm, as its judge sees it. now: seconds since the epoch."""
    today, hour = peers.c.last_seen >= now - DAY, peers.c.last_seen >= now - HOUR
    figures = select(func.count().filter(hour), func.count().filter(today))
    groups = {}
    many, others, answers = db.execute(_TOTALS).one()
    seen_hour, seen_day = db.execute(figures.select_from(peers)).one()
    for name in GROUPS:
        count = func.count()
        found = (
            select(peers.c[name], count)
            .where(today, _SHOWN_NAMES)
            .group_by(peers.c[name])
            .order_by(count.desc(), peers.c[name])
        )
        groups[name] = [(value, number) for value, number in db.execute(found.limit(GROUP_ROWS))]
    nodes, before, lately = db.execute(_PROGRESS).one()
    progress = {"nodes": nodes, "before": float(before), "now": float(lately)} if nodes else None
    return {
        "listed": many,
        "unlisted": others,
        "answers": int(answers),  # sum over all peers
        "seen_hour": seen_hour,  # peers seen within the last hour
        "seen_day": seen_day,  # peers seen within the last day
        # Peers seen within the last day, by model, version …; None: not stated.
        "groups": groups,
        "progress": progress,  # None: no node has been asked more than WINDOW_QUESTIONS questions
    }


def _wanted(view: BoardView) -> list[ColumnElement[bool]]:
    wanted: list[ColumnElement[bool]] = []
    if view.search:
        found, said = (
            or_(*(column.icontains(view.search, autoescape=True) for column in columns))
            for columns in ((peers.c.nickname, peers.c.peer), (peers.c.name, peers.c.model))
        )
        wanted.append(found | (said & _SHOWN_NAMES))
    if view.model:
        wanted += [peers.c.model == view.model, _SHOWN_NAMES]
    if view.tier:
        done = exists().where(verifications.c.peer == peers.c.peer, verifications.c.state == "done")
        wanted.append(done if view.tier == "verified" else ~done)
    if view.seen_since:
        wanted.append(peers.c.last_seen >= view.seen_since)
    return wanted


def _ranked_rows(
    db: Connection, view: BoardView, wanted: Sequence[ColumnElement[bool]]
) -> list[tuple[int, Counts]]:
    if not wanted and view.sort == "rank":
        # Without a filter, the ranks of the page follow from its place.
        best = select(peers).where(listed).order_by(*_BEST_FIRST).limit(view.limit).offset(view.after)
        return list(enumerate(db.execute(best).all(), view.after + 1))
    chosen = select(peers, _RANKED.c.rank).join(_RANKED, _RANKED.c.peer == peers.c.peer).where(*wanted)
    page = chosen.order_by(*_SORTED[view.sort], _RANKED.c.rank).limit(view.limit).offset(view.after)
    return [(row.rank, row) for row in db.execute(page).all()]


def _brief(
    db: Connection,
    row: Counts,
    verified: Mapping[str, Mapping[str, Any]],
    points: int,
    hidden: Collection[str],
) -> Record:
    """Make a record without the newest questions."""
    left_out = moderation.HIDDEN_FIELDS if row.peer in hidden else ()
    said = {
        name: row._mapping[name] for name in SAID if row._mapping[name] is not None and name not in left_out
    }
    return Record(
        row.peer,
        moderation.HIDDEN if left_out else row.model,
        row.first_seen,
        row.last_seen,
        row.answered,
        row.unanswered,
        row.reward,
        ScoreTally(row.recent_right, row.recent_n),
        curve=_curve(db, row, points) if points else (),
        said=said,
        verified=verified.get(row.peer),
    )


def _whole(
    db: Connection,
    row: Counts,
    verified: Mapping[str, Mapping[str, Any]],
    points: int,
    hidden: Collection[str],
) -> Record:
    recent = db.execute(RECENT, {"of": row.peer}).all()[::-1]
    # The first answer should be greedy, so it is excluded from the samples.
    samples = [
        (answers - 1, (correct or 0) - (reward >= 1)) for _, reward, answers, correct in recent if answers > 1
    ]
    rewards = [(specialty, reward) for specialty, reward, _, _ in recent]
    return replace(_brief(db, row, verified, points, hidden), recent=rewards, samples=samples)


def _curve(db: Connection, row: Counts, points: int) -> list[tuple[int, float]]:
    wanted = curve_numbers(row.answered + row.unanswered, points)
    return [(number, total) for number, total in db.execute(_CURVE, {"of": row.peer, "numbers": wanted})]


def _graded(row: RowMapping, window: QuestionWindow) -> GradedEvaluation:
    further = json.loads(row["further"] or "[]")
    answers = [
        Completion(row["answer"], bool(row["ended"])),
        *(Completion(other["text"], other["ended"]) for other in further),
    ]
    scores = [ScoredAnswer(GradeReason(of["reason"]), of["reward"]) for of in (row, *further)]
    attributes = Attributes(row["round"], row["model"], **{name: row[name] for name in SAID})
    return GradedEvaluation(
        row["evaluation"],
        row["peer"],
        attributes,
        TaskRef(row["specialty"], row["n"]),
        window,
        row["place"],
        row["number"],
        row["answered_at"],
        answers,
        scores,
    )


def _entry(row: RowMapping, hidden: bool) -> dict[str, Any]:
    left_out = moderation.HIDDEN_FIELDS if hidden else ()
    entry = {
        name: value
        for name, value in row.items()
        if (value is not None or name not in OPTIONAL) and name not in left_out
    }
    if hidden:
        entry["model"] = moderation.HIDDEN
    entry["ended"] = None if row["ended"] is None else bool(row["ended"])
    if "further" in entry:
        entry["further"] = json.loads(entry["further"])
    return entry
