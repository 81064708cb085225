"""HTTP routes that anyone may read: leaderboard, peers, the judge itself (docs/judge-protocol.md)."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from judge import config
from judge.api.responses import REFUSED, fitting, readable
from judge.api.signing import verify_request
from judge.errors import NO_SUCH_ANSWER, Refusal, Refused, too_often
from judge.evaluation.service import JudgeService
from judge.figures.intervals import Interval, always
from judge.figures.leaderboard import (
    BOARD_PAGE_PEERS,
    LISTED_ANSWERS,
    TIERS,
    WINDOW_QUESTIONS,
    BoardView,
    LeaderboardPage,
    Record,
    ScoreTally,
    Standing,
    by_specialty,
)
from judge.figures.overlap import new_texts
from judge.store import reader
from judge.store.windows import read as read_windows
from judge.types import GradedEvaluation, Signed, network_of
from p2p.identity import nickname

SCHEMA = 1

# Times are rounded down to this step, so that equal queries share one cached answer.
SEEN_STEP_S = 60
# Points of each peer's curve.
BOARD_POINTS = 24
# Maximum number of rows of one answer; about this many fit into PAGE_BYTES.
WHOLE_ROWS = 40
# Maximum bytes of JSON for the leaderboard's rows.
PAGE_BYTES = 90_000

ModelName = Annotated[str | None, Query(min_length=1, max_length=config.MAX_MODEL_CHARACTERS)]
# The id of a peer or an evaluation. NUL is excluded, because PostgreSQL cannot look it up.
PathName = Annotated[str, Path(max_length=64, pattern=r"^[^\x00]*$")]
# The `more_before` of the previous page; None: start with the newest.
Before = Annotated[int | None, Query(ge=1, lt=2**63)]
NEWEST = 2**63 - 1
Choice = Annotated[str, Field(max_length=100)]


router = APIRouter(responses=REFUSED)


class BoardQuery(BaseModel):
    """Query parameters of the leaderboard, shared by the page and the JSON route."""

    after: Annotated[int, Field(ge=0, lt=2**31)] = 0
    limit: Annotated[int, Field(ge=1, le=BOARD_PAGE_PEERS)] = BOARD_PAGE_PEERS
    q: Choice = ""  # text to find in a node's names, id or model
    model: Choice = ""
    tier: Literal["", "reported", "verified"] = ""
    active: bool = False  # seen within the last day
    sort: Literal["rank", "score", "questions", "reward", "seen", "new"] = "rank"

    def view(self, now: float, *, whole: bool = False, curves: int = 0) -> BoardView:
        since = now // SEEN_STEP_S * SEEN_STEP_S - reader.DAY if self.active else 0.0
        search = "".join(letter for letter in self.q.strip() if letter.isprintable())
        limit = min(self.limit, WHOLE_ROWS) if whole else self.limit
        return BoardView(self.after, limit, search, self.model, self.tier, since, self.sort, curves, whole)


@readable(router, "/openapi.json", documented=False)
async def openapi(request: Request) -> Response:
    return JSONResponse(request.app.openapi())


@readable(router, "/v1/judge")
async def judge(request: Request) -> Response:
    """Describe this judge: the public key of its receipts, its curriculum and its limits."""
    service = service_of(request)
    return JSONResponse(
        {
            "schema": SCHEMA,
            "judge": service.key,
            "curriculum": {"name": service.curriculum.name, "digest": service.curriculum.digest},
            "questions": config.MAX_QUESTIONS,
            "answers": config.MAX_ANSWERS,
            "seconds": service.settings.deadline,
        }
    )


@readable(router, "/v1/leaderboard")
async def leaderboard(request: Request, asked: Annotated[BoardQuery, Query()]) -> Response:
    """Return the leaderboard, best first, a page at a time.

    The parameters filter and sort the peers; ranks are always those among all listed peers.
    """
    service = service_of(request)
    board = await board_of(request, asked.view(service.now(), whole=True, curves=BOARD_POINTS))
    rows = [_standing(standing) for standing in board.standings]
    count = fitting((len(JSONResponse(row).body) for row in rows), PAGE_BYTES)
    return JSONResponse(
        {
            "schema": SCHEMA,
            "curriculum": {"name": service.curriculum.name, "digest": service.curriculum.digest},
            "window": WINDOW_QUESTIONS,
            "listed_answers": LISTED_ANSWERS,
            "new_texts": new_texts(service.curriculum.questions) or None,
            "tiers": dict(TIERS),
            "listed": board.listed,
            "unlisted": board.unlisted,
            "matching": board.matching,
            "answers": board.answers,
            "peers": rows[:count],
            "more_after": board.after + count if count < len(rows) else board.more_after,
        }
    )


@readable(router, "/v1/comparison")
async def comparison(request: Request, model: ModelName = None) -> Response:
    """Compare nodes of one model that share with those that do not, over normalised rounds."""
    return JSONResponse(await service_of(request).comparisons.get(model))


@readable(router, "/v1/peers/{peer}")
async def peer(
    request: Request, peer: PathName, before: Before = None, limit: Annotated[int, Query(ge=1, le=500)] = 500
) -> Response:
    """Return one peer: its figures, and its questions with the answers, newest first."""
    service, standing = service_of(request), await standing_of(request, peer)
    history, more = await service.read(reader.history, peer, before or NEWEST, limit)
    return JSONResponse(
        {"schema": SCHEMA, **_record(standing.record), "evaluations": history, "more_before": more}
    )


@readable(router, "/v1/windows")
async def windows(request: Request, before: Before = None) -> Response:
    """List the question sets that the judge has committed to, newest first.

    The commitments let anyone check that the judge did not pick questions for a peer.
    """
    service = service_of(request)
    found = await service.read(read_windows, before or NEWEST)
    return JSONResponse(
        {
            "schema": SCHEMA,
            "judge": service.key,
            "curriculum": service.curriculum.digest,
            "windows": [window.document() for window in found],
            "more_before": found[-1].number if found and found[-1].number > 1 else None,
        }
    )


@readable(router, "/v1/evaluations/{id}")
async def evaluation(request: Request, id: PathName) -> Response:
    """Return one answered question: its signed receipt, its answers and its window."""
    service = service_of(request)
    found = await service.read(reader.evaluation, id)
    if found is None or (graded := found[1]) is None:
        raise Refused(NO_SUCH_ANSWER)
    if not all_shown(graded, found[0]):
        raise Refused(
            Refusal(
                403,
                "the judge's operator has hidden this peer's name, which the receipt contains",
                "Ask the peer: it received the receipt with its grade.",
            )
        )
    return JSONResponse(
        {
            "schema": SCHEMA,
            **service.receipt(graded),
            "answers": [{"text": answer.text, "ended": answer.ended} for answer in graded.answers],
            "window": graded.window.document(),
        }
    )


@readable(router, "/healthz")
async def healthz(request: Request) -> Response:
    """Return the health of the judge: 503 if it cannot write its database."""
    service = service_of(request)
    return JSONResponse(
        {
            "status": "ok",
            "curriculum": service.curriculum.digest,
            "scorer": service.curriculum.name,
            **await service.health(),
        },
        headers={"cache-control": "no-store"},
    )


def service_of(request: Request) -> JudgeService:
    service: JudgeService = request.app.state.service
    return service


async def standing_of(request: Request, peer: str) -> Standing:
    """Return a peer with its rank. Raises Refused if the judge has no record of the peer."""
    service = service_of(request)
    if (standing := await service.read(reader.standing, peer)) is None:
        raise Refused(
            Refusal(
                404, "no peer with this id has asked for an evaluation", "Look up the id on the leaderboard."
            )
        )
    return standing


def signer_of(request: Request, body: bytes | str) -> Signed:
    """Return the signer of a request with this body (`verify_request`). Raises Refused."""
    scope = request.scope
    query = scope["query_string"].decode("latin-1")
    target = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
    outcome = verify_request(
        request.method, target, scope["headers"], body, service_of(request).settings.origin
    )
    if isinstance(outcome, Refusal):
        raise Refused(outcome)
    return outcome


def host_of(request: Request) -> str:
    return request.client.host if request.client else ""


async def board_of(request: Request, view: BoardView) -> LeaderboardPage:
    """Return one page of the leaderboard.

    Raises Refused if the reader's network caused too many pages to be computed.
    """
    service = service_of(request)
    now, buckets = service.now(), request.app.state.boards
    if not service.boards.kept(view) and (wait := buckets.of(network_of(host_of(request)), now).wait(now)):
        raise too_often(
            "your network requests too many pages of the leaderboard", "Request the page again", wait
        )
    return await service.boards.get(view)


def all_shown(graded: GradedEvaluation, shown: Mapping[str, Any]) -> bool:
    """Return whether readers see every attribute that the receipt contains; the operator may hide some."""
    return all(shown.get(name) == value for name, value in graded.attributes.said().items())


def _standing(standing: Standing) -> dict[str, Any]:
    first, last = standing.ties or (standing.rank, standing.rank)
    return {"rank": standing.rank, "rank_from": first, "rank_to": last, **_record(standing.record)}


def _record(record: Record) -> dict[str, Any]:
    return {
        "peer": record.peer,
        "nickname": nickname(record.peer),
        "model": record.model,
        "first_seen": record.first_seen,
        "last_seen": record.last_seen,
        "answered": record.answered,
        "unanswered": record.unanswered,
        "reward": record.reward,
        "curve": record.curve,
        **_tally(record.score),
        "specialties": {name: _tally(tally) for name, tally in by_specialty(record.recent).items()},
        "always": _tally(record.always, always(record.always.right, record.always.answers)),
        "said": dict(record.said),
        "pass_at": {str(k): {"score": share, "n": n} for k, (share, n) in record.pass_at.items()},
        "tier": record.tier,
        "verified": record.verified,
    }


def _tally(tally: ScoreTally, interval: Interval | None = None) -> dict[str, Any]:
    interval = interval or tally.interval
    return {
        "score": tally.share,
        "low": interval.low,
        "high": interval.high,
        "right": tally.right,
        "n": tally.answers,
    }
