"""The judge's client, in the daemon (trio).

If a judge is down, slow or lying, the node loses a line in its status, never a round. docs/judge-protocol.md
describes the protocol. No failure of the judge raises an error here: the result is a Question, a grade, or a
Trouble with cause and remedy. A judge's data are untrusted: their size is limited before they are decoded,
and their types and values are checked afterwards.
"""

import contextlib
import math
import ssl
import time
from collections.abc import AsyncIterable, Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any

import httpx2
import msgspec
import trio

from p2p.identity import Identity
from swarmd.config.addresses import web_origin
from swarmd.errors import ConfigError
from swarmd.exchange.wire import model_for_others
from swarmd.state.status import Trouble
from swarmd.tasks.held_out import checked_receipt
from swarmd.tasks.sandbox.pipe import MAX_OWN_QUESTION_CHARACTERS
from swarmd.terminal import printable
from swarmd.types import Completion

DOMAIN = b"swarmd judge request v1"
# An honest response is smaller than 4 KiB.
MAX_RESPONSE_BYTES = 64 * 1024
# The judge's limit for an answer. Of a longer text only the end is sent, because the answer is there.
MAX_ANSWER_CHARACTERS = 16_384
MAX_MODEL_CHARACTERS = 100
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 600.0
CONNECT_TIMEOUT_S = 5.0
# From the first byte sent to the last received. An answer waits while the judge scores other nodes' answers.
CALL_TIMEOUT_S = 30.0

_Id = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]


@dataclass(frozen=True, slots=True)
class Question:
    id: str
    text: str
    expires: float  # by this client's clock
    judge: str  # the peer id that signs its receipts
    commitment: str  # the judge's commitment to the questions of this window

    def expired(self, now: float) -> bool:
        return now > self.expires


class _AskedQuestion(msgspec.Struct, frozen=True):
    evaluation: _Id
    # The longest question of sapo-9 has about 1,000 characters.
    question: Annotated[str, msgspec.Meta(min_length=1, max_length=8_192)]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=86_400)]
    commitment: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class _Asked(msgspec.Struct, frozen=True):
    judge: Annotated[str, msgspec.Meta(max_length=64)]
    evaluations: Annotated[list[_AskedQuestion], msgspec.Meta(min_length=1, max_length=8)]


class Graded(msgspec.Struct, frozen=True):
    evaluation: _Id
    reward: Annotated[float, msgspec.Meta(ge=0, le=1)]
    # Pass@1 over this node's newest questions, as the judge counts (docs/judge-protocol.md).
    score: Annotated[float, msgspec.Meta(ge=0, le=1)]
    low: Annotated[float, msgspec.Meta(ge=0, le=1)]  # 95 % interval of the score, as on the judge's board
    high: Annotated[float, msgspec.Meta(ge=0, le=1)]
    n: Annotated[int, msgspec.Meta(ge=1, lt=2**53)]  # number of these questions
    receipt: Annotated[str, msgspec.Meta(max_length=8_192)]
    signature: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{128}\Z")]


class Observation(msgspec.Struct, frozen=True):
    """An environment's reply: the question goes on."""

    evaluation: _Id
    observation: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_OWN_QUESTION_CHARACTERS)]


# An honest refusal has about 200 characters.
_Words = Annotated[str, msgspec.Meta(max_length=1_000)]


class JudgeRefusal(msgspec.Struct, frozen=True):
    error: _Words = ""
    remedy: _Words = ""
    sequence: Annotated[int, msgspec.Meta(ge=-1, lt=2**63 - 2**32)] = -1


def judge_origin(url: str) -> str:
    """Normalize `url` to scheme://host[:port]. Raises ConfigError."""
    try:
        return web_origin(url)
    except ValueError as error:
        raise ConfigError(f"judge.url: {url!r} is not an address: {error}. Give http://host:port.") from None


def backoff_seconds(attempts: int, spread: float = 0.0) -> float:
    """Return how long to leave a judge alone after `attempts` failures in a row: 5 s, doubling to 10 min.

    spread: in [0, 1), adds up to a quarter, so that the nodes of a swarm do not all return to a restarted
        judge at the same time.
    """
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(attempts - 1, 32)) * (1 + spread / 4)


