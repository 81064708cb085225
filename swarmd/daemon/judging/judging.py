"""The node's judge: hands on its questions, keeps its grades and receipts."""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from p2p import durable
from p2p.member import Member
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.daemon.judging.client import Graded, JudgeClient, Question
from swarmd.state.logs import installed_version
from swarmd.state.status import JudgeStatus, Trouble
from swarmd.tasks.curriculum import Curriculum
from swarmd.types import Completion

log = logging.getLogger(__name__)

RECEIPTS_FILE = "receipts.jsonl"
Said = TypeVar("Said", Question, Graded)


class ReceiptFile:
    """The newest receipts, one JSON line each. A disk that fails costs receipts, and nothing else.

    most: are kept when there are twice as many.
    """

    def __init__(self, path: Path, most: int = 1_000) -> None:
        self._path, self._most = path, most

    def add(self, receipt: Mapping[str, str]) -> None:
        try:
            # By kill -9, or a full disk.
            torn = self._path.exists() and self._path.read_bytes()[-1:] not in (b"", b"\n")
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" * torn + json.dumps(receipt) + "\n")
            lines = self._path.read_bytes().splitlines(keepends=True)
            if len(lines) > 2 * self._most:
                durable.replace(self._path, b"".join(lines[-self._most :]))
        except OSError as error:
            log.warning("a receipt of the judge could not be kept: %s", error)


class Judging:
    """The daemon's side of being judged.

    At most one question at a time is on its way from the judge to the trainer and back.
    """

    def __init__(
        self,
        client: JudgeClient | None,
        tell: Callable[[link.ToTrainer], None],
        talk: Callable[[str], None],
        *,
        model: str = "tiny",
        every: int = 1,
        receipts: ReceiptFile | None = None,
    ) -> None:
        """Make the node's judge.

        Args:
            client: None: no judge.
            tell: sends to the trainer.
            talk: tells the operator.
            every: rounds between two questions.
        """
        self._client, self._tell, self._talk = client, tell, talk
        self._model, self._every, self._receipts = model, every, receipts
        self._busy = False
        self._open: Question | None = None
        self._last: Graded | None = None
        self._silence: Trouble | None = None

    async def ask(self, round_number: int) -> None:
        """Get a question, where a round calls for one, and give it to the trainer.

        Does nothing while one is on its way, being answered, or not yet due.
        """
        client = self._client
        if client is None or round_number % self._every or self._busy or client.wait():
            return
        if self._open is not None and not self._open.expired(client.now()):
            return
        if (question := await self._heard(client.ask(round_number, self._model))) is not None:
            self._open = question
            self._tell(link.JudgeQuestion(question.id, question.text))

    async def answer(self, answer: link.JudgeAnswer) -> None:
        """Hand the trainer's answer in.

        An answer to a question that is no longer ours to answer is dropped.
        """
        client, question = self._client, self._open
        if client is None or question is None or question.id != answer.id:
            return
        self._open = None
        grade = await self._heard(client.answer(question, Completion(answer.text, answer.ended)))
        if grade is not None:
            self._last, self._silence = grade, None
            if self._receipts is not None:
                self._receipts.add(grade.receipt)
            self._tell(link.JudgeScore(grade.score, grade.n))

    def status(self) -> JudgeStatus | None:
        """Return the last grade, and why there is no newer one; None without a judge."""
        if self._client is None:
            return None
        last, silence = self._last, self._silence
        return JudgeStatus(
            self._client.origin,
            last.score if last else None,
            last.interval if last else None,
            last.n if last else 0,
            silence.cause if silence else "",
            silence.remedy if silence else "",
            round(self._client.wait(), 1),
        )

    async def _heard(self, call: Awaitable[Said | Trouble]) -> Said | None:
        """Return what the judge says; None where it does not, which the operator is told."""
        self._busy = True
        try:
            said = await call
        finally:
            self._busy = False
        if not isinstance(said, Trouble):
            return said
        if said != self._silence:
            self._talk(f"not judged: {said.cause}; {said.remedy}")
        self._silence = said
        return None


def judging_of(
    member: Member,
    config: NodeConfig,
    curriculum: Curriculum,
    folder: Path,
    device: Callable[[], str],
    tell: Callable[[link.ToTrainer], None],
    talk: Callable[[str], None],
) -> Judging:
    """Make a node's judge. Raises ConfigError.

    folder: the node's, for receipts. device: what the model runs on, as torch names it. tell, talk: as
    Judging has them.
    """
    client = (
        JudgeClient(
            config.judge.url,
            member.identity,
            curriculum.digest,
            said=lambda: said_of(
                config, device(), 0 if config.swarm.engine == "none" else config.round.wanted
            ),
        )
        if config.judge.url
        else None
    )
    return Judging(
        client,
        tell,
        talk,
        model=config.model.name,
        every=config.judge.every,
        receipts=ReceiptFile(folder / RECEIPTS_FILE),
    )


def said_of(config: NodeConfig, device: str, external: int) -> dict[str, Any]:
    """Return what a node tells a judge of itself, besides its model; docs/judge-protocol.md lists it.

    external: others' rollouts of a batch, at most.
    """
    # The path of a strategy of one's own is private.
    sharing, take, kind = config.sharing, Path(config.sharing.take).name, device.partition(":")[0]
    said = {
        "name": config.judge.name,
        "sharing": "swarm" if external else "solo",
        "strategy": f"{'replay' if config.replay.mode == 'on' else take} {sharing.weigh}",
        "version": installed_version(),
        "hardware": kind if kind in ("cpu", "cuda", "mps") else "other",
        "local": config.round.local,
        "external": external,
    }
    return {name: value for name, value in said.items() if value != ""}
