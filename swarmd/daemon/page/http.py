"""A small HTTP/1.1 server with event streams: h11 over trio, one request for each connection."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar
from urllib.parse import parse_qsl

import h11
import trio

from swarmd.daemon.local_api.control import serve_at_most

# Further connections are closed at once.
MAX_CONNECTIONS = 32
# Seconds in which the client must send a whole request, and receive each part of a response.
IO_TIMEOUT_S = 10.0
# Maximum size of the request line and headers.
MAX_HEAD_BYTES = 16 * 1024
MAX_BODY_BYTES = 16 * 1024

Send = Callable[[bytes], Awaitable[None]]
Result = TypeVar("Result")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # names in lower case
    body: bytes = b""


@dataclass(frozen=True)
class Response:
    status: int
    content_type: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    # Called to send the body piece by piece, instead of `body`; cancelled if the client disconnects.
    stream: Callable[[Send], Awaitable[None]] | None = None


Respond = Callable[[Request], Awaitable[Response]]


async def serve(
    respond: Respond,
    listeners: list[trio.SocketListener],
    body_bytes: int = MAX_BODY_BYTES,
    *,
    gone_ends: bool = False,
) -> None:
    """Answer requests until cancelled.

    body_bytes: maximum size of a request's body. gone_ends: cancel `respond` if its client disconnects.
    """

    async def converse(stream: trio.SocketStream) -> None:
        try:
            await _converse(stream, respond, body_bytes, gone_ends)
        except* (
            trio.BrokenResourceError,
            trio.ClosedResourceError,
            trio.TooSlowError,
            h11.LocalProtocolError,
        ):
            # The client has disconnected, or does not read.
            pass
        except* Exception:
            log.exception("a request to the node's page failed")

    await serve_at_most(MAX_CONNECTIONS, converse, listeners)


async def _converse(stream: trio.SocketStream, respond: Respond, body_bytes: int, gone_ends: bool) -> None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    async with stream:
        try:
            with trio.fail_after(IO_TIMEOUT_S):
                request = await _request(connection, stream, body_bytes)
        except h11.RemoteProtocolError as error:
            request, response = (
                None,
                Response(
                    error.error_status_hint or 400,
                    "text/plain",
                    b"This is no request that swarmd can read.\n",
                ),
            )
        else:
            if request is None:
                return
            work = partial(respond, request)
            if (answered := await (_while_there(stream, work) if gone_ends else work())) is None:
                return
            response = answered
        headers = {
            "content-type": f"{response.content_type}; charset=utf-8",
            **response.headers,
            "connection": "close",
        }
        if response.stream is None:
            headers["content-length"] = str(len(response.body))
        head = h11.Response(
            status_code=response.status,
            headers=[(name.encode(), value.encode()) for name, value in headers.items()],
        )
        data = connection.send(head) or b""
        if response.stream is None:
            if request is None or request.method != "HEAD":
                data += connection.send(h11.Data(data=response.body)) or b""
            data += connection.send(h11.EndOfMessage()) or b""
        with trio.fail_after(IO_TIMEOUT_S):
            await stream.send_all(data)
        if response.stream is not None:
            await _stream(connection, stream, response.stream)


async def _request(connection: h11.Connection, stream: trio.SocketStream, body_bytes: int) -> Request | None:
    """Read the connection's request; return None if the client disconnects before the end."""
    head: h11.Request | None = None
    body = bytearray()
    while True:
        if (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(MAX_HEAD_BYTES))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > body_bytes:
                raise h11.RemoteProtocolError("the body is too long", error_status_hint=413)
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            path, _, query = head.target.decode("ascii").partition("?")
            headers = {name.decode("ascii"): value.decode("latin-1") for name, value in head.headers}
            return Request(head.method.decode("ascii"), path, dict(parse_qsl(query)), headers, bytes(body))
        else:
            return None


async def _stream(
    connection: h11.Connection, stream: trio.SocketStream, feed: Callable[[Send], Awaitable[None]]
) -> None:
    async def send(data: bytes) -> None:
        with trio.fail_after(IO_TIMEOUT_S):
            await stream.send_all(connection.send(h11.Data(data=data)) or b"")

    async def all_of_it() -> None:
        await feed(send)
        with trio.fail_after(IO_TIMEOUT_S):
            await stream.send_all(connection.send(h11.EndOfMessage()) or b"")

    await _while_there(stream, all_of_it)


async def _while_there(stream: trio.SocketStream, work: Callable[[], Awaitable[Result]]) -> Result | None:
    """Return the result of `work`; None if the client disconnects first."""
    found: Result | None = None
    async with trio.open_nursery() as nursery:

        async def until_gone() -> None:
            await stream.receive_some(1)
            nursery.cancel_scope.cancel()

        nursery.start_soon(until_gone)
        found = await work()
        nursery.cancel_scope.cancel()
    return found
