"""Routes of the HTML pages, and of files for browsers and crawlers (docs/judge.md)."""

import math
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from judge.api.reading import (
    NEWEST,
    Before,
    BoardQuery,
    ModelName,
    PathName,
    all_shown,
    board_of,
    service_of,
    standing_of,
)
from judge.api.responses import REFUSED, Handler, readable, request_of
from judge.errors import NO_SUCH_ANSWER, Refusal, Refused
from judge.figures.leaderboard import (
    BOARD_PAGE_PEERS,
    LISTED_ANSWERS,
    WINDOW_QUESTIONS,
    BoardView,
    by_specialty,
)
from judge.figures.overlap import TRAINING, new_texts
from judge.pages import rendering, views
from judge.store import reader
from swarmd.config.invitation import read_invitation
from swarmd.tasks.curriculum import level_of, subject_of

# Points of a small curve.
CURVE_POINTS = 16
# Answers on a node's page.
ANSWERS_SHOWN = 20
SORTS = {
    "rank": "Rank",
    "score": "Score",
    "questions": "Questions",
    "reward": "Right answers",
    "seen": "Last seen",
    "new": "Newest",
}
COLUMNS = (
    ("rank", "#"), ("", "Node"), ("score", "Score"), ("", "Proof"), ("questions", "Questions"),
    ("", "Right over time"), ("seen", "Last seen"),
)  # fmt: skip
GROUP_TITLES = {
    "model": "Model",
    "version": "Version",
    "sharing": "Swarm or solo",
    "hardware": "Hardware",
    "strategy": "Use of received answers",
}
SAID = {name: GROUP_TITLES[name] for name in ("sharing", "strategy", "version", "hardware")}
PageHandler = Callable[..., Awaitable[tuple[str, Mapping[str, Any]]]]


router = APIRouter(responses=REFUSED)


def page(path: str) -> Callable[[PageHandler], Handler]:
    """Add a route whose handler returns a template's name and its context; a refusal is a page too."""

    def route(handler: PageHandler) -> Handler:
        @wraps(handler)
        async def rendered(**parameters: Any) -> Response:
            request = request_of(parameters)
            try:
                template, context = await handler(**parameters)
            except Refused as refused:
                return refused_page(request, refused.refusal)
            return _rendered(request, template, context)

        return readable(router, path, documented=False)(rendered)

    return route


def refused_page(request: Request, refusal: Refusal) -> Response:
    response = _rendered(
        request, "refused.html", {"error": refusal.error, "remedy": refusal.remedy}, refusal.status
    )
    if refusal.retry_after is not None:
        response.headers["retry-after"] = str(refusal.retry_after)
    return response


def _rendered(request: Request, template: str, context: Mapping[str, Any], status: int = 200) -> Response:
    service = service_of(request)
    given = {
        "curriculum": service.curriculum.name,
        "here": request.url.path,
        "now": service.now(),
        # The address of this judge, as other machines reach it.
        "base": next(iter(service.settings.origin), str(request.base_url).rstrip("/")),
        "listed_answers": LISTED_ANSWERS,
        "window": WINDOW_QUESTIONS,
    }
    return HTMLResponse(rendering.render(template, {**given, **context}), status, headers=rendering.HEADERS)


@page("/")
async def board(request: Request, asked: Annotated[BoardQuery, Query()]) -> tuple[str, Mapping[str, Any]]:
    service = service_of(request)
    view = asked.view(service.now(), curves=CURVE_POINTS)
    found = await board_of(request, view)
    invited = service.settings.invitation and read_invitation(service.settings.invitation).name
    tiers = {standing.record.tier for standing in found.standings}
    # A column with a single value is dropped; the page says the value once, above the table.
    columns = [column for column in COLUMNS if column[1] != "Proof" or len(tiers) > 1]
    return "board.html", {
        "board": found,
        "asked": asked,
        "sorts": SORTS,
        "columns": columns,
        "shown_tiers": sorted(tiers),
        "models": [*dict.fromkeys([*found.models, *filter(None, [asked.model])])],
        "sorted_link": lambda key: _link("/", asked, sort=key, after=0),
        "earlier": _link("/", asked, after=max(0, asked.after - asked.limit)) if asked.after else None,
        "later": _link("/", asked, after=found.more_after) if found.more_after is not None else None,
        "json_link": _link("/v1/leaderboard", asked),
        "segments": views.segments,
        "fresh": new_texts(service.curriculum.questions).values(),
        # Shown only on the front page, without a search, a filter or a page number.
        "health": await service.healths.get(None) if view == BoardView(curves=CURVE_POINTS) else None,
        "swarm": invited,
    }


@page("/nodes/{peer}")
async def node(request: Request, peer: PathName, before: Before = None) -> tuple[str, Mapping[str, Any]]:
    service, standing = service_of(request), await standing_of(request, peer)
    record = standing.record
    named = [(subject_of(name), str(level_of(name)), reward) for name, reward in record.recent]
    rows, more = await service.read(reader.history, peer, before or NEWEST, ANSWERS_SHOWN)
    tasks = [service.question(row["specialty"], row["n"]) for row in rows]
    history = [{**row, "question": task and task.question} for row, task in zip(rows, tasks, strict=True)]
    return "node.html", {
        "standing": standing,
        "segments": views.segments(record.curve),
        "segment_rows": views.segment_rows,
        "subjects": by_specialty([(subject, reward) for subject, _, reward in named]),
        "levels": by_specialty([(level, reward) for _, level, reward in named if level != "0"]),
        "specialties": by_specialty(record.recent),
        "passes": record.pass_at,
        "said": _said(record.model, record.said),
        "history": history,
        "before": before is not None,
        "more": more,
    }


