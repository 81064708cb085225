"""Uploads weights to a judge that evaluates them itself, and reads the result (docs/judge-protocol.md)."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, TypeVar
from urllib.parse import urlencode

import msgspec

from p2p.identity import Identity
from swarmd.daemon.judging.client import JudgeRefusal, judge_origin, signed_headers
from swarmd.daemon.judging.reader import Share, ask, read
from swarmd.errors import SwarmdError
from swarmd.tasks.held_out import checked_receipt
from swarmd.terminal import printable

# What is sent at once.
PIECE_BYTES = 64 * 1024
# The time for each piece, and from the last piece to the whole answer.
PIECE_TIMEOUT_S = 30.0
_LIED = "What the judge sent is not what the protocol says. Check its address, or tell its operator."

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class UploadedWeights:
    """A safetensors file, and what model it is of."""

    data: bytes
    model: str
    curriculum: str  # digest
    lora_rank: int | None = None  # None: all weights
    base: str | None = None  # fingerprint of an adapter's base weights
    answers: int = 1  # to each question

    @property
    def digest(self) -> str:
        return sha256(self.data).hexdigest()

    @property
    def target(self) -> str:
        """Return path and query of the request."""
        said: dict[str, str | int] = {
            "model": self.model,
            "curriculum": self.curriculum,
            "answers": self.answers,
        }
        said |= {
            name: value
            for name, value in (("lora_rank", self.lora_rank), ("base", self.base))
            if value is not None
        }
        return "/v1/verified?" + urlencode(said | {"bytes": len(self.data), "sha256": self.digest})


class _Queued(msgspec.Struct, frozen=True):
    verification: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]


class VerifiedOutcome(msgspec.Struct, frozen=True):
    """A judge's answer about an upload."""

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
    nanoseconds: Callable[[], int] = time.time_ns,
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
        sequence = refusal.sequence + 1  # a running node of this key is ahead of our clock
    raise _refused(refusal.error, refusal.remedy)


def outcome(url: str, verification: str) -> VerifiedOutcome:
    """Return what became of an upload so far, with its receipt checked.

    Raises SwarmdError, also for a wrong receipt.
    """
    found, _ = read(url, f"/v1/verified/{verification}", VerifiedOutcome)
    if found.verification != verification or (found.state == "done" and not _stands(found)):
        raise SwarmdError(
            f"the judge sent a receipt that is not of this result, or that it did not sign. {_LIED}"
        )
    return found


def receipt_of(found: VerifiedOutcome) -> Mapping[str, str]:
    """Return a receipt as `receipts.jsonl` holds it."""
    return {"receipt": found.receipt, "signature": found.signature}


def _stands(found: VerifiedOutcome) -> bool:
    said = checked_receipt(receipt_of(found))
    result = {
        name: getattr(found, name) for name in ("verification", "peer", "weights", "right", "n", "pass_at")
    }
    return said is not None and result.items() <= said.items()


def _decoded(body: bytes, kind: type[K]) -> K:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise SwarmdError(f"the judge sent something else than the protocol says. {_LIED}") from None


def _refused(error: str, remedy: str) -> SwarmdError:
    return SwarmdError(printable(f"the judge refused: {error.rstrip('.')}. {remedy}").strip())