def signed_headers(
    identity: Identity, origin: str, target: str, sequence: int, digest: str
) -> dict[str, str]:
    """Return the headers that prove the sender of a POST.

    digest: SHA-256 of its body, in hexadecimal.
    """
    message = "\n".join(("POST", origin, target, str(sequence), digest)).encode()
    return {
        "swarmd-peer": identity.peer_id,
        "swarmd-origin": origin,
        "swarmd-sequence": str(sequence),
        "swarmd-signature": identity.sign(DOMAIN, message).hex(),
    }


async def exchanged(
    method: str,
    url: str,
    headers: Mapping[str, str],
    content: bytes | AsyncIterable[bytes] | None,
    most: int,
    tls: ssl.SSLContext | bool = True,
) -> tuple[int, bytes]:
    """Send a request to a judge; return status and raw body of its response.

    The body is not decompressed, no redirect is followed, no cookie is kept and no environment variable is
    read. The caller limits the time. Raises httpx2's errors, also if the body is larger than `most` bytes.
    """
    headers = {"accept-encoding": "identity", "user-agent": "swarmd", **headers}
    timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
    async with (
        httpx2.AsyncClient(verify=tls, trust_env=False, timeout=timeout) as client,
        client.stream(method, url, headers=headers, content=content) as response,
        contextlib.aclosing(response.aiter_raw()) as parts,
    ):
        body = bytearray()
        async for part in parts:
            body += part
            if len(body) > most:
                raise httpx2.ReadError(f"more than {most:,} bytes")
        return response.status_code, bytes(body)


def reason_of(error: BaseException) -> str:
    """Return an error's text, or the text of the error that it was raised from; "" if both are empty.

    httpx2 raises an error without a text if a certificate is not trusted.
    """
    why: BaseException | None = error
    while why is not None and not str(why):
        why = why.__context__
    return str(why or "")


