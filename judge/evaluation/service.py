"""The evaluation protocol (SAPO section 6) without HTTP: a node asks, answers, and gets a grade.

One event loop owns the open questions. The store, the verifier and the question generator have a thread each,
so a slow disk, a hostile answer or a hanging task plug-in does not block the loop. Only the judge's clocks
count: a monotonic one for deadlines, the wall clock for dates.
"""

import asyncio
import contextlib
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from judge import config
from judge.errors import (
    AHEAD,
    BANNED,
    BUSY,
    DISK_LOW,
    FAULT,
    NEWCOMERS_TOO_OFTEN,
    UNHEALTHY,
    JudgeError,
    Refusal,
    Refused,
    too_often,
)
from judge.evaluation import receipts
from judge.evaluation.disk_budget import DAY_S, DiskBudget
from judge.evaluation.questions import WindowQuestions
from judge.evaluation.recent import Recent
from judge.evaluation.sessions import Sessions, claim
from judge.figures.comparison import comparison_document
from judge.figures.leaderboard import (
    LISTED_ANSWERS,
    BoardView,
    LeaderboardPage,
)
from judge.logs import log, survived
from judge.store import arms, moderation, pruning, reader, store, windows
from judge.store.database import FAILURES, FORESEEN, Database
from judge.store.store import PeerStanding, StoreWriter, open_store
from judge.types import (
    Attributes,
    GradedEvaluation,
    OpenQuestion,
    QuestionWindow,
    Requester,
    Signed,
)
from judge.verified.evaluator import Evaluator
from judge.verified.tier import JudgeHandle, VerifiedTier, open_tier
from p2p.identity import Identity
from p2p.latest import Latest
from p2p.rate_limit import TokenBuckets
from p2p.types import PeerId
from swarmd.config.invitation import read_invitation
from swarmd.tasks.held_out import SEED_BYTES, Regenerating
from swarmd.tasks.own_tasks import find_curriculum
from swarmd.tasks.sandbox.client import Completion, Mark, ScoredAnswer, TaskRef, Verifier, VerifierFailed
from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import CurriculumTasks, Task, open_tasks
from swarmd.types import TURN

T = TypeVar("T")


@contextlib.asynccontextmanager
async def open_service(
    settings: config.JudgeSettings,
    rng: random.Random | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    evaluator: Evaluator | None = None,
) -> AsyncIterator["JudgeService"]:
    """Open a judge with its database, verifier and tasks; all are closed in order at the end.

    evaluator: evaluates uploaded weights; None: the default one. Raises OperatorError.
    """
    lessons = find_curriculum(settings.curriculum)
    if lessons.turns > 1 and settings.verified_bytes:
        raise JudgeError(
            f"--verified-bytes: uploaded weights cannot answer {lessons.name}: its tasks have several turns."
            " Leave it out; nodes answer such questions themselves."
        )
    with (
        contextlib.closing(open_store(settings.database, f"{lessons.name} {lessons.digest}")) as writing,
        contextlib.closing(Database(settings.database, alone=False)) as reading,
        Verifier(lessons) as verifier,
        # A second verifier, started only for own tasks: generating them does not wait for scoring.
        contextlib.closing(Verifier(lessons)) as maker,
    ):
        key = Identity.load_or_create(settings.key_file)
        said = f"--key of {key.peer_id}, --deadline {settings.deadline:g}, --window {settings.window:g}"
        writing.run(store.agree, writing.name, said)
        tasks = open_tasks(lessons, maker)
        rng = rng or secrets.SystemRandom()
        service = JudgeService(settings, tasks, key, writing, reading, verifier.judge, rng, monotonic, wall)
        workers = [
            asyncio.create_task(each())
            for each in (service.expire_forever, service.prune_forever, service.dial_forever)
        ]
        try:
            if settings.verified_bytes:
                handle = JudgeHandle(
                    lessons,
                    partial(receipts.signed, key),
                    service.claim,
                    service.write,
                    service.score,
                    tasks.draw_held_out,
                    monotonic,
                    wall,
                )
                service.verified = await open_tier(settings, handle, rng, evaluator)
                workers.append(asyncio.create_task(service.verified.work_forever()))
            yield service
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await service.close()


