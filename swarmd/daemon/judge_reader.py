"""Reads a judge's public JSON, for commands.

What it sends is a stranger's: size and types are checked; who prints it escapes it.
"""

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from typing import Annotated, Any, TypeVar

import httpx2
import msgspec
import trio

from swarmd.daemon.judge_client import judge_origin
from swarmd.errors import Unreachable

LARGEST = 2 * 1024 * 1024  # bytes; an evaluation of 16 long answers has a quarter
SECONDS = 20.0  # of a whole answer

K = TypeVar("K")
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Seconds = Annotated[int, msgspec.Meta(ge=0, lt=2**37)]  # since 1970; a later year cannot be written
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class NothingThere(Unreachable):
    """The judge knows nothing of this."""


class JudgedPeer(msgspec.Struct, frozen=True):
    rank: _Count
    peer: str
    nickname: str
    model: str
    last_seen: float
    answered: _Count
    score: _Share
    low: _Share
    high: _Share
    n: _Count
    said: dict[str, Any] = {}


class JudgedCurriculum(msgspec.Struct, frozen=True):
    name: str
    digest: str


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


class StoredAnswer(msgspec.Struct, frozen=True):
    text: str
    ended: bool


class PublicEvaluation(msgspec.Struct, frozen=True):
    """What a judge tells anyone of one evaluation."""

    receipt: str
    signature: str
    answers: list[StoredAnswer]
    window: CommittedWindow | None = None


def read(url: str, path: str, kind: type[K]) -> tuple[K, dict[str, Any]]:
    """What the judge says at this path, checked and as it came. Raises Unreachable, BadJudgeUrl."""
    origin = judge_origin(url)
    try:
        status, body = exchanged("GET", origin + path, {})
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        why = str(error) or type(error).__name__
        raise Unreachable(
            f"The judge at {origin} cannot be reached: {why}. Check the address and your network, or try"
            " later."
        ) from None
    if status == 404:
        raise NothingThere(
            f"The judge at {origin} has nothing at {path}. Check what you asked for; an older judge may not"
            " know it."
        )
    if status != 200:
        raise Unreachable(
            f"The judge at {origin} answered with HTTP {status}. Try later, or tell its operator."
        )
    try:
        return msgspec.json.decode(body, type=kind), json.loads(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Unreachable(
            f"What {origin} sent is no answer of a judge. Check that the address is a swarmd judge's."
        ) from None


def exchanged(
    method: str,
    url: str,
    headers: Mapping[str, str],
    pieces: Iterable[bytes] | None = None,
    seconds: float = SECONDS,
) -> tuple[int, bytes]:
    """Status and body of the answer.

    pieces: of the request's body. No redirect is followed, no environment read. Raises httpx2.HTTPError; also
    where the answer is too large, or not whole within `seconds` of the last piece, whatever drips meanwhile.
    """
    return trio.run(
        _exchanged,
        method,
        url,
        {"accept-encoding": "identity", "user-agent": "swarmd", **headers},
        pieces,
        seconds,
    )


async def _exchanged(
    method: str, url: str, headers: Mapping[str, str], pieces: Iterable[bytes] | None, seconds: float
) -> tuple[int, bytes]:
    async def sent() -> AsyncIterator[bytes]:
        for piece in pieces or ():
            yield piece
            limit.deadline = trio.current_time() + seconds

    with trio.move_on_after(seconds) as limit:
        async with (
            httpx2.AsyncClient(trust_env=False, timeout=httpx2.Timeout(seconds, connect=5.0)) as client,
            client.stream(method, url, headers=headers, content=None if pieces is None else sent()) as got,
            aclosing(got.aiter_raw()) as parts,
        ):
            body = bytearray()
            async for part in parts:
                body += part
                if len(body) > LARGEST:
                    raise httpx2.ReadError(f"more than {LARGEST:,} bytes")
            return got.status_code, bytes(body)
    raise httpx2.ReadTimeout(f"no whole answer in {seconds:g} s")
