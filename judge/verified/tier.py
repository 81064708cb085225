"""The verified tier: uploaded weights answer new held-out questions, and the judge scores the answers.

One upload is evaluated at a time; the rest waits in a bounded queue. The questions are drawn after the
weights have arrived. The judge uses its own copy of the model's configuration, tokenizer and template: a peer
uploads numbers only, so only the numbers can influence the answers.
"""

import asyncio
import contextlib
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from judge import config
from judge.errors import BUSY, DISK_LOW, FAULT, TOO_SLOW, JudgeError, Refusal, Refused, too_often
from judge.figures.verification import Upload, VerifiedAnswer, described, found
from judge.logs import log, survived
from judge.store import verifications
from judge.types import Signed, network_of
from judge.verified.evaluator import EvaluationFailed, Evaluator
from judge.verified.messages import AnswerRequest, ModelTensors
from judge.verified.upload_folder import UploadFolder
from judge.verified.weights_check import UnfitWeights, WeightsCheck
from p2p.rate_limit import TokenBuckets
from p2p.types import PeerId
from swarmd.tasks.answers import ScoredAnswer
from swarmd.tasks.curriculum import Curriculum
from swarmd.types import Completion, Task, TaskRef

FAILED = "Try the weights with `swarmd chat`; if they answer there, tell the judge's operator."


