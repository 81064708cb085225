"""The judge's store: questions asked, answers graded, and the totals computed from them.

Each public function is a step: it gets a connection with an open transaction, which is committed or rolled
back as a whole (`Database.run`). `StoreWriter` runs steps in its thread: those that wait at the same time
share one transaction, and so one write to disk. Times are seconds since the epoch by the judge's clock, given
by the caller. Failures of disk and server reach the caller as `database.FAILURES`.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    Connection,
    Row,
    Update,
    bindparam,
    case,
    func,
    insert,
    select,
    true,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from judge.errors import JudgeError
from judge.figures.leaderboard import WINDOW_QUESTIONS, ScoreTally
from judge.logs import log
from judge.store import arms, verifications, windows
from judge.store.database import Database, Step
from judge.store.tables import about, evaluations, peers
from judge.types import ATTRIBUTES, OpenQuestion
from p2p.identity import nickname
from p2p.types import PeerId
from swarmd.tasks.answers import ScoredAnswer, added
from swarmd.types import Completion

LAPSED = "not answered in time"  # the reason of a question that counts as wrong without an answer
SAID = tuple(name for name in ATTRIBUTES if name not in ("round", "model"))
PROBE_BYTES = 16 * 1024

# The statements of an evaluation are built once: building one takes as long as running it.
_PEER, _ID = peers.c.peer == bindparam("of"), evaluations.c.id == bindparam("evaluation")
_HIGHER = case((peers.c.sequence < bindparam("claimed"), bindparam("claimed")), else_=peers.c.sequence)
_KNOWN = select(peers.c.sequence, peers.c.answered, peers.c.window_number, peers.c.window_asked).where(_PEER)
_SEEN_AGAIN = update(peers).where(_PEER).values(last_seen=bindparam("at"), sequence=_HIGHER)
_SEEN_FIRST = insert(peers).values(
    low=0.0, recent_right=0.0, recent_n=0, answered=0, unanswered=0, reward=0.0
)
_ASKED = insert(evaluations).values(state="open")
_CLOSED = update(evaluations).where(_ID, evaluations.c.state == "open")
# If scoring took long, the question may be void already (abandoned). It still counts while the seed is
# secret.
_GRADED = update(evaluations).where(
    _ID, (evaluations.c.state == "open") | ((evaluations.c.state == "void") & windows.SECRET)
)
_NOT_ANSWERED = update(peers).where(_PEER)
RECENT = (
    select(evaluations.c.specialty, evaluations.c.reward, evaluations.c.answers, evaluations.c.correct)
    .where(evaluations.c.peer == bindparam("of"), evaluations.c.number.is_not(None))
    .order_by(evaluations.c.number.desc())
    .limit(WINDOW_QUESTIONS)
)
# The newest questions, before the next one is added.
_newest = RECENT.limit(WINDOW_QUESTIONS - 1).subquery()
_right = func.coalesce(func.sum(_newest.c.reward), 0.0)
_tally = select(func.count().label("n"), _right.label("right")).select_from(_newest).subquery()
_COUNTS = (
    select(peers.c.answered, peers.c.unanswered, peers.c.reward, _tally.c.n, _tally.c.right)
    .select_from(peers.join(_tally, true()))
    .where(_PEER)
)


Counts = Row[*tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class PeerStanding:
    sequence: int = -1  # the highest sequence number of its requests; -1: none
    answered: int = 0
    window: int | None = None  # the newest window in which the peer was asked
    asked: int = 0  # number of questions asked in that window


def open_store(database: Path | str, curriculum: str) -> Database:
    """Open the database of a judge that runs. Raises DatabaseInUse, JudgeError.

    curriculum: name and digest; one database holds one curriculum.
    """
    store = Database(database)
    try:
        store.run(_prepare, store.name, curriculum)
    except JudgeError:
        store.close()
        raise
    return store


def _prepare(db: Connection, name: str, curriculum: str) -> None:
    if (held := db.scalar(select(about.c.value).where(about.c.name == "curriculum"))) is None:
        db.execute(insert(about).values(name="curriculum", value=curriculum))
    elif held != curriculum:
        raise JudgeError(
            f"{name} holds answers to {held}, and this judge asks {curriculum}. "
            "Start it with the same --curriculum, or give another one with --database."
        )
    # Questions that were open at the last stop can no longer be answered, which is not the peers' fault.
    db.execute(update(evaluations).where(evaluations.c.state == "open").values(state="void"))


def agree(db: Connection, name: str, settings: str) -> None:
    """Record the settings, and log which ones changed since the last start.

    name: of the database. settings: as text, separated by ", ".
    """
    of_judges = about.c.name == "judges"
    if (held := db.scalar(select(about.c.value).where(of_judges))) is None:
        db.execute(insert(about).values(name="judges", value=settings))
    if held is None or held == settings:
        return
    then, now = held.split(", "), settings.split(", ")
    old = ", ".join(each for each in then if each not in now)
    new = ", ".join(each for each in now if each not in then)
    log.warning(
        "%s was of a judge with %s; this one has %s%s",
        name,
        old,
        new,
        ". Receipts stay signed by the key they have" * ("--key" in old),
    )
    db.execute(update(about).where(of_judges).values(value=settings))


def sequence(db: Connection, peer: PeerId) -> int:
    """Return the highest sequence number recorded for this peer; -1: none."""
    return max(standing(db, peer).sequence, verifications.sequence(db, peer))


def abandoned(db: Connection, before: float) -> None:
    """Void the open questions of a judge that no longer runs, which nobody can answer."""
    db.execute(
        update(evaluations)
        .where(evaluations.c.state == "open", evaluations.c.asked_at <= before)
        .values(state="void")
    )


def standing(db: Connection, peer: PeerId) -> PeerStanding:
    """Return the state of a peer on which its next question depends."""
    row = db.execute(_KNOWN, {"of": peer}).one_or_none()
    return PeerStanding() if row is None else PeerStanding(*row)


def asked(db: Connection, question: OpenQuestion, sequence: int, at: float) -> None:
    """Record a question."""
    said = {name: getattr(question.attributes, name) for name in ATTRIBUTES}
    of_round = said.pop("round")
    window = question.window.number
    now = {**said, "window_number": window, "window_asked": question.place + 1}
    seen = {**now, "of": question.peer, "at": at, "claimed": sequence}
    if db.execute(_SEEN_AGAIN, seen).rowcount == 0:
        db.execute(
            _SEEN_FIRST,
            {
                **now,
                "peer": question.peer,
                "nickname": nickname(question.peer),
                "sequence": sequence,
                "first_seen": at,
                "last_seen": at,
            },
        )
    db.execute(
        _ASKED,
        {
            **said,
            "id": question.id,
            "peer": question.peer,
            "round": of_round,
            "answers": question.answers,
            "window_number": window,
            "place": question.place,
            "specialty": question.task.ref.specialty,
            "n": question.task.ref.n,
            "asked_at": at,
        },
    )


def graded(
    db: Connection,
    question: OpenQuestion,
    answers: Sequence[Completion],
    scores: Sequence[ScoredAnswer],
    seconds: float,
    sequence: int,
    at: float,
) -> Mapping[str, Any]:
    """Record scored answers; the first one counts. Return its grade, as it is sent to the peer.

    seconds: from question to answer, by the judge's monotonic clock. Raises SQLAlchemyError if the question
    is not open.
    """
    answer, score = answers[0], scores[0]
    outcome = {
        "state": "graded",
        "reward": score.reward,
        "reason": score.reason.value,
        "seconds": seconds,
        "answered_at": at,
        "answer": answer.text,
        "ended": int(answer.ended),
        "correct": sum(each.reward >= 1 for each in scores),
        "further": _further(answers[1:], scores[1:]),
    }
    if (counted := _count(db, question, outcome, _GRADED)) is None:
        raise SQLAlchemyError(f"evaluation {question.id} is not open")
    before, recent = counted
    answered, total = before.answered + 1, added(before.reward, score.reward)
    counts = {"answered": answered, "reward": total, **_recent(recent)}
    db.execute(_SEEN_AGAIN, {"of": question.peer, "at": at, "claimed": sequence, **counts})
    return {
        "evaluation": question.id,
        "reward": score.reward,
        "reason": score.reason.value,
        "specialty": question.task.ref.specialty,
        "answered": answered,  # the peer's answers, including this one
        "total": total,  # sum of the peer's rewards so far
        "score": recent.share,  # pass@1 over its newest questions
        "n": recent.answers,  # number of its newest questions in the score
        "number": answered + before.unanswered,  # among the peer's questions that count
        "low": recent.interval.low,
        "high": recent.interval.high,
    }


def lapsed(db: Connection, questions: Sequence[OpenQuestion]) -> None:
    """Record questions that were not answered in time: they count as wrong."""
    for question in questions:
        counted = _count(db, question, {"state": "unanswered", "reward": 0.0, "reason": LAPSED})
        if counted is not None:
            # If it is None, the question is already counted or is void.
            before, recent = counted
            db.execute(
                _NOT_ANSWERED,
                {"of": question.peer, "unanswered": before.unanswered + 1, **_recent(recent)},
            )


def _count(
    db: Connection, question: OpenQuestion, outcome: Mapping[str, Any], closing: Update = _CLOSED
) -> tuple[Counts, ScoreTally] | None:
    """Close the question and give it the peer's next number.

    Returns the peer's counts before, and the tally of its newest questions including this one; None if the
    question was not open.
    """
    before, reward = db.execute(_COUNTS, {"of": question.peer}).one(), outcome["reward"]
    counted = {
        "number": before.answered + before.unanswered + 1,
        "total": added(before.reward, reward),
        **outcome,
    }
    if db.execute(closing, {"evaluation": question.id, **counted}).rowcount != 1:
        return None
    arms.counted(db, question.peer, question.attributes, reward)
    return before, ScoreTally(added(before.right, reward), int(before.n) + 1)


def probe(db: Connection, at: float) -> None:
    """Write as many bytes as a question with its answer. Raises if the database cannot be written."""
    value = f"{at} ".ljust(PROBE_BYTES, ".")
    if db.execute(update(about).where(about.c.name == "probe").values(value=value)).rowcount == 0:
        db.execute(insert(about).values(name="probe", value=value))


def void(db: Connection, question: OpenQuestion) -> None:
    """Close a question whose answer the judge could not score: it does not count."""
    db.execute(_CLOSED, {"evaluation": question.id, "state": "void"})


def _recent(tally: ScoreTally) -> dict[str, float]:
    return {"low": tally.rank_by, "recent_right": tally.right, "recent_n": tally.answers}


def _further(answers: Sequence[Completion], scores: Sequence[ScoredAnswer]) -> str | None:
    rows = [
        {"text": answer.text, "ended": answer.ended, "reason": score.reason.value, "reward": score.reward}
        for answer, score in zip(answers, scores, strict=True)
    ]
    return json.dumps(rows, ensure_ascii=False) if rows else None


# Maximum number of steps in one transaction.
MAX_STEPS = 64
T = TypeVar("T")


class StoreWriter:
    """Run steps of the store in its thread. Used from one event loop.

    A step's outcome is reported once its transaction is on disk.
    """

    def __init__(self, store: Database) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._waiting: deque[tuple[Step, asyncio.Future[Any]]] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def run(self, step: Callable[..., T], *arguments: object) -> T:
        """Run a step in the thread; return its result or raise its exception."""
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(((step, arguments), outcome))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await outcome

    async def _work(self) -> None:
        while self._waiting:
            taken = [self._waiting.popleft() for _ in range(min(MAX_STEPS, len(self._waiting)))]
            outcomes = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._store.together, [step for step, _ in taken]
            )
            for (_, future), outcome in zip(taken, outcomes, strict=True):
                if future.done():
                    # The caller was cancelled.
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    async def close(self) -> None:
        """Wait until every step is written."""
        if self._worker is not None:
            await self._worker
        await asyncio.to_thread(self._thread.shutdown)
