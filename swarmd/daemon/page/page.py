"""The routes of the node's page, and /metrics.

Every request to the page needs the token, except those for static files.
"""

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import trio

from swarmd.daemon.local_api import control
from swarmd.daemon.page import access, rendering
from swarmd.daemon.page.http import Request, Respond, Response, Send
from swarmd.daemon.page.prometheus import CONTENT_TYPE, exposition

# Seconds between two readings of the node's status while a page is open.
REFRESH_S = 1.0
# After this many seconds without news, send a heartbeat. page.js waits three times as long for one.
HEARTBEAT_S = 5.0
# Operations of the control API that the page may call.
ALLOWED = ("pause", "resume", "stop", "invitation", "compare")
STATIC = Path(__file__).parent / "static"
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_REFUSED = "This page needs the address that `swarmd ui` prints: run it as the user whose node this is.\n"


class NodePage:
    """Answers requests for one node's page. handlers: the control API's, by operation."""

    def __init__(self, handlers: Mapping[str, control.Handler]) -> None:
        self.token = secrets.token_urlsafe(32)
        self._handlers = handlers
        own = {"pause": self._pause, "invitation": self._invite, "compare": self._compare}
        self._allowed = {name: handler for name, handler in handlers.items() if name in ALLOWED} | own

    async def respond(self, request: Request) -> Response:
        if (why := access.foreign(request.headers)) is not None:
            return _plain(403, why + "\n")
        name = request.path.removeprefix("/static/")
        if request.method in ("GET", "HEAD") and name != request.path:
            return _file(name)
        if request.method == "GET" and request.path in ("/", "/events"):
            if not access.knows(self.token, request.query.get("token", "")):
                return _plain(403, _REFUSED)
            if request.path == "/events":
                return Response(200, "text/event-stream", headers=HEADERS, stream=self._watch)
            parts, title, _ = await self._read_status()
            return Response(200, "text/html", rendering.page(parts, title).encode(), HEADERS)
        if request.method == "POST" and request.path == "/control":
            if not access.knows(self.token, access.bearer(request.headers)):
                return _plain(403, _REFUSED)
            return Response(
                200, "application/json", await control.answer(request.body, self._allowed), HEADERS
            )
        return _plain(404, "There is nothing here.\n")

    async def _pause(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Pause for `for` seconds by the node's clock, as the browser's clock may differ."""
        seconds = arguments.get("for")
        until = {"until": time.time() + seconds} if isinstance(seconds, int) else {}
        paused: Mapping[str, Any] = await self._handlers["pause"](until)
        return paused

    async def _invite(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        found = await self._handlers["invitation"](arguments)
        return {
            "schema": 1,
            "html": rendering.invitation(found["invitation"], found["notes"]),
            "into": "invitation",
        }

    async def _compare(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        found = await self._handlers["compare"](arguments)
        now, first = found["now"], found["first"]
        html = rendering.comparison(found["question"], found["round"], now, first)
        return {"schema": 1, "html": html, "into": "compared", "right": [now[1] == 1, first[1] == 1]}

    async def _read_status(self) -> tuple[dict[str, str], str, rendering.RewardCurve]:
        status, known = await self._handlers["status"]({}), await self._handlers["peers"]({})
        return (
            rendering.parts(status, known.peers, time.time()),
            rendering.title_of(status),
            rendering.curve(status),
        )

    async def _watch(self, send: Send) -> None:
        """Send events to one open page: first everything, then changes, or a heartbeat if nothing changes."""
        shown: dict[str, str] = {}
        curve: rendering.RewardCurve | None = None
        said = trio.current_time()
        while True:
            parts, title, now_curve = await self._read_status()
            update: dict[str, Any] = {
                "parts": {name: html for name, html in parts.items() if shown.get(name) != html}
            }
            if now_curve != curve:
                update["curve"] = now_curve
            if update["parts"] or "curve" in update or trio.current_time() - said > HEARTBEAT_S:
                await send(b"data: " + msgspec.json.encode({**update, "title": title}) + b"\n\n")
                said = trio.current_time()
            shown, curve = parts, now_curve
            await trio.sleep(REFRESH_S)


def _file(name: str) -> Response:
    kind = TYPES.get(Path(name).suffix)
    if kind is None or name not in {path.name for path in STATIC.iterdir()}:
        return _plain(404, "There is nothing here.\n")
    return Response(200, kind, (STATIC / name).read_bytes(), {**HEADERS, "cache-control": "no-cache"})


def _plain(status: int, text: str) -> Response:
    return Response(status, "text/plain", text.encode(), HEADERS)


def metrics_at(status: control.Handler, *, anybody: bool) -> Respond:
    """Return the handler of /metrics, which needs no token.

    anybody: whether other machines may ask, because the address is not a loopback address.
    """

    async def respond(request: Request) -> Response:
        if not anybody and (why := access.foreign(request.headers)) is not None:
            return _plain(403, why + "\n")
        if (request.method, request.path) != ("GET", "/metrics"):
            return _plain(404, "There is nothing here but /metrics.\n")
        return Response(200, CONTENT_TYPE, exposition(await status({})).encode(), HEADERS)

    return respond
