"""An evaluation (SAPO section 6) without HTTP: a node asks, the judge draws a question, the node answers, the judge scores.

One event loop owns the open questions. The store and the verifier have a thread each, so neither a slow disk nor a hostile answer blocks
the loop. Only the judge's clocks count: a monotonic one for deadlines, the wall clock for display.
"""

import asyncio
import contextlib
import logging
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from judge import config
from judge.config import JudgeSettings
from judge.database import FAILURES
from judge.leaderboard import LISTED_ANSWERS, LeaderboardPage, Record
from judge.limits import network_of
from judge.refusals import BUSY, FAULT, UNHEALTHY, Refusal, Refused
from judge.sessions import OpenQuestion, Requester, Room, Sessions
from judge.signing import Sequences, Signed
from judge.store import Grade, Store
from judge.writer import StoreWriter
from p2p.rate_limit import TokenBuckets
from p2p.types import PeerId
from swarmd.tasks.curriculum import Curriculum
from swarmd.tasks.own import NoQuestion, find_curriculum
from swarmd.tasks.scoring import Completion, GradeReason, TaskRef, Verifier, VerifierFailed
from swarmd.tasks.source import Task, open_tasks

log = logging.getLogger("judge")
T = TypeVar("T")
Draw = Callable[[int, random.Random], Sequence[Task]]  # held-out questions
Mark = Callable[[Sequence[tuple[TaskRef, Sequence[Completion]]]], Sequence[tuple[GradeReason, ...]]]


@dataclass(frozen=True, slots=True)
class Handed:
    """A question as a node gets it: its text, never its reference or answer."""

    id: str
    question: str
    seconds: float  # left to answer


