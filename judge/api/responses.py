"""Public routes: GET and HEAD, with an ETag, and 304 if the reader's copy is current."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import wraps
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

# Seconds for which a reader may reuse a page (Cache-Control max-age).
PAGE_S = 2
# Scripts of other web sites may read these responses (CORS), because all of it is public.
OPEN = {"access-control-allow-origin": "*", "access-control-expose-headers": "etag"}

# Error statuses that every route may answer with, for OpenAPI.
REFUSED: dict[int | str, dict[str, Any]] = {status: {"description": "Refused"} for status in ("4XX", "5XX")}

Handler = Callable[..., Awaitable[Response]]


def readable(
    router: APIRouter,
    path: str,
    *,
    documented: bool = True,
    kind: type[Response] = JSONResponse,
) -> Callable[[Handler], Handler]:
    """Add a GET and HEAD route whose handler takes the request.

    documented: whether the route is in /openapi.json. kind: the response class named there.
    """

    def both(handler: Handler) -> Handler:
        @wraps(handler)
        async def conditional(**parameters: Any) -> Response:
            return unless_known(request_of(parameters), await handler(**parameters))

        router.head(path, include_in_schema=False)(conditional)
        return router.get(path, include_in_schema=documented, response_class=kind)(conditional)

    return both


def fitting(sizes: Iterable[int], most: int) -> int:
    """Return how many items fit into `most` bytes, counted from the first; always at least one."""
    return sum(not place or size <= most for place, size in enumerate(accumulate(sizes)))


def request_of(parameters: Mapping[str, Any]) -> Request:
    """Return the request among a handler's arguments."""
    return next(value for value in parameters.values() if isinstance(value, Request))


def unless_known(request: Request, response: Response) -> Response:
    """Give the response an ETag; return 304 if the request names the same ETag."""
    headers = response.headers
    headers.setdefault("cache-control", f"public, max-age={PAGE_S}")
    headers.setdefault("x-content-type-options", "nosniff")
    if "content-security-policy" not in headers:
        headers.update(OPEN)
    headers["etag"] = etag = f'"{blake2b(bytes(response.body), digest_size=12).hexdigest()}"'
    if response.status_code != 200 or not _names(request.headers.get("if-none-match", ""), etag):
        return response
    kept = {name: value for name, value in headers.items() if name not in ("content-length", "content-type")}
    return Response(status_code=304, headers=kept)


def _names(given: str, etag: str) -> bool:
    return given.strip() == "*" or etag in {part.strip().removeprefix("W/") for part in given.split(",")}
