"""Requests of commands to a judge: its public JSON, the evidence for an evaluation, uploads of weights.

A judge's data are untrusted: size and types are checked here, and code that prints them escapes them. An
evaluation is checked by its signature, answers, commitment, question and score. That check is pure, except
for the scoring of the answers.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from time import gmtime, strftime, time_ns
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

import httpx2
import msgspec
import trio

from p2p.identity import Identity
from swarmd.daemon.judging.client import JudgeRefusal, exchanged, judge_origin, reason_of, signed_headers
from swarmd.errors import SwarmdError, Unreachable
from swarmd.tasks import held_out
from swarmd.tasks.sandbox.client import Mark
from swarmd.terminal import printable
from swarmd.types import Completion, TaskRef

# Four times the size of an evaluation with 16 long answers.
MAX_ANSWER_BYTES = 2 * 1024 * 1024
# Seconds for a whole response.
ANSWER_TIMEOUT_S = 20.0

K = TypeVar("K")
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Seconds = Annotated[int, msgspec.Meta(ge=0, lt=2**37)]  # since 1970; later years cannot be formatted
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class NothingThere(Unreachable):
    """The judge does not know the requested item."""


class JudgedPeer(msgspec.Struct, frozen=True):
    rank: _Count
    peer: str
    nickname: str
    model: str
    last_seen: float
    answered: _Count
    score: Share
    low: Share
    high: Share
    said: dict[str, Any] = {}


class JudgedCurriculum(msgspec.Struct, frozen=True):
    name: str


class JudgedBoard(msgspec.Struct, frozen=True):
    curriculum: JudgedCurriculum
    listed: _Count
    unlisted: _Count
    peers: list[JudgedPeer]
    more_after: int | None = None


class CommittedWindow(msgspec.Struct, frozen=True):
    number: int
    opens: _Seconds
    closes: _Seconds
    questions: Annotated[int, msgspec.Meta(ge=1)]
    commitment: str
    seed: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")] | None = None


class PublicEvaluation(msgspec.Struct, frozen=True):
    """A judge's public record of one evaluation."""

    receipt: str
    signature: str
    answers: list[Completion]
    window: CommittedWindow | None = None


def read(url: str, path: str, kind: type[K]) -> tuple[K, dict[str, Any]]:
    """Return the judge's JSON at this path, once checked and converted, and once as it came.

    Raises Unreachable, ConfigError.
    """
    origin = judge_origin(url)
    status, body = ask("GET", origin, path, {})
    if status == 404:
        raise NothingThere(f"The judge at {origin} has nothing at {path}. Check the address and the id.")
    if status != 200:
        moved = "Give the address that it redirects to"
        remedy = moved if 300 <= status < 400 else "Try later, or tell its operator"
        raise Unreachable(f"The judge at {origin} answered with HTTP {status}. {remedy}.")
    try:
        return msgspec.json.decode(body, type=kind), json.loads(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Unreachable(
            f"The reply of {origin} is not from a judge. Check that the address is a swarmd judge's."
        ) from None


def ask(
    method: str,
    origin: str,
    target: str,
    headers: Mapping[str, str],
    pieces: Iterable[bytes] = (),
    seconds: float = ANSWER_TIMEOUT_S,
) -> tuple[int, bytes]:
    """Send a request to a judge from a command; return status and body of the response.

    pieces: the request's body. Raises Unreachable, also if the response is too large, or is not complete
        `seconds` after the last piece was sent, even if bytes still arrive.
    """

    async def exchange() -> tuple[int, bytes]:
        async def sent() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece
                limit.deadline = trio.current_time() + seconds

        with trio.move_on_after(seconds) as limit:
            return await exchanged(
                method, origin + target, headers, None if method == "GET" else sent(), MAX_ANSWER_BYTES
            )
        raise httpx2.ReadTimeout(f"no whole answer in {seconds:g} s")

    try:
        return trio.run(exchange)
    except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError) as error:
        raise Unreachable(
            f"The judge at {origin} cannot be reached: {reason_of(error) or type(error).__name__}. Check the"
            " address and your network, or try later."
        ) from None


@dataclass(frozen=True, slots=True)
class EvidenceCheck:
    what: str
    holds: bool | None  # None: it cannot be checked yet
    why: str