class UploadQuery(BaseModel):
    """Declared properties of an upload.

    They are in the address, so they are signed, and they are checked before a byte of the body is read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[str, Field(min_length=1, max_length=config.MAX_MODEL_CHARACTERS)]
    curriculum: Annotated[str, Field(min_length=1, max_length=64)]
    lora_rank: Annotated[int, Field(ge=1, le=512)] | None = None
    base: Annotated[str, Field(pattern="^[0-9a-f]{16}$")] | None = None
    answers: Annotated[int, Field(ge=1, le=config.MAX_ANSWERS)] = 1
    bytes: Annotated[int, Field(ge=1, lt=2**53)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class JudgeHandle:
    """The functions and settings of the judge that verification uses."""

    curriculum: Curriculum
    sign: Callable[[Mapping[str, Any]], dict[str, str]]  # signs a receipt of these fields
    claim: Callable[[Signed], Awaitable[None]]  # consumes a sequence number; raises Refused
    write: Callable[..., Awaitable[Any]]  # runs a step of the store; raises Refused
    # Scores answers; raises VerifierFailed.
    score: Callable[[TaskRef, Sequence[Completion]], Awaitable[Sequence[ScoredAnswer]]]
    draw: Callable[[int, random.Random], Sequence[Task]]  # draws held-out questions
    monotonic: Callable[[], float]
    wall: Callable[[], float]


async def open_tier(
    settings: config.JudgeSettings,
    judge: JudgeHandle,
    rng: random.Random,
    evaluator: Evaluator | None = None,
) -> "VerifiedTier":
    """Open the tier with the queue of an earlier run.

    Raises OperatorError, and Refused if the database fails.
    """
    evaluator = evaluator or Evaluator(config.VERIFIED_S)
    models = await evaluator.describe(settings.verified_model)
    try:
        folder = UploadFolder(settings.uploads_folder)
    except OSError as error:
        raise JudgeError(
            f"the folder of uploads cannot be used: {error}. Name another with --verified-folder."
        ) from None
    tier = VerifiedTier(settings, judge, folder, evaluator, models, rng)
    await tier.recover()
    return tier


class VerifiedTier:
    def __init__(
        self,
        settings: config.JudgeSettings,
        judge: JudgeHandle,
        folder: UploadFolder,
        evaluator: Evaluator,
        models: dict[str, ModelTensors],
        rng: random.Random,
    ) -> None:
        """Build the tier. models: those that can be verified. rng: unpredictable outside of tests."""
        self._settings, self._judge, self._folder = settings, judge, folder
        self._evaluator, self.models, self._rng = evaluator, models, rng
        self._networks = TokenBuckets[str](
            1 / config.VERIFIED_PAUSE_S, config.VERIFIED_BURST, config.REMEMBERED_PEERS
        )
        self._queue: deque[tuple[Upload, str]] = deque()  # uploads that wait, with their networks
        # The network of each peer whose upload is arriving, waiting or being evaluated.
        self._held: dict[PeerId, str] = {}
        self._come = asyncio.Event()

    async def recover(self) -> None:
        """Resume the queue of an earlier run of the judge. Call it first."""
        waiting = await self._judge.write(verifications.recovered, self._folder.whole(), self._judge.wall())
        self._folder.keep_only([upload.id for upload in waiting])
        for upload in waiting:
            self._enqueue(upload, "")

    def _enqueue(self, upload: Upload, network: str) -> None:
        self._held[upload.peer] = network
        self._queue.append((upload, network))
        self._come.set()

    def place(self, id: str) -> int | None:
        """Return the upload's place in the queue, 1 being the next; None if it does not wait."""
        return next((place for place, (upload, _) in enumerate(self._queue, 1) if upload.id == id), None)

    async def receive(
        self, signed: Signed, host: str, said: UploadQuery, parts: AsyncIterator[bytes]
    ) -> Upload:
        """Check weights while they arrive, and queue them. Raises Refused.

        A refused upload leaves nothing behind.
        """
        await self._judge.claim(signed)
        check, network = self._announced(said), network_of(host)
        id = f"{self._rng.getrandbits(128):032x}"
        upload = Upload(id, signed.peer, said.model, said.lora_rank, said.sha256, said.bytes, said.answers)
        self._make_room(upload.peer, network)
        if self._folder.free_bytes() < config.FREE_BYTES + upload.size:
            raise Refused(DISK_LOW)
        self._held[upload.peer] = network
        try:
            await self._store(upload, check, parts)
            await self._judge.write(verifications.queued, upload, signed.sequence, self._judge.wall())
        except BaseException:
            del self._held[upload.peer]
            self._folder.remove(upload.id)
            raise
        self._enqueue(upload, network)
        return upload

    def _announced(self, said: UploadQuery) -> WeightsCheck:
        """Check the declared properties before a byte is read. Raises Refused if they do not fit."""
        if not self._judge.curriculum.asks_as(said.curriculum):
            raise Refused(
                Refusal(409, "this judge asks another curriculum", "Upload to a judge for your curriculum.")
            )
        if (model := self.models.get(said.model)) is None:
            known = ", ".join(self.models)
            raise Refused(
                Refusal(422, "this judge has no model of this name", f"It evaluates weights of {known}.")
            )
        if said.lora_rank is not None and said.base not in (None, model.fingerprint):
            raise Refused(
                Refusal(
                    409,
                    "the adapter belongs to another base model",
                    "Use the judge's: GET /v1/verified names its base.",
                )
            )
        if said.bytes > self._settings.verified_bytes:
            most = self._settings.verified_bytes
            raise Refused(
                Refusal(
                    413,
                    "the weights are too large for this judge",
                    f"It takes {most:,} bytes. Send an adapter, or one of a lower rank.",
                )
            )
        with _unfit_refused():
            return WeightsCheck(said.bytes, said.sha256, model.shapes(said.lora_rank))

    def _make_room(self, peer: PeerId, network: str) -> None:
        """Check the limits. Raises Refused if the peer, its network or all peers have too many uploads."""
        if peer in self._held:
            raise Refused(
                Refusal(
                    409,
                    "an earlier upload of yours waits or is being evaluated",
                    "Look at its state with `swarmd verify`, and upload again when it is done.",
                )
            )
        if len(self._held) >= config.VERIFIED_WAITING:
            raise Refused(BUSY)
        if Counter(self._held.values())[network] >= config.VERIFIED_WAITING_OF_A_NETWORK:
            raise Refused(
                Refusal(429, "too many uploads of your network wait", "Upload again later.", retry_after=60)
            )
        now = self._judge.monotonic()
        if wait := self._networks.of(network, now).wait(now):
            raise too_often("your network uploads too often", "Upload again", wait)

    async def _store(self, upload: Upload, check: WeightsCheck, parts: AsyncIterator[bytes]) -> None:
        """Receive the weights. Raises Refused."""
        loop = asyncio.get_running_loop()
        begun, received, patience = loop.time(), 0, asyncio.timeout(config.VERIFIED_STALL_S)
        try:
            with contextlib.closing(self._folder.begin(upload.id, check)) as file, _unfit_refused():
                async with patience:
                    async for part in parts:
                        await asyncio.to_thread(file.write, part)
                        received += len(part)
                        late = begun + received / config.VERIFIED_BYTES_PER_S
                        patience.reschedule(min(late, loop.time()) + config.VERIFIED_STALL_S)
                await asyncio.to_thread(file.finish)
        except OSError as error:
            if isinstance(error, TimeoutError) and patience.expired():
                raise Refused(TOO_SLOW) from None
            # A TimeoutError also comes from the system: ETIMEDOUT of a network disk.
            log.warning("uploaded weights cannot be kept: %s", error)
            raise Refused(FAULT) from None

    async def work_forever(self) -> None:
        """Evaluate the queued uploads one after another."""
        while True:
            await self._come.wait()
            while self._queue:
                upload, _ = self._queue.popleft()
                with survived("an evaluation of weights"):
                    await self._evaluate(upload)
            self._come.clear()

    async def _evaluate(self, upload: Upload) -> None:
        await self._written(verifications.running, upload.id)
        try:
            answers = await self._answered(upload)
        except EvaluationFailed as why:
            log.warning("the weights %s of %s were not evaluated: %s", upload.digest, upload.peer, why)
            await self._refuse(upload, str(why), FAILED)
        except Exception:
            # After any failure, the next upload is still evaluated.
            log.exception("the weights %s of %s were not evaluated", upload.digest, upload.peer)
            await self._refuse(upload, FAULT.error, FAULT.remedy)
        else:
            at = self._judge.wall()
            self._let_go(upload)
            await self._written(verifications.done, upload, at, answers, self._receipt(upload, answers, at))

    async def _refuse(self, upload: Upload, error: str, remedy: str) -> None:
        self._let_go(upload)
        await self._written(verifications.refused, upload, self._judge.wall(), error, remedy)

    def _let_go(self, upload: Upload) -> None:
        """Remove the weights before the outcome is published: a peer that reads it may upload again.

        If the judge is killed in between, the upload is refused because its weights are lost.
        """
        self._held.pop(upload.peer, None)
        with survived("removing weights"):
            self._folder.remove(upload.id)

    async def _answered(self, upload: Upload) -> Sequence[VerifiedAnswer]:
        """Evaluate the weights. Raises EvaluationFailed, VerifierFailed, OSError."""
        tasks = await asyncio.to_thread(self._drawn)
        request = AnswerRequest(
            upload.model,
            upload.lora_rank,
            upload.digest,
            tuple(task.question for task in tasks),
            upload.answers,
            seed=self._rng.getrandbits(32),
            cpu=config.VERIFIED_CPU_S,
            memory=config.VERIFIED_MEMORY_BYTES + 3 * upload.size,
        )
        rows = await self._evaluator.answers(self._folder.file(upload.id), request)
        answers = []
        for task, row in zip(tasks, rows, strict=True):
            scores = await self._judge.score(task.ref, row)
            right = sum(score.reward >= 1 for score in scores)
            # `correct` counts all answers; the other fields are of the first answer.
            answers.append(
                VerifiedAnswer(
                    task.ref.specialty,
                    task.ref.n,
                    scores[0].reward,
                    right,
                    scores[0].reason.value,
                    row[0].text,
                    row[0].ended,
                )
            )
        return answers

    def _drawn(self) -> Sequence[Task]:
        """Draw equally many new questions of each specialty, with held-out texts if it has enough texts."""
        each, lessons = self._settings.verified_questions, self._judge.curriculum
        chosen: dict[str, list[Task]] = {name: [] for name in lessons.specialties}
        while any(len(tasks) < each for tasks in chosen.values()):
            for task in self._judge.draw(len(chosen), self._rng):
                name = task.ref.specialty
                if len(chosen[name]) < each and (name not in lessons.held_by_text or lessons.holds_out(task)):
                    chosen[name].append(task)
        return [task for tasks in chosen.values() for task in tasks]

    def _receipt(self, upload: Upload, answers: Sequence[VerifiedAnswer], at: float) -> dict[str, str]:
        figures = found(upload.answers, answers)
        return self._judge.sign(
            {**described(upload, at), "curriculum": self._judge.curriculum.digest, **figures}
        )

    async def _written(self, step: Callable[..., None], *arguments: object) -> None:
        """Write, and retry until the database can be written."""
        while True:
            try:
                await self._judge.write(step, *arguments)
            except Refused:
                await asyncio.sleep(config.VERIFIED_RETRY_S)
            else:
                return


@contextlib.contextmanager
def _unfit_refused() -> Iterator[None]:
    try:
        yield
    except UnfitWeights as unfit:
        raise Refused(Refusal(422, unfit.error, unfit.remedy)) from None