@contextlib.asynccontextmanager
async def open_service(
    settings: JudgeSettings,
    rng: random.Random | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> AsyncIterator["JudgeService"]:
    """A judge with its database, verifier and expiry task; closed in order at the end. Raises OperatorError."""
    lessons = find_curriculum(settings.curriculum)
    with (
        contextlib.closing(Store(settings.database, f"{lessons.name} {lessons.digest}")) as store,
        Verifier(lessons) as verifier,
        contextlib.closing(Verifier(lessons)) as maker,  # starts for own tasks alone: their questions do not wait for what is scored
    ):
        tasks = open_tasks(lessons, maker)
        service = JudgeService(
            settings, lessons, tasks.draw_held_out, store, verifier.judge, rng or secrets.SystemRandom(), monotonic, wall
        )
        reaper = asyncio.create_task(service.expire_forever())
        try:
            yield service
        finally:
            reaper.cancel()
            await service.close()


class JudgeService:
    def __init__(
        self,
        settings: JudgeSettings,
        curriculum: Curriculum,
        draw: Draw,
        store: Store,
        mark: Mark,
        rng: random.Random,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """`store` and `mark` are each used from one thread of this service's own; `rng` must be unpredictable outside tests."""
        self.settings, self.curriculum = settings, curriculum
        self._store, self._mark, self._monotonic, self._wall = store, mark, monotonic, wall
        room = Room(config.OPEN_QUESTIONS, config.NEWCOMERS_QUESTIONS, config.NETWORK_QUESTIONS)
        self._sessions = Sessions(lambda r: draw(1, r)[0], rng, settings.deadline, room)
        self._buckets = TokenBuckets[PeerId](1 / config.ASK_SECONDS, config.ASK_BURST, config.REMEMBERED_PEERS)
        self._sequences = Sequences()
        self._writer = StoreWriter(store)
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._scoring = 0
        self._boards: dict[int, tuple[float, LeaderboardPage]] = {}  # by their first rank less one; each for config.LEADERBOARD_SECONDS
        self._boards_lock = asyncio.Lock()
        self._probed: tuple[float, bool] | None = None  # when, and whether it could write
        self._failed = -math.inf  # when the database last could not be used
        self._probe_lock = asyncio.Lock()

    async def ask(self, signed: Signed, host: str, round_number: int, model: str, curriculum: str) -> Handed:
        """host: the address it comes from. Raises Refused."""
        await self._claim(signed)
        mine = self.curriculum
        if curriculum != mine.digest:
            raise Refused(
                Refusal(
                    409,
                    f"this judge asks {mine.name} ({mine.digest}), your node trains on another curriculum",
                    f"Join with curriculum = {mine.name!r} and the same reasoning-gym version, or use a judge of your own curriculum. "
                    "Own tasks need a judge that was started with the same file or package.",
                )
            )
        if wait := self._buckets.of(signed.peer, now := self._monotonic()).wait(now):
            seconds = int(wait) + 1
            raise Refused(Refusal(429, "you ask too often", f"Ask again in {seconds} s; set judge.every higher.", retry_after=seconds))
        asker = Requester(network_of(host), await self._write(self._store.answered, signed.peer) >= LISTED_ANSWERS)
        await self.expire()
        now = self._monotonic()
        try:
            outcome = self._sessions.ask(signed.peer, asker, now)
        except (NoQuestion, VerifierFailed):
            log.exception("cannot make a question")
            raise Refused(FAULT) from None
        if isinstance(outcome, Refusal):
            raise Refused(outcome)
        question = outcome.question
        if outcome.new:
            try:
                if outcome.displaced is not None:
                    await self._write(self._store.void, outcome.displaced)
                await self._write(self._store.asked, question, round_number, model, signed.sequence, self._wall())
            except Refused:
                self._sessions.withdraw(question)
                raise
        return Handed(question.id, question.task.question, question.deadline - now)

    async def answer(self, signed: Signed, id: str, answer: Completion) -> Grade:
        """Score and record an answer. The time of the call counts, however long scoring takes. Raises Refused."""
        await self._claim(signed)
        await self.expire()
        if self._scoring >= config.SCORING_BACKLOG:
            raise Refused(BUSY)  # the question stays open: the node may try again before the deadline
        now = self._monotonic()
        question = self._sessions.take(id, signed.peer, now)
        if isinstance(question, Refusal):
            raise Refused(question)
        try:
            reason = await self._marked(question, answer)
            grade: Grade = await self._write(
                self._store.graded, question, answer, reason, now - question.asked, signed.sequence, self._wall()
            )
        except Refused:
            self._sessions.give_up(question)
            raise
        return grade

    async def expire(self) -> None:
        """Record questions that were not answered in time. Called before each request that needs it, and periodically."""
        late = self._sessions.expire(self._monotonic())
        if late:
            await self._write(self._store.lapsed, late)

    async def expire_forever(self) -> None:
        while True:
            await asyncio.sleep(config.EXPIRE_SECONDS)
            with contextlib.suppress(Refused):  # the disk failed; that is in the log
                await self.expire()

    async def leaderboard(self, after: int) -> LeaderboardPage:
        """The page of those ranked `after` + 1 and on."""
        async with self._boards_lock:
            now = self._monotonic()
            self._boards = {start: kept for start, kept in self._boards.items() if 0 <= now - kept[0] < config.LEADERBOARD_SECONDS}
            if after not in self._boards:
                self._boards[after] = (now, await self._write(self._store.board, after))
                while len(self._boards) > config.BOARDS_KEPT:
                    del self._boards[next(iter(self._boards))]
            return self._boards[after][1]

    async def peer(self, peer: str, before: int) -> tuple[Record, Sequence[Mapping[str, Any]], int | None] | None:
        """Its record, a page of its answers, and where the next page begins."""
        record = await self._write(self._store.record, peer)
        return None if record is None else (record, *await self._write(self._store.history, peer, before))

    def now(self) -> float:
        """Seconds since the epoch, by the judge's own clock."""
        return self._wall()

    async def health(self) -> Mapping[str, int]:
        """Load figures. Raises Refused if the database cannot be written."""
        async with self._probe_lock:
            now = self._monotonic()
            if self._probed is None or not 0 <= now - self._probed[0] < config.PROBE_SECONDS:
                try:
                    await self._write(self._store.probe, self._wall())
                    self._probed = (now, True)
                except Refused:
                    self._probed = (now, False)
            if not self._probed[1] or now - self._failed < config.FAILED_SECONDS:
                raise Refused(UNHEALTHY)
        return {"open": len(self._sessions), "scoring": self._scoring}

    async def close(self) -> None:
        """Wait for writing and scoring to finish. The caller closes the store and the verifier."""
        await asyncio.to_thread(self._scorer.shutdown, wait=True, cancel_futures=True)
        await self._writer.close()

    async def _claim(self, signed: Signed) -> None:
        floor = -1 if self._sequences.knows(signed.peer) else await self._write(self._store.sequence, signed.peer)
        if refusal := self._sequences.claim(signed, floor):
            raise Refused(refusal)

    async def _marked(self, question: OpenQuestion, answer: Completion) -> GradeReason:
        self._scoring += 1
        try:
            rows = await asyncio.get_running_loop().run_in_executor(self._scorer, self._mark, [(question.task.ref, [answer])])
        except VerifierFailed:
            log.exception("cannot score an answer to %s", question.task.ref)
            await self._write(self._store.void, question)
            raise Refused(FAULT) from None
        finally:
            self._scoring -= 1
        return rows[0][0]

    async def _write(self, step: Callable[..., T], *arguments: object) -> T:
        try:
            return await self._writer.run(step, *arguments)
        except FAILURES:  # a full or broken disk, a server that is gone; the operator hears of it in the log, the node gets a refusal
            log.exception("cannot use the database")
            self._failed = self._monotonic()
            raise Refused(FAULT) from None