def said(evaluation: PublicEvaluation) -> Mapping[str, Any] | None:
    """Return the receipt's content, or None if the judge that it names has not signed it."""
    return held_out.checked_receipt({"receipt": evaluation.receipt, "signature": evaluation.signature})


def examine(
    id: str,
    evaluation: PublicEvaluation,
    own: Mapping[str, str] | None,
    tasks: held_out.Regenerating,
    mark: Mark,
) -> list[EvidenceCheck]:
    """Check an evaluation against its receipt, its questions and its answers.

    own: this node's copy of the receipt, if it has one.
    """
    if (fields := said(evaluation)) is None or fields.get("evaluation") != id:
        return [
            EvidenceCheck(
                "signature",
                False,
                "the receipt is not of this evaluation, or not signed by the judge that it names",
            )
        ]
    found = [EvidenceCheck("signature", True, f"signed by the judge {fields['judge']}")]
    if own is not None:
        same = own == {"receipt": evaluation.receipt, "signature": evaluation.signature}
        why = f"the judge {'still says what' if same else 'says something else than'} it told this node"
        found.append(EvidenceCheck("own receipt", same, why))
    try:
        return [*found, *_facts(fields, evaluation, tasks, mark)]
    except (KeyError, TypeError, ValueError, AttributeError):
        return [*found, EvidenceCheck("receipt", False, "it lacks what a receipt has to say")]


def _facts(
    fields: Mapping[str, Any], evaluation: PublicEvaluation, tasks: held_out.Regenerating, mark: Mark
) -> list[EvidenceCheck]:
    given, ref = evaluation.answers, TaskRef(fields["specialty"], fields["n"])
    digests = [sha256(answer.text.encode(errors="replace")).hexdigest() for answer in given]
    same = digests == fields["answers"]
    texts = "not so: " * (not same) + "the stored answers are those that the receipt names"
    found = [EvidenceCheck("answers", same, texts), *_drawn(fields, ref, evaluation.window, tasks)]
    if tasks.task(ref) is None or not given:
        return [
            *found,
            EvidenceCheck(
                "score", False, f"{ref.specialty} {ref.n} names no question, or there is no answer"
            ),
        ]
    scores = mark([(ref, [tasks.curriculum.completion(each.text, each.ended) for each in given])])[0]
    again = ([score.reward for score in scores], [score.reason.value for score in scores])
    words = ", ".join(again[1])
    if not (held := again == (fields["rewards"], fields["reasons"])):
        words += f"; the judge says {', '.join(map(str, fields['reasons']))}"
    return [*found, EvidenceCheck("score", held, f"scored again here: {words}")]


def _drawn(
    fields: Mapping[str, Any], ref: TaskRef, window: CommittedWindow | None, tasks: held_out.Regenerating
) -> list[EvidenceCheck]:
    if window is None or "commitment" not in fields:
        return [EvidenceCheck("commitment", False, "the judge names no questions that it committed to")]
    if window.seed is None:
        closes = strftime("%Y-%m-%d %H:%M UTC", gmtime(window.closes))
        return [
            EvidenceCheck(
                "commitment",
                None,
                f"window {window.number} is not revealed; it closes at {closes}. Ask again some minutes"
                " later",
            )
        ]
    seed, curriculum = bytes.fromhex(window.seed), tasks.curriculum.digest
    terms = held_out.Terms(curriculum, window.number, window.opens, window.closes, window.questions)
    kept = (
        fields["window"] == window.number
        and held_out.commitment(terms, seed) == window.commitment == fields["commitment"]
    )
    found = [
        EvidenceCheck(
            "commitment",
            kept,
            f"the seed of window {window.number} {'is' if kept else 'is not'} the one committed to",
        )
    ]
    index = held_out.place_in_set(seed, fields["peer"], fields["place"], window.questions)
    drawn = held_out.question(tasks, seed, index).ref == ref and fields["place"] >= 0
    number = f"question {fields['place'] + 1} of this node in window {window.number}"
    return [
        *found,
        EvidenceCheck("question", drawn, f"the seed gives {'it' if drawn else 'another one'} as {number}"),
    ]


