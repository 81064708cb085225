"""The node's judge, configured or found in the swarm: hands on its questions and keeps its grades."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import trio

from p2p.address import parse_bootstrap
from p2p.identity import nickname
from p2p.member import Member
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.daemon.evaluation import RECEIPTS_FILE, Evaluation, ReceiptFile
from swarmd.daemon.judge_client import Resolve
from swarmd.daemon.judge_discovery import AUTO, JudgeSearch, public_addresses
from swarmd.tasks.curriculum import Curriculum

LOST_JUDGES = 8  # remembered
CHECK_EVERY = 600.0  # seconds between two questions whether the judge is of our curriculum


class Judging:
    """folder: the node's, for receipts.

    device: what the model runs on, as torch names it. tell: the trainer. talk: the operator.
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

        See now and then whether it asks what we train on.
        """
        lost: list[str] = []
        while self._search is not None or self._evaluation is not None:
            if self._search is not None and (self._evaluation is None or self._evaluation.lost):
                if self._evaluation is not None:
                    lost = [*(url for url in lost if url != self._evaluation.url), self._evaluation.url][
                        -LOST_JUDGES:
                    ]
                await self._find(self._search, lost)
            if self._evaluation is not None:
                await self._evaluation.check()
            with trio.move_on_after(CHECK_EVERY):
                await self._lost.wait()
            self._lost = trio.Event()

    async def _find(self, search: JudgeSearch, lost: Sequence[str]) -> None:
        found = await search.run(lost)
        if self._evaluation is None or self._evaluation.lost:  # it may have come back meanwhile
            self._talk(f"found the judge {found.url}, advertised by {', '.join(map(nickname, found.by))}")
            self._evaluation = self._by(found.url, public_addresses)

    async def ask(self, round_number: int) -> None:
        """Have it ask a question, where a round calls for one."""
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
    """What a node tells a judge of itself, besides its model. docs/judge-protocol.md lists the fields."""
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