class JudgeClient:
    """A client with one key, for one judge.

    Calls from several tasks are made one after another, because the judge wants rising sequence numbers.
    """

    def __init__(
        self,
        url: str,
        identity: Identity,
        curriculum_digest: str,
        clock: Callable[[], float] = time.monotonic,
        nanoseconds: Callable[[], int] = time.time_ns,
        seconds: float = CALL_TIMEOUT_S,
        said: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Set up a client. Raises ConfigError.

        Args:
            clock: seconds, for waits and deadlines.
            nanoseconds: the clock that sequence numbers start from. A judge refuses numbers an hour ahead.
            seconds: maximum duration of a call.
            said: returns the facts that the node tells a judge about itself, besides its model.
        """
        self.origin = judge_origin(url)
        self._identity, self._digest, self.now, self._seconds = identity, curriculum_digest, clock, seconds
        self._nanoseconds, self._sequence = nanoseconds, 0
        # Number of calls that failed in a row.
        self.failures, self._again_at = 0, -math.inf
        self._spread = sha256(identity.peer_id.encode()).digest()[0] / 256
        self._turn = trio.Lock()
        self._tls = httpx2.create_ssl_context()
        self._said = said

    def wait(self) -> float:
        """Return the seconds until another request makes sense; 0.0 means now."""
        return max(0.0, self._again_at - self.now())

    async def ask(self, round_number: int, model: str) -> Question | Trouble:
        """Ask for a question. Call it only if `wait` returns 0.

        The judge repeats its last question if that is still open. Never raises because of the judge.
        """
        shown = "".join(c for c in model_for_others(model) if c.isprintable())
        asker = {**self._said(), "model": shown[:MAX_MODEL_CHARACTERS] or "unnamed"}
        wish = {"round": round_number, "curriculum": self._digest, "asker": asker}
        if isinstance(asked := await self._call("/v1/evaluations", wish, {201: _Asked}), Trouble):
            return self._failed(asked)
        first = asked.evaluations[0]
        return Question(
            first.evaluation, first.question, self.now() + first.seconds, asked.judge, first.commitment
        )

    async def answer(self, question: Question, completion: Completion) -> Graded | Observation | Trouble:
        """Send the answer to the judge; its receipt is checked. Never raises because of the judge.

        completion: in an environment its text has all texts so far, with TURN between them.
        """
        if question.expired(self.now()):
            return Trouble(
                "the answer took longer than the judge's deadline",
                "if the node was not paused meanwhile, use a smaller model or fewer new tokens, or ask the"
                " judge's operator for more time",
            )
        # A lone surrogate cannot be encoded as UTF-8.
        text = completion.text.encode("utf-8", "replace").decode()[-MAX_ANSWER_CHARACTERS:]
        given = {"text": text, "ended": completion.ended}
        kinds = {200: Graded, 202: Observation}
        grade: Graded | Observation | Trouble = await self._call(
            f"/v1/evaluations/{question.id}/answers", {"answers": [given]}, kinds
        )
        if isinstance(grade, Trouble):
            return self._failed(grade)
        if isinstance(grade, Observation) and grade.evaluation == question.id:
            return grade
        if (
            isinstance(grade, Observation)
            or grade.evaluation != question.id
            or not self._stands(grade, question, text)
        ):
            return self._failed(self._lie("a receipt that is not of this answer, or that it did not sign"))
        self.failures = 0
        return grade

    def _stands(self, grade: Graded, question: Question, text: str) -> bool:
        """Return whether the receipt matches our answer and its grade, and the asking judge signed it."""
        said = checked_receipt({"receipt": grade.receipt, "signature": grade.signature})
        ours = {
            "judge": question.judge,
            "evaluation": question.id,
            "peer": self._identity.peer_id,
            "answers": [sha256(text.encode()).hexdigest()],
            "rewards": [grade.reward],
            "commitment": question.commitment,
        }
        return said is not None and ours.items() <= said.items()

    def _failed(self, silence: Trouble) -> Trouble:
        self.failures += 1
        self._again_at = self.now() + backoff_seconds(self.failures, self._spread)
        return silence

    def _lie(self, what: str) -> Trouble:
        return Trouble(
            f"the judge at {self.origin} sent {what}",
            "check that judge.url names a swarmd judge; if so, tell its operator",
        )

    async def _call(self, path: str, document: dict[str, Any], kinds: Mapping[int, type[Any]]) -> Any:
        """Return the judge's response as the kind of its status, or a Trouble."""
        body = msgspec.json.encode(document)
        with trio.move_on_after(self._seconds):
            async with self._turn:
                headers = {"content-type": "application/json", **self.signed(path, body)}
                try:
                    status, received = await exchanged(
                        "POST", self.origin + path, headers, body, MAX_RESPONSE_BYTES, self._tls
                    )
                except (httpx2.ConnectError, httpx2.ConnectTimeout, OSError) as error:
                    return Trouble(
                        f"cannot reach the judge at {self.origin}:"
                        f" {reason_of(error) or 'no connection in time'}"[:200],
                        "nothing to do: the node trains on, and asks again by itself. If it stays so, check"
                        " judge.url",
                    )
                except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, ValueError) as error:
                    # httpx2 raises ValueError for text that it cannot encode or decode. The status shows all
                    # these errors to the operator.
                    return Trouble(
                        f"no proper answer from the judge at {self.origin}:"
                        f" {str(error) or type(error).__name__}"[:200],
                        "nothing to do; it is asked again later",
                    )
            return self._understand(status, received, kinds)
        return Trouble(
            f"the judge at {self.origin} took longer than {self._seconds:g} s",
            "nothing to do; it is asked again later",
        )

    def signed(self, path: str, body: bytes) -> dict[str, str]:
        """Return the headers that prove the sender, with the next sequence number."""
        self._sequence = max(self._sequence + 1, self._nanoseconds())
        return signed_headers(self._identity, self.origin, path, self._sequence, sha256(body).hexdigest())

    def _understand(self, status: int, received: bytes, kinds: Mapping[int, type[Any]]) -> Any:
        if 300 <= status < 400:
            return Trouble(
                f"the judge at {self.origin} redirects elsewhere",
                "set judge.url to its new address, if its operator says so",
            )
        try:
            if status in kinds:
                return msgspec.json.decode(received, type=kinds[status])
            refusal = msgspec.json.decode(received, type=JudgeRefusal)
        except (msgspec.MsgspecError, ValueError, RecursionError):  # ValueError: not UTF-8
            if status in (502, 503, 504):
                return Trouble(
                    f"the judge at {self.origin} is not there: its proxy says HTTP {status}",
                    "nothing to do; it is asked again later",
                )
            return self._lie(f"something else than the protocol says (HTTP {status})")
        # The judge has seen a higher number, from another run of this node with a clock ahead of this one.
        self._sequence = max(self._sequence, refusal.sequence)
        if not 400 <= status < 600 or not refusal.error:
            return self._lie(f"something else than the protocol says (HTTP {status})")
        # The judge's remedy is a whole sentence; here it follows a semicolon.
        remedy = printable(refusal.remedy).strip().rstrip(".")
        return Trouble(
            f"the judge refused: {printable(refusal.error)}",
            remedy[:1].lower() + remedy[1:] or "ask the judge's operator",
        )
