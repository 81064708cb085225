"""HTTP API of the judge: checks requests, calls the service and writes responses (docs/judge-protocol.md)."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, FastAPI, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from judge import config
from judge.api import reading, verified
from judge.api.reading import host_of, service_of, signer_of
from judge.api.requests import AnswersBody, Body, QuestionsBody, described
from judge.api.responses import OPEN, REFUSED
from judge.errors import FAULT, STOPPING, TOO_LARGE, TOO_SLOW, Refusal, Refused, too_often
from judge.evaluation.service import JudgeService
from judge.pages import routes
from judge.pages.routes import refused_page
from judge.types import Signed, network_of
from p2p.rate_limit import TokenBuckets
from swarmd.tasks.sandbox.client import Completion

B = TypeVar("B", bound=Body)


router = APIRouter(responses=REFUSED)


@router.post("/v1/evaluations", status_code=201, openapi_extra=described(QuestionsBody))
async def ask(request: Request) -> Response:
    """Ask for questions, and state your attributes. Questions that are still open are returned again."""
    signed, body = await _signed(request, config.MAX_ASK_BYTES)
    wish = _parse(QuestionsBody, body)
    service = service_of(request)
    asked = await service.ask(
        signed, host_of(request), wish.attributes, wish.curriculum, wish.questions, wish.answers
    )
    return JSONResponse({"judge": service.key, "evaluations": asked}, 201)


@router.post("/v1/evaluations/{id}/answers", openapi_extra=described(AnswersBody))
async def answer(request: Request, id: Annotated[str, Path(max_length=64)]) -> Response:
    """Answer a question; return its grade with a signed receipt.

    The first answer counts for the score. In an environment, send all texts so far as one text with U+001E
    between them; while the episode goes on, the response is 202 with its observation.
    """
    signed, body = await _signed(request, config.MAX_ANSWERS_BYTES)
    given = [Completion(answer.text, answer.ended) for answer in _parse(AnswersBody, body).answers]
    service = service_of(request)
    answered = await service.answer(signed, id, given)
    if isinstance(answered, str):
        return JSONResponse({"evaluation": id, "observation": answered}, 202)
    grade, graded = answered
    return JSONResponse(
        {
            **grade,
            "rewards": [score.reward for score in graded.scores],
            "reasons": [score.reason.value for score in graded.scores],
            **service.receipt(graded),
        }
    )


async def _refused(request: Request, error: Refused) -> Response:
    return _refusal(request, error.refusal)


async def _no_such_page(request: Request, error: HTTPException) -> Response:
    refusal = Refusal(
        error.status_code,
        str(error.detail).lower(),
        "Go on from the leaderboard; docs/judge-protocol.md lists the API.",
    )
    allowed = dict(error.headers or {})
    if allowed.get("Allow") == "HEAD":
        # The router names only the first route of a path; each readable path has GET and HEAD (`readable`).
        allowed["Allow"] = "GET, HEAD"
    return refused_page(request, refusal) if _in_a_browser(request) else _refusal(request, refusal, allowed)


async def _bad_parameter(request: Request, _error: RequestValidationError) -> Response:
    refusal = Refusal(
        422,
        "a parameter of the address is malformed",
        "docs/judge-protocol.md gives the form of each parameter.",
    )
    return refused_page(request, refusal) if _in_a_browser(request) else _refusal(request, refusal)


async def _fault(request: Request, _error: Exception) -> Response:
    # A bug of the judge: the server logs its traceback.
    return _refusal(request, FAULT)


_ERROR_ANSWERS: dict[int | type[Exception], Any] = {
    Refused: _refused,
    HTTPException: _no_such_page,
    RequestValidationError: _bad_parameter,
    Exception: _fault,
}


def create_app(service: JudgeService) -> FastAPI:
    """Build the HTTP app of an open service."""
    app = FastAPI(
        title="swarmd judge",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        version="1",
        responses=REFUSED,
        exception_handlers=_ERROR_ANSWERS,
    )
    app.state.service = service
    app.state.boards = TokenBuckets[str](config.BOARDS_PER_S, config.BOARDS_BURST, config.REMEMBERED_PEERS)
    app.state.arriving = Counter[str]()  # bytes of bodies now arriving, by network
    app.add_middleware(_AnswersWhenStopped)
    for part in (router, reading.router, verified.router, routes.router):
        # Routes are copied because `include_router` would search each router at every request.
        app.router.routes += part.routes
    return app


class _AnswersWhenStopped:
    """Answers a request that is cancelled because the judge stops, so that no traceback is logged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def begin(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, begin)
        except asyncio.CancelledError:
            if not begun:
                await _refusal(Request(scope), STOPPING)(scope, receive, send)


def _in_a_browser(request: Request) -> bool:
    asked = request.method in ("GET", "HEAD") and not request.url.path.startswith("/v1/")
    return asked and "text/html" in request.headers.get("accept", "")


def _refusal(request: Request, refusal: Refusal, headers: Mapping[str, str] | None = None) -> Response:
    more = {**(OPEN if request.method in ("GET", "HEAD") else {}), **(headers or {})}
    if refusal.retry_after is not None:
        more["retry-after"] = str(refusal.retry_after)
    return JSONResponse(
        {"error": refusal.error, "remedy": refusal.remedy, **dict(refusal.extra)}, refusal.status, more
    )


async def _signed(request: Request, limit: int) -> tuple[Signed, bytes]:
    """Return signer and body of a request; decode nothing before the signature is valid. Raises Refused."""
    body, network = bytearray(), network_of(host_of(request))
    arriving: Counter[str] = request.app.state.arriving
    try:
        async with asyncio.timeout(config.BODY_S):
            async for part in request.stream():
                body += part
                arriving[network] += len(part)
                if len(body) > limit:
                    raise Refused(TOO_LARGE)
                if arriving[network] > config.ARRIVING_BYTES:
                    raise too_often(
                        "too many bytes of your network arrive at once", "Send the request again", 0.0
                    )
    except (TimeoutError, ClientDisconnect):
        # Nobody reads this refusal if the client is gone.
        raise Refused(TOO_SLOW) from None
    finally:
        arriving[network] -= len(body)
        if not arriving[network]:
            del arriving[network]
    return signer_of(request, bytes(body)), bytes(body)


def _parse(kind: type[B], body: bytes) -> B:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:64] or "the body"
        raise Refused(
            Refusal(422, f"{where}: {first['msg']}", "docs/judge-protocol.md gives the form of each request.")
        ) from None