@page("/evaluations/{id}")
async def evaluation(request: Request, id: PathName) -> tuple[str, Mapping[str, Any]]:
    service = service_of(request)
    if (found := await service.read(reader.evaluation, id)) is None:
        raise Refused(NO_SUCH_ANSWER)
    shown, graded = found
    task = service.question(shown["specialty"], shown["n"])
    receipt = service.receipt(graded)["receipt"] if graded and all_shown(graded, shown) else None
    scored = zip(graded.answers, graded.scores, strict=True) if graded else ()
    answers = [(answer.text, answer.ended, score.reason.value, score.reward) for answer, score in scored]
    return "evaluation.html", {
        "e": shown,
        "question": task and task.question,
        "solution": task and service.solution(task),
        "answers": answers,
        "said": _said(shown["model"], shown),
        "receipt": receipt,
    }


@page("/compare")
async def compare(request: Request, model: ModelName = None) -> tuple[str, Mapping[str, Any]]:
    found = await service_of(request).comparisons.get(model or None)
    return "compare.html", {
        "found": found,
        "arms": views.arms(found),
        "rows": views.comparison_rows(found),
    }


@page("/swarm")
async def swarm(request: Request) -> tuple[str, Mapping[str, Any]]:
    return "swarm.html", {"health": await service_of(request).healths.get(None), "titles": GROUP_TITLES}


@page("/join")
async def join(request: Request) -> tuple[str, Mapping[str, Any]]:
    service = service_of(request)
    if not (invitation := service.settings.invitation):
        return "join.html", {"invitation": "", "named": [], "dialled": None}
    read = read_invitation(invitation)
    return "join.html", {
        "invitation": invitation,
        "named": [
            ("Swarm", read.name),
            ("Questions", read.curriculum),
            ("Model", read.model),
            ("Judge", read.judge),
            ("Swarm digest", read.digest),
            ("Questions digest", service.curriculum.digest),
        ],
        "dialled": service.dialled,
    }


@page("/about")
async def about(request: Request) -> tuple[str, Mapping[str, Any]]:
    service = service_of(request)
    return "about.html", {
        "judge": service.key,
        "new_texts": new_texts(service.curriculum.questions),
        "training": TRAINING,
    }


@readable(router, "/static/{name}", documented=False)
async def static(_request: Request, name: str) -> Response:
    kind = rendering.TYPES.get("." + name.rpartition(".")[2])
    if kind is None or name not in {path.name for path in rendering.STATIC.iterdir()}:
        raise Refused(Refusal(404, "no such file", "docs/judge-protocol.md lists the routes."))
    # Cached for a year, because the address changes with the content.
    headers = {**rendering.HEADERS, "cache-control": "public, max-age=31536000, immutable"}
    return Response((rendering.STATIC / name).read_bytes(), headers=headers, media_type=kind)


@readable(router, "/robots.txt", documented=False)
async def robots(_request: Request) -> Response:
    return Response("User-agent: *\nDisallow: /v1/\nDisallow: /*?\n", media_type="text/plain")


@readable(router, "/metrics", kind=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return figures for Prometheus."""
    service = service_of(request)
    health, load = await service.healths.get(None), await service.health()
    figures = (
        ("nodes_listed", "nodes on the leaderboard", health["listed"]),
        ("nodes_unlisted", "nodes with too few answers for it", health["unlisted"]),
        ("nodes_seen_hour", "nodes seen within an hour", health["seen_hour"]),
        ("nodes_seen_day", "nodes seen within a day", health["seen_day"]),
        ("answers", "answers graded, of the nodes that are kept", health["answers"]),
        ("questions_open", "questions that wait for an answer", load["open"]),
        ("answers_scoring", "answers that wait for the verifier", load["scoring"]),
        ("disk_free_bytes", "space for the database", await service.free.get(None)),
    )
    text = "".join(
        f"# HELP swarmd_judge_{name} {what}\n# TYPE swarmd_judge_{name} gauge\n"
        f"swarmd_judge_{name} {value:.15g}\n"
        for name, what, value in figures
        if value < math.inf  # PostgreSQL does not report its free space
    )
    return Response(text, headers={"cache-control": "no-store"}, media_type="text/plain; version=0.0.4")


def _link(path: str, asked: BoardQuery, **other: Any) -> str:
    wanted = {**asked.model_dump(exclude_defaults=True), **other}
    said = {
        name: int(value) if value is True else value
        for name, value in wanted.items()
        if value and (name, value) not in (("sort", "rank"), ("limit", BOARD_PAGE_PEERS))
    }
    return f"{path}?{urlencode(said)}" if said else path


def _said(model: str, said: Mapping[str, Any]) -> list[tuple[str, Any]]:
    shares = (
        f"{said['local']} local, {said['external']} external"
        if said.get("local") is not None and "external" in said
        else None
    )
    words = [(title, said.get(name)) for name, title in SAID.items()]
    return [("Name", said.get("name")), ("Model", model), *words, ("In a batch", shares)]