# Bytes that are sent at once.
PIECE_BYTES = 64 * 1024
# Seconds for each piece, and from the last piece to the whole response.
PIECE_TIMEOUT_S = 30.0
_LIED = "The reply breaks the judge's protocol. Check the judge's address, or tell its operator."


@dataclass(frozen=True, slots=True)
class UploadedWeights:
    """A safetensors file, with the model that it belongs to."""

    data: bytes
    model: str
    curriculum: str  # digest
    lora_rank: int | None = None  # None: all weights
    base: str | None = None  # fingerprint of an adapter's base weights
    answers: int = 1  # number of answers to each question

    @property
    def digest(self) -> str:
        return sha256(self.data).hexdigest()

    @property
    def target(self) -> str:
        """Return path and query of the request."""
        said = {
            "model": self.model,
            "curriculum": self.curriculum,
            "answers": self.answers,
            "lora_rank": self.lora_rank,
            "base": self.base,
            "bytes": len(self.data),
            "sha256": self.digest,
        }
        return "/v1/verified?" + urlencode({of: value for of, value in said.items() if value is not None})


class _Queued(msgspec.Struct, frozen=True):
    verification: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]


class VerifiedOutcome(msgspec.Struct, frozen=True):
    """The state of an upload's verification, as the judge reports it."""

    verification: str
    peer: str
    state: str  # queued, running, done, refused
    weights: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]  # SHA-256
    place: int | None = None
    error: str = ""
    remedy: str = ""
    score: Share = 0.0
    low: Share = 0.0
    high: Share = 0.0
    right: float = 0.0
    n: int = 0
    pass_at: dict[str, Share] = {}
    receipt: str = ""
    signature: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{128})?\Z")] = ""

    @property
    def over(self) -> bool:
        return self.state in ("done", "refused")


def upload(
    url: str,
    identity: Identity,
    weights: UploadedWeights,
    told: Callable[[int], None],
    nanoseconds: Callable[[], int] = time_ns,
) -> str:
    """Send the weights; returns the id of their verification.

    told: called with the bytes sent so far. Raises SwarmdError.
    """

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(weights.data), PIECE_BYTES):
            yield weights.data[start : start + PIECE_BYTES]
            told(min(start + PIECE_BYTES, len(weights.data)))

    origin, target, sequence = judge_origin(url), weights.target, nanoseconds()
    for _ in range(2):
        size = {"content-length": str(len(weights.data)), "content-type": "application/octet-stream"}
        headers = size | signed_headers(identity, origin, target, sequence, weights.digest)
        status, body = ask("POST", origin, target, headers, pieces(), PIECE_TIMEOUT_S)
        if status == 202:
            return _decoded(body, _Queued).verification
        refusal = _decoded(body, JudgeRefusal)
        if refusal.sequence < sequence:
            raise _refused(refusal.error, refusal.remedy)
        sequence = refusal.sequence + 1  # a running node with this key has used higher numbers
    raise _refused(refusal.error, refusal.remedy)


def outcome(url: str, verification: str) -> VerifiedOutcome:
    """Return the state of an upload's verification; the receipt is checked.

    Raises SwarmdError, also if the receipt is wrong.
    """
    found, _ = read(url, f"/v1/verified/{verification}", VerifiedOutcome)
    if found.verification != verification or (found.state == "done" and not _stands(found)):
        raise SwarmdError(f"the receipt belongs to another result, or the judge did not sign it. {_LIED}")
    return found


def receipt_of(found: VerifiedOutcome) -> Mapping[str, str]:
    """Return the receipt in the form that `receipts.jsonl` has."""
    return {"receipt": found.receipt, "signature": found.signature}


def _stands(found: VerifiedOutcome) -> bool:
    said = held_out.checked_receipt(receipt_of(found))
    result = {
        name: getattr(found, name) for name in ("verification", "peer", "weights", "right", "n", "pass_at")
    }
    return said is not None and result.items() <= said.items()


def _decoded(body: bytes, kind: type[K]) -> K:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise SwarmdError(f"the judge's reply is malformed. {_LIED}") from None


def _refused(error: str, remedy: str) -> SwarmdError:
    return SwarmdError(printable(f"the judge refused: {error.rstrip('.')}. {remedy}").strip())