class JudgeService:
    def __init__(
        self,
        settings: config.JudgeSettings,
        tasks: Regenerating,
        key: Identity,
        writing: Database,
        reading: Database,
        mark: Mark,
        rng: random.Random,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """Take the open parts.

        key: signs the receipts. writing: a result of `open_store`. rng: unpredictable outside tests, because
        it makes the seeds of the windows.
        """
        # From now on, only one thread of this service uses each of `writing`, `reading` and `mark`.
        self.settings, self.curriculum, self._key, self._tasks = settings, tasks.curriculum, key, tasks
        self.key = key.peer_id  # of the key that signs the receipts
        self._reading, self._mark, self._monotonic, self.now, self._rng = (
            reading,
            mark,
            monotonic,
            wall,
            rng,
        )
        window, self._next_window, self._hidden_windows = writing.run(self._turned, wall())
        self._questions = WindowQuestions(tasks, window)
        self._sessions = Sessions(self._questions, rng, settings.deadline)
        self._buckets = TokenBuckets[PeerId](1 / config.ASK_S, config.ASK_BURST, config.REMEMBERED_PEERS)
        rate, burst = config.NETWORK_ASKS_PER_S, config.NETWORK_ASK_BURST
        # Rate limit of networks, for peers without a record.
        self._networks = TokenBuckets[tuple[str, bool]](rate, burst, config.REMEMBERED_PEERS)
        self._written = DiskBudget()
        # The highest sequence number of each peer's requests; evicted ones are read from the store.
        self._sequences: Latest[PeerId, int] = Latest(config.REMEMBERED_PEERS)
        # Set if the judge evaluates uploaded weights.
        self.verified: VerifiedTier | None = None
        self._writer = StoreWriter(writing)
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._scoring = 0
        keep = config.ANSWERS_KEPT
        # Results that are computed once for all readers.
        self.boards = Recent[BoardView, LeaderboardPage](
            partial(self.read, reader.board), config.LEADERBOARD_S, keep, monotonic
        )
        self.healths = Recent[None, Mapping[str, Any]](
            lambda _: self.read(reader.health, wall()), config.LEADERBOARD_S, 1, monotonic
        )
        # Swarm against solo by model; None: the model whose smaller arm has the most peers.
        self.comparisons = Recent[str | None, Mapping[str, Any]](
            self._compared, config.COMPARISON_S, keep, monotonic
        )
        self._failed = -math.inf  # when the database last failed
        self._cause = ""  # the database's error message of that failure
        # Whether the database can be written.
        self._probes = Recent[None, bool](self._probed, config.PROBE_S, 1, monotonic)
        # Bytes that the database can still take, and whether the last measurement was too low.
        self.free = Recent[None, float](self._measured, config.PROBE_S, 1, monotonic)
        self._low = False
        # The result of `probe` for each address of the invitation; None: not dialled yet.
        self.dialled: Sequence[Mapping[str, Any]] | None = None
        self._banned = reading.run(moderation.banned)
        # When abandoned questions were last searched.
        self._abandoned = 0.0

    async def ask(
        self,
        signed: Signed,
        host: str,
        attributes: Attributes,
        curriculum: str,
        questions: int = 1,
        answers: int = 1,
    ) -> list[Mapping[str, Any]]:
        """Return the peer's open questions in wire form, after drawing new ones up to the requested number.

        A question is its text, never its reference or answer. Raises Refused.

        Args:
            host: the peer's address.
            attributes: what the peer states about itself.
            curriculum: the digest of the peer's curriculum.
            questions: number of open questions asked for.
            answers: answers to each question.
        """
        await self.claim(signed)
        mine = self.curriculum
        if not mine.asks_as(curriculum):
            # Only the questions have to agree: how the node scores its training is not checked.
            raise Refused(
                Refusal(
                    409,
                    f"this judge asks {mine.name} ({mine.digest}), your node trains on another curriculum",
                    f"Join with curriculum = {mine.name!r} and the same version of swarmd, or use a judge"
                    " for your curriculum; own tasks need a judge that was started with the same file or"
                    " package.",
                )
            )
        if mine.turns > 1 < answers:
            raise Refused(
                Refusal(422, "a question of several turns has one answer", "Ask for one answer to it.")
            )
        now = self._monotonic()
        if wait := self._buckets.of(signed.peer, now).wait(now, questions):
            raise too_often("you ask too often", "Set judge.every higher, and ask again", wait)
        standing = await self.write(store.standing, signed.peer)
        asker = Requester(host, standing.answered >= LISTED_ANSWERS)
        if not asker.record and self._networks.of(asker.room, now).wait(now, questions):
            raise Refused(NEWCOMERS_TOO_OFTEN)
        if not asker.record and await self.free.get(None) < config.FREE_BYTES:
            raise Refused(DISK_LOW)
        if wait := self._written.wait(asker, now):
            raise too_often(
                "your network has used up the bytes that the judge stores for it per day", "Ask again", wait
            )
        await self.expire()
        await self._turn_windows()
        await self._draw(signed, asker, attributes, questions, answers, standing)
        now = self._monotonic()
        return [
            {
                "evaluation": q.id, "question": q.task.question, "seconds": q.deadline - now,
                "answers": q.answers, "window": q.window.number, "commitment": q.window.commitment,
            }
            for q in self._sessions.of(signed.peer)
        ]  # fmt: skip

    async def _draw(
        self,
        signed: Signed,
        asker: Requester,
        attributes: Attributes,
        questions: int,
        answers: int,
        standing: PeerStanding,
    ) -> None:
        """Draw and record new questions while the peer has fewer open than it asks for.

        Raises Refused if the peer still has no open question.
        """
        while len(self._sessions.of(signed.peer)) < questions:
            self._questions.ask_from(signed.peer, standing.window, standing.asked)
            try:
                if await self._questions.make(signed.peer):
                    # Check again: meanwhile the peer may have sent another request, or the window may have
                    # closed.
                    continue
                outcome = self._sessions.ask(
                    signed.peer, asker, self._monotonic(), attributes, answers, questions
                )
            except Refused as refused:
                outcome = refused.refusal
            if isinstance(outcome, Refusal):
                if self._sessions.of(signed.peer):
                    return
                raise Refused(outcome)
            question, displaced = outcome
            try:
                if displaced is not None:
                    await self.write(store.void, displaced)
                await self.write(store.asked, question, signed.sequence, self.now())
                names = config.MODEL_NAMES * len(attributes.model.encode())
                self._written.spend(asker, config.QUESTION_BYTES + names, self._monotonic())
            except Refused:
                self._sessions.withdraw(question)
                raise

    async def answer(
        self, signed: Signed, id: str, answers: Sequence[Completion]
    ) -> tuple[Mapping[str, Any], GradedEvaluation] | str:
        """Score and record the answers to a question; return the grade, and the evaluation for its receipt.

        The deadline applies to the time of the call, however long scoring takes. In an environment that goes
        on, the question stays open and its reply is returned. Raises Refused.
        """
        await self.claim(signed)
        await self.expire()
        if self._scoring >= config.SCORING_BACKLOG:
            # The question stays open: the node may retry before the deadline.
            raise Refused(BUSY)
        now = self._monotonic()
        if self.curriculum.turns > 1 and (reply := await self._reply(id, signed.peer, now, answers)):
            return reply
        if isinstance(question := self._sessions.close(id, signed.peer, now, len(answers)), Refusal):
            raise Refused(question)
        try:
            scores = await self._marked(question, answers)
            at, took = self.now(), now - question.asked
            grade = await self.write(store.graded, question, answers, scores, took, signed.sequence, at)
            self._written.spend(question.asker, sum(len(each.text.encode()) for each in answers), now)
        except Refused:
            self._sessions.give_up(question)
            raise
        q = question
        return grade, GradedEvaluation(
            q.id, q.peer, q.attributes, q.task.ref, q.window, q.place, grade["number"], at, answers, scores
        )

    async def _reply(self, id: str, peer: PeerId, now: float, answers: Sequence[Completion]) -> str | None:
        """Return an environment's reply to the last text; None if that ended the episode. Raises Refused."""
        texts = answers[0].text.split(TURN)
        if isinstance(question := self._sessions.turn(id, peer, now, texts), Refusal):
            raise Refused(question)
        try:
            (score,) = await self.score(question.task.ref, answers[:1])
        except VerifierFailed:
            log.exception("cannot play %s", question.task.ref)
            raise Refused(FAULT) from None
        return score.observations[-1] if len(score.observations) == len(texts) else None

    def receipt(self, graded: GradedEvaluation) -> Mapping[str, str]:
        """Sign the receipt. Repeated calls return identical bytes."""
        return receipts.signed(self._key, receipts.fields(graded, self.curriculum.digest))

    def _turned(self, db: Connection, now: float) -> tuple[QuestionWindow, QuestionWindow, int]:
        return windows.turn(
            db,
            now,
            int(self.settings.window),
            self.curriculum.digest,
            lambda: self._rng.randbytes(SEED_BYTES),
        )

    async def _turn_windows(self) -> None:
        """Open the next window when it is due; reveal the last one's seed when no question of it is open."""
        now = self.now()
        ahead = windows.dated_ahead(self._next_window, now, int(self.settings.window))
        if now >= self._next_window.terms.opens or self._hidden_windows or ahead:
            window, self._next_window, self._hidden_windows = await self.write(self._turned, now)
            if window.number > self._questions.window.number:
                self._questions.open(window)

    async def expire(self) -> None:
        """Record questions that were not answered in time.

        Called before each request that depends on it, and periodically.
        """
        if late := self._sessions.expire(self._monotonic()):
            await self.write(store.lapsed, late)

    async def expire_forever(self) -> None:
        while True:
            await asyncio.sleep(config.EXPIRE_S)
            with survived("looking for late questions, new windows and bans"):
                await self.expire()
                await self._turn_windows()
                await self.heed_moderation()
                await self._void_abandoned()

    async def prune_forever(self) -> None:
        while True:
            with survived("pruning"):
                await self.prune()
            await asyncio.sleep(config.PRUNE_S)

    async def dial_forever(self) -> None:
        while self.settings.invitation:
            with survived("dialling the invitation"):
                invited = read_invitation(self.settings.invitation).bootstrap
                self.dialled = await asyncio.to_thread(_dialled, invited)
            await asyncio.sleep(config.DIAL_S)

    async def prune(self) -> None:
        """Delete rows that are no longer needed, a few peers at a time, so other steps can run between."""
        keep, now = self.settings.keep_days, self.now()
        silent = self._silent_since(now)
        before = min(silent, now - keep * DAY_S)
        silent_windows, after = math.ceil(max(keep, config.FORGET_DAYS) * DAY_S / self.settings.window), ""
        while (last := await self.write(pruning.prune, after, before, silent, silent_windows)) is not None:
            after = last

    def _silent_since(self, now: float) -> float:
        """Return the time before which an unlisted peer must have been last seen to be forgotten."""
        return now - 2 * max(self.settings.window, self.settings.deadline) - config.ABANDONED_S

    async def _measured(self, _: None) -> float:
        free = await self.read(self._reading.free_bytes)
        if free < config.FREE_BYTES and not self._low:
            log.warning(
                "the database's disk has %.0f MiB left: nodes without a record are refused below %.0f; free"
                " some space, or set keep_days lower",
                free / 2**20,
                config.FREE_BYTES / 2**20,
            )
        self._low = free < config.FREE_BYTES
        return free

    async def _void_abandoned(self) -> None:
        # After a database failure, the end of a question may not have been written.
        now = self.now()
        if self._failed > -math.inf and not 0 <= now - self._abandoned < config.ABANDONED_S:
            await self.write(store.abandoned, now - self.settings.deadline - config.ABANDONED_S)
            self._abandoned = now

    async def heed_moderation(self) -> None:
        """Reload the set of keys that the operator has banned."""
        self._banned = await self.read(moderation.banned)

    async def _compared(self, model: str | None) -> Mapping[str, Any]:
        return await asyncio.to_thread(comparison_document, await self.read(arms.view, model))

    def question(self, specialty: str, n: int) -> Task | None:
        """Make the task again; None for own tasks, because readers must not trigger their plug-in."""
        return self._tasks.task(TaskRef(specialty, n)) if isinstance(self._tasks, CurriculumTasks) else None

    def solution(self, task: Task) -> str:
        assert isinstance(self._tasks, CurriculumTasks)
        return solution(self._tasks, task)

    async def health(self) -> Mapping[str, int]:
        """Return load figures. Raises Refused if the database cannot be written."""
        if not await self._probes.get(None) or self._monotonic() - self._failed < config.FAILED_S:
            raise Refused(UNHEALTHY)
        return {"open": len(self._sessions), "scoring": self._scoring}

    async def _probed(self, _: None) -> bool:
        try:
            await self.write(store.probe, self.now())
        except Refused:
            return False
        return True

    async def close(self) -> None:
        """Wait for writing and scoring to finish. The caller closes the store and the verifier."""
        await self._questions.close()
        for threads in (self._scorer, self._readers):
            await asyncio.to_thread(threads.shutdown, wait=True, cancel_futures=True)
        await self._writer.close()

    async def claim(self, signed: Signed) -> None:
        """Consume the request's sequence number. Raises Refused, also for a banned key."""
        if signed.peer in self._banned:
            raise Refused(BANNED)
        now = self.now()
        if signed.sequence > (now + config.AHEAD_S) * 1e9:
            raise Refused(AHEAD)
        floor = -1 if signed.peer in self._sequences else await self.write(store.sequence, signed.peer)
        enough = floor
        if floor < 0:
            # The peer may have been forgotten, and an attacker may replay its old requests. This floor rises
            # with time and excludes them.
            floor, enough = int(self._silent_since(now) * 1e9), int(now * 1e9)
        if refusal := claim(self._sequences, signed, floor, enough):
            raise Refused(refusal)

    async def _marked(self, question: OpenQuestion, answers: Sequence[Completion]) -> Sequence[ScoredAnswer]:
        self._scoring += len(answers)
        try:
            return await self.score(question.task.ref, answers)
        except VerifierFailed:
            log.exception("cannot score an answer to %s", question.task.ref)
            await self.write(store.void, question)
            raise Refused(FAULT) from None
        finally:
            self._scoring -= len(answers)

    async def score(self, ref: TaskRef, answers: Sequence[Completion]) -> Sequence[ScoredAnswer]:
        """Score the answers. Raises VerifierFailed."""
        given = ref, [self.curriculum.completion(answer.text, answer.ended) for answer in answers]
        return (await asyncio.get_running_loop().run_in_executor(self._scorer, self._mark, [given]))[0]

    async def write(self, step: Callable[..., T], *arguments: object) -> T:
        """Run a step that writes. Raises Refused if the database fails."""
        return await self._guarded(self._writer.run(step, *arguments))

    async def read(self, step: Callable[..., T], *arguments: object) -> T:
        """Run a step that only reads. Raises Refused if the database fails."""
        return await self._guarded(
            asyncio.get_running_loop().run_in_executor(self._readers, self._reading.run, step, *arguments)
        )

    async def _guarded(self, outcome: Awaitable[T]) -> T:
        try:
            return await outcome
        except FAILURES as error:
            # The disk is full or broken, or the server is gone. The log names each cause once per FAILED_S
            # for the operator; the node gets a refusal.
            now, cause = self._monotonic(), str(getattr(error, "orig", None) or error)
            if cause != self._cause or now - self._failed >= config.FAILED_S:
                log.exception(
                    "the database cannot be used: %s", cause, exc_info=not isinstance(error, FORESEEN)
                )
            self._failed, self._cause = now, cause
            raise Refused(FAULT) from None


def _dialled(addresses: Sequence[str]) -> Sequence[Mapping[str, Any]]:
    # Imported here: a judge without an invitation does not need trio.
    import trio

    from p2p.peers.noise_probe import probe

    return trio.run(probe, addresses)
