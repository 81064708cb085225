"""The node's judge, configured or found in the swarm: hands on its questions and keeps its grades.

At most one question at a time, from the judge to the trainer and back; its receipts are kept.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import trio

from p2p import durable
from p2p.address import parse_bootstrap
from p2p.identity import Identity, nickname
from p2p.member import Member
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.daemon.judging.client import Graded, JudgeClient, NotJudged, Question, Resolve
from swarmd.daemon.judging.discovery import AUTO, JudgeSearch, public_addresses
from swarmd.tasks.curriculum import Curriculum
from swarmd.types import Completion

log = logging.getLogger(__name__)

RECEIPTS_FILE = "receipts.jsonl"
# Failures in a row after which a judge is lost: 35 s at least, by the waits between them.
LOST_AFTER_FAILURES = 4
# The file holds twice as many at most.
KEPT_RECEIPTS = 1_000


class ReceiptFile:
    """The newest receipts, one JSON line each. A disk that fails costs receipts, and nothing else."""

    def __init__(self, path: Path, most: int = KEPT_RECEIPTS) -> None:
        self._path, self._most = path, most

    def add(self, receipt: Mapping[str, str]) -> None:
        try:
            # By kill -9, or a full disk
            torn = self._path.exists() and self._path.read_bytes()[-1:] not in (b"", b"\n")
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" * torn + json.dumps(receipt) + "\n")
            lines = self._path.read_bytes().splitlines(keepends=True)
            if len(lines) > 2 * self._most:
                durable.replace(self._path, b"".join(lines[-self._most :]))
        except OSError as error:
            log.warning("a receipt of the judge could not be kept: %s", error)


class Evaluation:
    """The daemon's side of being judged.

    At most one question at a time is on its way from the judge to the trainer and back.
    """

    def __init__(
        self,
        url: str,
        identity: Identity,
        curriculum_digest: str,
        ask_trainer: Callable[[str, str], None],
        judged: Callable[[float, int], None],
        client: JudgeClient | None = None,
        talk: Callable[[str], None] = lambda _text: None,
        resolve: Resolve | None = None,
        said: Callable[[], Mapping[str, Any]] = dict,
        receipts: ReceiptFile | None = None,
    ) -> None:
        """Set up a judge's evaluation. Raises BadJudgeUrl.

        Args:
            ask_trainer: called with question id and text.
            judged: called with score and number of questions.
            talk: tells the operator.
            resolve, said: as JudgeClient has them.
        """
        self._client = client or JudgeClient(url, identity, curriculum_digest, resolve=resolve, said=said)
        self._ask_trainer, self._judged, self._talk = ask_trainer, judged, talk
        self._receipts = receipts
        self._busy = False
        self._open: Question | None = None
        self._last: Graded | None = None
        self._silence: NotJudged | None = None

    @property
    def url(self) -> str:
        return self._client.origin

    @property
    def lost(self) -> bool:
        """Return whether the judge has failed so often that another one would be better."""
        return self._client.failures >= LOST_AFTER_FAILURES

    async def check(self) -> None:
        """Check whether the judge asks what we train on, and by whose rules it scores.

        The operator is told at once what was found.
        """
        known = self._client.scorer
        if (mismatch := await self._client.check()) is not None:
            self._on_failure(mismatch)
        elif self._client.scorer != known:
            self._talk(
                f"the judge at {self.url} scores by the rules of {self._client.scorer}, this node what it"
                " trains on by its own"
            )

    async def ask(self, round_number: int, model: str) -> None:
        """Get a question and give it to the trainer.

        Does nothing while one is on its way, being answered, or not yet due.
        """
        if (
            self._busy
            or self._client.wait()
            or (self._open is not None and not self._open.expired(self._client.now()))
        ):
            return
        self._busy = True
        try:
            outcome = await self._client.ask(round_number, model)
        finally:
            self._busy = False
        if isinstance(outcome, NotJudged):
            self._on_failure(outcome)
            return
        self._open = outcome
        self._ask_trainer(outcome.id, outcome.text)

    async def answer(self, question_id: str, text: str, ended: bool) -> None:
        """Hand the trainer's answer in.

        An answer to a question that is no longer ours to answer is dropped.
        """
        question = self._open
        if question is None or question.id != question_id:
            return
        self._busy, self._open = True, None
        try:
            outcome = await self._client.answer(question, Completion(text, ended))
        finally:
            self._busy = False
        if isinstance(outcome, NotJudged):
            self._on_failure(outcome)
            return
        self._last, self._silence = outcome, None
        if self._receipts is not None:
            self._receipts.add(outcome.receipt)
        self._judged(outcome.score, outcome.n)

    def document(self) -> dict[str, Any]:
        """Return what `swarmd status` shows: the last grade, and why there is no newer one."""
        last, silence = self._last, self._silence
        return {
            "url": self._client.origin,
            "score": last.score if last else None,
            "interval": last.interval if last else None,
            "n": last.n if last else 0,
            "cause": silence.cause if silence else "",
            "remedy": silence.remedy if silence else "",
            "asked_again_in": round(self._client.wait(), 1),  # seconds
        }

    def _on_failure(self, silence: NotJudged) -> None:
        if silence != self._silence:
            log.warning("not judged: %s; %s", silence.cause, silence.remedy)
            self._talk(f"not judged: {silence.cause}; {silence.remedy}")
        self._silence = silence


# Lost judges that are remembered.
MAX_LOST_JUDGES = 8
# How often to ask whether the judge is of our curriculum.
CHECK_EVERY_S = 600.0


class Judging:
    """The node's judge.

    folder: the node's, for receipts. device: what the model runs on, as torch names it. tell: sends to the
    trainer. talk: tells the operator.
    """

    def __init__(
        self,
        member: Member,
        config: NodeConfig,
        curriculum: Curriculum,
        folder: Path,
        device: Callable[[], str],
        tell: Callable[[link.ToTrainer], None],
        talk: Callable[[str], None],
    ) -> None:
        self._config, self._talk = config, talk
        self._make = partial(
            Evaluation,
            identity=member.identity,
            curriculum_digest=curriculum.digest,
            ask_trainer=lambda question_id, text: tell(link.JudgeQuestion(question_id, text)),
            judged=lambda score, n: tell(link.JudgeScore(score, n)),
            talk=talk,
            said=lambda: said_of(config, device()),
            receipts=ReceiptFile(folder / RECEIPTS_FILE),
        )
        named = {parse_bootstrap(text)[0] for text in config.swarm.bootstrap}
        self._search = JudgeSearch(member, named) if config.judge.url == AUTO else None
        self._lost = trio.Event()  # the judge
        self._evaluation = self._by(config.judge.url) if config.judge.url and self._search is None else None

    async def run(self) -> None:
        """Find the judge, where it is to be found, and another when it is lost.

        Checks now and then whether it asks what we train on.
        """
        lost: list[str] = []
        while self._search is not None or self._evaluation is not None:
            if self._search is not None and (self._evaluation is None or self._evaluation.lost):
                if self._evaluation is not None:
                    lost = [*(url for url in lost if url != self._evaluation.url), self._evaluation.url][
                        -MAX_LOST_JUDGES:
                    ]
                await self._find(self._search, lost)
            if self._evaluation is not None:
                await self._evaluation.check()
            with trio.move_on_after(CHECK_EVERY_S):
                await self._lost.wait()
            self._lost = trio.Event()

    async def _find(self, search: JudgeSearch, lost: Sequence[str]) -> None:
        found = await search.run(lost)
        if self._evaluation is None or self._evaluation.lost:  # it may have come back meanwhile
            self._talk(f"found the judge {found.url}, advertised by {', '.join(map(nickname, found.by))}")
            self._evaluation = self._by(found.url, public_addresses)

    async def ask(self, round_number: int) -> None:
        """Have the judge ask a question, where a round calls for one."""
        if self._evaluation is not None and round_number % self._config.judge.every == 0:
            await self._evaluation.ask(round_number, self._config.model.name)
            if self._evaluation.lost:
                self._lost.set()

    async def answer(self, answer: link.JudgeAnswer) -> None:
        if self._evaluation is not None:
            await self._evaluation.answer(answer.id, answer.text, answer.ended)

    def document(self) -> dict[str, Any] | None:
        documents = [part.document() for part in (self._search, self._evaluation) if part is not None]
        return (
            {key: value for document in documents for key, value in document.items()} if documents else None
        )

    def _by(self, url: str, resolve: Resolve | None = None) -> Evaluation:
        return self._make(url, resolve=resolve)


def said_of(config: NodeConfig, device: str) -> dict[str, Any]:
    """Return what a node tells a judge of itself, besides its model; docs/judge-protocol.md lists it."""
    sharing, kind = config.sharing, device.partition(":")[0]
    said = {
        "name": config.judge.name,
        "sharing": "swarm" if config.round.wanted else "solo",
        "strategy": (
            f"{config.replay.strategy if config.replay.mode == 'on' else sharing.take} {sharing.weigh}"
        ),
        "version": swarmd_version(),
        "hardware": kind if kind in ("cpu", "cuda", "mps") else "other",
        "local": config.round.local,
        "external": config.round.wanted,
    }
    return {name: value for name, value in said.items() if value != ""}


def swarmd_version() -> str:
    try:
        return version("swarmd")
    except PackageNotFoundError:  # run from a checkout
        return ""
