"""The node's judge, configured or found in the swarm: hands on its questions and keeps its grades.

At most one question at a time, from the judge to the trainer and back; its receipts are kept.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio

from p2p import durable
from p2p.address import parse_bootstrap
from p2p.identity import nickname
from p2p.member import Member
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.daemon.judging.client import MAX_LEARNT, Graded, JudgeClient, NotJudged, Question
from swarmd.daemon.judging.discovery import AUTO, JudgeSearch, public_addresses
from swarmd.daemon.local_api.roster import Roster
from swarmd.state.logs import installed_version
from swarmd.tasks.curriculum import Curriculum
from swarmd.types import Completion

log = logging.getLogger(__name__)

RECEIPTS_FILE = "receipts.jsonl"
# Failures in a row after which a judge is lost: 35 s at least, by the waits between them.
LOST_AFTER_FAILURES = 4
# Lost judges that are remembered.
MAX_LOST_JUDGES = 8
# The file holds twice as many at most.
KEPT_RECEIPTS = 1_000


class ReceiptFile:
    """The newest receipts, one JSON line each. A disk that fails costs receipts, and nothing else."""

    def __init__(self, path: Path, most: int = KEPT_RECEIPTS) -> None:
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
    """The daemon's side of being judged, by a configured judge or by one found in the swarm.

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
        search: JudgeSearch | None = None,
        dial: Callable[[str], JudgeClient] | None = None,
    ) -> None:
        """Make the node's judge.

        Args:
            client: None: no judge, or none yet.
            tell: sends to the trainer.
            talk: tells the operator.
            every: rounds between two questions.
            search, dial: find a judge, and make its client.
        """
        self._client, self._tell, self._talk = client, tell, talk
        self._model, self._every, self._receipts = model, every, receipts
        self._search, self._dial = search, dial
        self._lost = trio.Event()  # the judge
        self._busy = False
        self._open: Question | None = None
        self._last: Graded | None = None
        self._silence: NotJudged | None = None

    async def run(self) -> None:
        """Find a judge, and another one when it is lost."""
        lost: list[str] = []
        await self.tell_rules()
        while self._search is not None:
            if self._is_lost():
                if self._client is not None:
                    url = self._client.origin
                    lost = [*(other for other in lost if other != url), url][-MAX_LOST_JUDGES:]
                await self._find(self._search, lost)
            await self._lost.wait()
            self._lost = trio.Event()

    def _is_lost(self) -> bool:
        """Return whether there is no judge, or another one would be better than one that fails so often."""
        return self._client is None or self._client.failures >= LOST_AFTER_FAILURES

    async def _find(self, search: JudgeSearch, lost: Sequence[str]) -> None:
        found = await search.run(lost)
        if self._dial is not None and self._is_lost():  # it may have come back meanwhile
            self._talk(f"found the judge {found.url}, advertised by {', '.join(map(nickname, found.by))}")
            self._client = self._dial(found.url)
            self._open = self._last = self._silence = None
            await self.tell_rules()

    async def tell_rules(self) -> None:
        """Tell the operator by whose rules the judge scores, where they are not this node's."""
        client = self._client
        if client is not None and (rules := await client.other_rules()):
            self._talk(
                f"the judge at {client.origin} scores by the rules of {rules}, this node what it trains on by"
                " its own"
            )

    async def ask(self, round_number: int) -> None:
        """Get a question, where a round calls for one, and give it to the trainer.

        Does nothing while one is on its way, being answered, or not yet due.
        """
        client = self._client
        if client is None or round_number % self._every or self._busy or client.wait():
            return
        if self._open is not None and not self._open.expired(client.now()):
            return
        self._busy = True
        try:
            outcome = await client.ask(round_number, self._model)
        finally:
            self._busy = False
        if client is not self._client:
            return  # it was lost meanwhile, and another is asked
        if isinstance(outcome, NotJudged):
            self._on_failure(outcome)
            return
        self._open = outcome
        self._tell(link.JudgeQuestion(outcome.id, outcome.text))

    async def answer(self, answer: link.JudgeAnswer) -> None:
        """Hand the trainer's answer in.

        An answer to a question that is no longer ours to answer is dropped.
        """
        client, question = self._client, self._open
        if client is None or question is None or question.id != answer.id:
            return
        self._busy, self._open = True, None
        try:
            outcome = await client.answer(question, Completion(answer.text, answer.ended))
        finally:
            self._busy = False
        if isinstance(outcome, NotJudged):
            self._on_failure(outcome)
            return
        self._last, self._silence = outcome, None
        if self._receipts is not None:
            self._receipts.add(outcome.receipt)
        self._tell(link.JudgeScore(outcome.score, outcome.n))

    def document(self) -> dict[str, Any] | None:
        """Return what `swarmd status` shows: the last grade, and why there is no newer one."""
        found: dict[str, Any] = self._search.document() if self._search is not None else {}
        if self._client is not None:
            last, silence = self._last, self._silence
            found |= {
                "url": self._client.origin,
                "score": last.score if last else None,
                "interval": last.interval if last else None,
                "n": last.n if last else 0,
                "cause": silence.cause if silence else "",
                "remedy": silence.remedy if silence else "",
                "asked_again_in": round(self._client.wait(), 1),  # seconds
            }
        return found or None

    def _on_failure(self, silence: NotJudged) -> None:
        if silence != self._silence:
            self._talk(f"not judged: {silence.cause}; {silence.remedy}")
        self._silence = silence
        if self._is_lost():
            self._lost.set()


def judging_of(
    member: Member,
    config: NodeConfig,
    curriculum: Curriculum,
    folder: Path,
    device: Callable[[], str],
    roster: Roster,
    tell: Callable[[link.ToTrainer], None],
    talk: Callable[[str], None],
) -> Judging:
    """Make a node's judge. Raises ConfigError.

    folder: the node's, for receipts. device: what the model runs on, as torch names it. tell, talk: as
    Judging has them.
    """
    dial = partial(
        JudgeClient,
        identity=member.identity,
        curriculum_digest=curriculum.digest,
        own_reward=curriculum.own_reward is not None,
        said=lambda: said_of(config, device(), 0 if config.swarm.engine == "none" else config.round.wanted),
        learnt=lambda: roster.learnt_from(MAX_LEARNT) if config.judge.learnt == "on" else {},
    )
    named = {parse_bootstrap(text)[0] for text in config.swarm.bootstrap}
    searched = config.judge.url == AUTO
    return Judging(
        dial(config.judge.url) if config.judge.url and not searched else None,
        tell,
        talk,
        model=config.model.name,
        every=config.judge.every,
        receipts=ReceiptFile(folder / RECEIPTS_FILE),
        search=JudgeSearch(member, named) if searched else None,
        dial=partial(dial, resolve=public_addresses),
    )


def said_of(config: NodeConfig, device: str, external: int) -> dict[str, Any]:
    """Return what a node tells a judge of itself, besides its model; docs/judge-protocol.md lists it.

    external: others' rollouts of a batch, at most.
    """
    sharing, kind = config.sharing, device.partition(":")[0]
    said = {
        "name": config.judge.name,
        "sharing": "swarm" if external else "solo",
        "strategy": f"{'replay' if config.replay.mode == 'on' else sharing.take} {sharing.weigh}",
        "version": installed_version(),
        "hardware": kind if kind in ("cpu", "cuda", "mps") else "other",
        "local": config.round.local,
        "external": external,
    }
    return {name: value for name, value in said.items() if value != ""}
