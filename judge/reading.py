"""What anyone may read over HTTP: the leaderboard, peers, the judge itself. docs/judge-protocol.md describes it."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from judge import config
from judge.anytime import always
from judge.leaderboard import LISTED_ANSWERS, WINDOW, Record, ScoreTally, Standing, by_specialty
from judge.overlap import new_texts
from judge.pages import rendering
from judge.ranks import RankRange
from judge.refusals import NO_SUCH_ANSWER, Refusal, Refused
from judge.service import JudgeService
from judge.statistics import Interval
from judge.tiers import TIERS
from p2p.identity import nickname

SCHEMA = 1

Handler = Callable[..., Awaitable[Response]]
ModelName = Annotated[str | None, Query(min_length=1, max_length=config.MAX_MODEL_CHARACTERS)]
Rank = Annotated[int, Query(ge=0, lt=2**31)]


def add_reading_routes(app: FastAPI) -> None:
    def readable(path: str) -> Callable[[Handler], Handler]:
        def both(handler: Handler) -> Handler:
            app.head(path, include_in_schema=False)(handler)
            return app.get(path)(handler)

        return both

    @readable("/v2/judge")
    async def judge(request: Request) -> Response:
        service = service_of(request)
        lessons = {"name": service.curriculum.name, "digest": service.curriculum.digest}
        limits = {"questions": config.MAX_QUESTIONS, "answers": config.MAX_ANSWERS, "seconds": service.settings.deadline}
        return JSONResponse({"schema": SCHEMA, "judge": service.key, "protocols": [1, 2], "curriculum": lessons, **limits})

    @readable("/v1/leaderboard")
    async def leaderboard(request: Request, after: Rank = 0) -> Response:
        service = service_of(request)
        board = await service.leaderboard(after)
        lessons = {"name": service.curriculum.name, "digest": service.curriculum.digest}
        return JSONResponse(
            {
                "schema": SCHEMA, "curriculum": lessons, "window": WINDOW, "listed_answers": LISTED_ANSWERS,
                "new_texts": new_texts(service.curriculum.digest) or None, "tiers": dict(TIERS),
                "listed": board.listed, "unlisted": board.unlisted, "answers": board.answers,
                "peers": [_standing(standing) for standing in board.standings], "more_after": board.more_after,
            }
        )  # fmt: skip

    @readable("/v2/comparison")
    async def comparison(request: Request, model: ModelName = None) -> Response:
        return JSONResponse(await service_of(request).comparison(model))

    @readable("/v1/peers/{peer}")
    async def peer(
        request: Request, peer: Annotated[str, Path(max_length=64)], before: Annotated[int, Query(ge=1, lt=2**63)] = 2**63 - 1
    ) -> Response:
        found = await service_of(request).peer(peer, before)
        if found is None:
            raise Refused(Refusal(404, "no peer of this id has asked for an evaluation", "Look it up on the leaderboard."))
        record, history, more = found
        return JSONResponse({"schema": SCHEMA, **_record(record), "evaluations": history, "more_before": more})

    @readable("/v2/windows")
    async def windows(request: Request, before: Annotated[int, Query(ge=1, lt=2**63)] = 2**63 - 1) -> Response:
        service = service_of(request)
        found = await service.windows(before)
        more = found[-1].number if found and found[-1].number > 1 else None
        told = {"windows": [window.told() for window in found], "more_before": more}
        return JSONResponse({"schema": SCHEMA, "judge": service.key, "curriculum": service.curriculum.digest, **told})

    @readable("/v2/evaluations/{id}")
    async def evaluation(request: Request, id: Annotated[str, Path(max_length=64)]) -> Response:
        service = service_of(request)
        found = await service.evaluation(id)
        if found is None:
            raise Refused(NO_SUCH_ANSWER)
        window = found.question.window
        answers = [{"text": answer.text, "ended": answer.ended} for answer in found.answers]
        known = {"answers": answers, "window": window.told() if window else None}
        return JSONResponse({"schema": SCHEMA, **service.receipt(found), **known})

    @readable("/healthz")
    async def healthz(request: Request) -> Response:
        service = service_of(request)
        return JSONResponse({"status": "ok", "curriculum": service.curriculum.digest, **await service.health()})

    @readable("/")
    async def page(request: Request, after: Rank = 0) -> Response:
        service = service_of(request)
        board = await service.leaderboard(after)
        lessons = service.curriculum
        text = rendering.leaderboard(board, lessons.name, lessons.specialties, new_texts(lessons.digest), service.now())
        return HTMLResponse(text, headers=rendering.HEADERS)


def service_of(request: Request) -> JudgeService:
    service: JudgeService = request.app.state.service
    return service


def _standing(standing: Standing) -> dict[str, Any]:
    ties = standing.ties or RankRange(standing.rank, standing.rank)
    return {"rank": standing.rank, "rank_from": ties.first, "rank_to": ties.last, **_record(standing.record)}


def _record(record: Record) -> dict[str, Any]:
    return {
        "peer": record.peer, "nickname": nickname(record.peer), "model": record.model,
        "first_seen": record.first_seen, "last_seen": record.last_seen,
        "answered": record.answered, "unanswered": record.unanswered, "reward": record.reward, "curve": record.curve,
        **_tally(record.score), "specialties": {name: _tally(tally) for name, tally in by_specialty(record.recent).items()},
        "always": _tally(record.always, always(record.always.right, record.always.answers)), "said": dict(record.said),
        "pass_at": {str(k): {"score": share, "n": n} for k, (share, n) in record.pass_at.items()},
        "tier": "reported" if record.verified is None else "verified", "verified": record.verified,
    }  # fmt: skip


def _tally(tally: ScoreTally, interval: Interval | None = None) -> dict[str, Any]:
    interval = interval or tally.interval
    return {"score": tally.share, "low": interval.low, "high": interval.high, "right": tally.right, "n": tally.answers}
