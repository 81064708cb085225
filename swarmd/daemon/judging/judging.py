"""The node's side of being judged: passes on the judge's questions, and keeps its grades and receipts."""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from p2p import durable
from p2p.member import Member
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.daemon.judging.client import Graded, JudgeClient, Observation, Question
from swarmd.state.logs import installed_version
from swarmd.state.status import JudgeStatus, Trouble
from swarmd.tasks.curriculum import Curriculum
from swarmd.types import TURN, Completion

log = logging.getLogger(__name__)

RECEIPTS_FILE = "receipts.jsonl"
Said = TypeVar("Said")


def keep_receipt(folder: Path, receipt: Mapping[str, str], most: int = 1_000) -> None:
    """Add a receipt to the state folder's file, one JSON line each. If the disk fails, only it is lost.

    most: number of receipts to keep; the file is cut to it when it holds twice as many.
    """
    path = folder / RECEIPTS_FILE
    try:
        # A kill -9 or a full disk may have left an unfinished line.
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + json.dumps(receipt) + "\n")
        if len(lines := path.read_bytes().splitlines(keepends=True)) > 2 * most:
            durable.replace(path, b"".join(lines[-most:]))
    except OSError as error:
        log.warning("a receipt of the judge could not be kept: %s", error)


class Judging:
    """The daemon's side of being judged.

    At most one question at a time is in progress between the judge and the trainer.
    """

    def __init__(
        self,
        client: JudgeClient | None,
        tell: Callable[[link.ToTrainer], None],
        talk: Callable[[str], None],
        *,
        model: str = "tiny",
        every: int = 1,
        keep: Callable[[Mapping[str, str]], None] = lambda _: None,
    ) -> None:
        """Set up the node's side of being judged.

        Args:
            client: None if there is no judge.
            tell: sends a message to the trainer.
            talk: shows a message to the operator.
            every: rounds between two questions.
            keep: called with each receipt.
        """
        self._client, self._tell, self._talk = client, tell, talk
        self._model, self._every, self._keep = model, every, keep
        self._busy = False
        self._open: Question | None = None
        self._turns: tuple[tuple[str, str], ...] = ()  # of the open question
        self._last: Graded | None = None
        self._silence: Trouble | None = None

    async def ask(self, round_number: int) -> None:
        """Get a question from the judge if one is due in this round, and give it to the trainer.

        Does nothing while another question is in progress, or while the client waits after a failure.
        """
        client = self._client
        if (
            client is None
            or round_number % self._every
            or self._busy
            or client.wait()
            or (self._open is not None and not self._open.expired(client.now()))
        ):
            return
        if (question := await self._heard(client.ask(round_number, self._model))) is not None:
            self._open, self._turns = question, ()
            self._tell(link.JudgeQuestion(question.id, question.text))

    async def answer(self, answer: link.JudgeAnswer) -> None:
        """Send the trainer's answer to the judge.

        Drops an answer to any question other than the open one.
        """
        client, question = self._client, self._open
        if client is None or question is None or question.id != answer.id:
            return
        self._open = None
        text = TURN.join((*(said for said, _ in self._turns), answer.text))
        grade: Graded | Observation | None = await self._heard(
            client.answer(question, Completion(text, answer.ended))
        )
        if isinstance(grade, Observation):
            self._open, self._turns = question, (*self._turns, (answer.text, grade.observation))
            self._tell(link.JudgeQuestion(question.id, question.text, self._turns))
        elif grade is not None:
            self._last, self._silence = grade, None
            self._keep({"receipt": grade.receipt, "signature": grade.signature})
            self._tell(link.JudgeScore(grade.score, grade.n))

    def status(self) -> JudgeStatus | None:
        """Return the last grade and the reason why there is no newer one; None without a judge."""
        if self._client is None:
            return None
        last, silence = self._last, self._silence
        return JudgeStatus(
            self._client.origin,
            last.score if last else None,
            (last.low, last.high) if last else None,
            last.n if last else 0,
            silence.cause if silence else "",
            silence.remedy if silence else "",
            round(self._client.wait(), 1),
        )

    async def _heard(self, call: Awaitable[Said | Trouble]) -> Said | None:
        """Return the result of a call to the judge. On trouble, tell the operator and return None."""
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
    """Set up a node's side of being judged. Raises ConfigError.

    Args:
        folder: the state folder, for receipts.
        device: returns torch's name of the device that the model runs on.
        tell: sends a message to the trainer.
        talk: shows a message to the operator.
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
        keep=partial(keep_receipt, folder),
    )


def said_of(config: NodeConfig, device: str, external: int) -> dict[str, Any]:
    """Return the facts that a node tells a judge besides its model; docs/judge-protocol.md lists them.

    external: maximum number of other nodes' rollouts in a batch.
    """
    # Only the strategy's name is sent, because the path of a user's own strategy is private.
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
