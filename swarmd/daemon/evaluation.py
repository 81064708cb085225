"""One judge's evaluations of this node.

At most one question at a time, from the judge to the trainer and back; its receipts are kept.
"""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from p2p import durable
from p2p.identity import Identity
from swarmd.daemon.judge_client import Graded, JudgeClient, NotJudged, Question, Resolve
from swarmd.types import Completion

log = logging.getLogger(__name__)

RECEIPTS_FILE = "receipts.jsonl"
LOST_AFTER = 4  # failures in a row; by the waits between them, 35 s at least
RECEIPTS = 1_000  # kept; the file holds twice as many at most


class ReceiptFile:
    """The newest receipts, one JSON line each. A disk that fails costs receipts, and nothing else."""

    def __init__(self, path: Path, most: int = RECEIPTS) -> None:
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

    At most one question at a time, from the judge to the trainer and back.
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
        """`ask_trainer(question id, text)`; `judged(score, n)`; `talk`.

        To the operator; `resolve` and `said`: as JudgeClient has them.

        Raises BadJudgeUrl.
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
        """Whether the judge has failed so often that another one would be better."""
        return self._client.failures >= LOST_AFTER

    async def check(self) -> None:
        """See whether the judge asks what we train on, and by whose rules it scores.

        What it says of that is told at once.
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
