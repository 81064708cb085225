"""Access control of the node's page.

Over a real socket, with the requests of hostile pages, other users and broken programs.
"""

import json
import random
import string
import time

import pytest
import trio

from swarmd.daemon.page import access
from swarmd.daemon.page.http import MAX_CONNECTIONS
from tests.doubles import TIMEOUT_S
from tests.swarmd.daemon.page.served import Node, served

pytestmark = pytest.mark.net
REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"

PAUSE = '{"operation": "pause", "arguments": {}}'
REBOUND = (
    "evil.example",
    "evil.example:{port}",
    "127.0.0.1.nip.io:{port}",
    "localhost.evil.example",
    "evil.example.localhost:{port}",
    "",
    "127.0.0.1@evil.example",
    "0.0.0.0:{port}",
    "127.1:{port}",
    "2130706433:{port}",
    "127.0.0.1:{port}:80",
    "127.0.0.1:x",
    "[::]:{port}",
    "localhost.:{port}",
    "LOCALHOST.evil",
    "[::1].evil",
    "127.0.0.2:{port}",
)


def requests(node: Node) -> list[tuple[str, str, str]]:
    """Return every request that strangers must not make, with the token's header and a body."""
    proof = f"Authorization: Bearer {node.token}"
    return [
        (f"GET /?token={node.token}", proof, ""),
        (f"GET /events?token={node.token}", proof, ""),
        (f"POST /control?token={node.token}", proof, PAUSE),
        ("GET /static/page.js", proof, ""),
    ]


async def test_a_name_that_was_pointed_at_this_machine_is_refused() -> None:
    async with served() as node:
        for host in REBOUND:
            for request, proof, body in requests(node):
                status, head, text = await node.ask(
                    request, proof, body=body, host=host.format(port=node.port)
                )
                assert status in (400, 403) and len(text) < 100, (host, request)
                assert "access-control-allow" not in head.lower()
        assert node.told == [] and node.looks == 0


async def test_two_hundred_pages_of_other_origins_are_refused() -> None:
    rng = random.Random(19)
    async with served() as node:
        near = [
            f"http://127.0.0.1:{node.port + 1}",
            f"https://127.0.0.1:{node.port}",
            f"http://localhost:{node.port}",
            "null",
            "file://",
            "",
            f"http://127.0.0.1:{node.port}.evil.example",
            f"http://evil@127.0.0.1:{node.port}",
            f"{node.origin}/",
            "http://127.0.0.1",
        ]
        names = ["".join(rng.choices(string.ascii_lowercase, k=9)) for _ in range(190)]
        for at, origin in enumerate(
            near + [f"{rng.choice(['http', 'https'])}://{name}.example" for name in names]
        ):
            request, proof, body = requests(node)[at % 4]
            status, head, _ = await node.ask(request, proof, f"Origin: {origin}", body=body)
            assert status == 403 and "access-control-allow" not in head.lower(), (origin, request)
        assert node.told == [] and node.looks == 0


async def test_without_the_token_it_says_how_to_get_it_and_shows_nothing() -> None:
    async with served() as node:
        wrong = ("", "x", node.token[:-1], node.token + "x", node.token.swapcase(), "%00", "é")
        for given in wrong:
            for path in ("/", "/events"):
                status, _, text = await node.ask(
                    f"GET {path}?token={given}".encode("ascii", "ignore").decode()
                )
                assert status == 403 and "`swarmd ui`" in text and node.status.name not in text
            status, _, text = await node.ask("POST /control", f"Authorization: Bearer {given}", body=PAUSE)
            assert status == 403 and "`swarmd ui`" in text
        assert (await node.ask("GET /"))[0] == 403
        # A request that changes something must not take its token from the address: a link or a form of
        # another page could send that.
        assert (await node.ask(f"POST /control?token={node.token}", body=PAUSE))[0] == 403
        assert (await node.ask(f"GET /control?token={node.token}"))[0] == 404
        assert node.told == [] and node.looks == 0


async def test_with_the_token_the_page_opens_and_its_buttons_work() -> None:
    async with served() as node:
        status, head, text = await node.ask(f"GET /?token={node.token}")
        assert status == 200 and "brave-otter" in text and node.token not in text
        policy = next(line for line in head.splitlines() if line.startswith("content-security-policy"))
        assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self'" in policy
        assert (
            "referrer-policy: no-referrer" in head
            and "cache-control: no-store" in head
            and "set-cookie" not in head.lower()
        )
        assert (await node.ask("GET /static/page.js"))[0] == 200
        for host in (f"localhost:{node.port}", "localhost:8123"):  # the second through ssh -L
            assert (await node.ask(f"GET /?token={node.token}", host=host))[0] == 200
        proof = f"Authorization: Bearer {node.token}"
        status, _, text = await node.ask("POST /control", proof, f"Origin: {node.origin}", body=PAUSE)
        assert (status, json.loads(text), node.told) == (
            200,
            {"ok": True, "result": {"schema": 1}},
            [("pause", {})],
        )
        before = time.time()
        await node.ask(
            "POST /control", proof, body='{"operation": "pause", "arguments": {"for": 60, "until": 1}}'
        )
        name, arguments = node.told.pop()
        assert (
            name == "pause"
            and set(arguments) == {"until"}
            and before + 60 <= arguments["until"] <= time.time() + 60
        )
        for operation in ("network", "status", "ui", "nothing"):  # of the control API, and not of the page
            _, _, text = await node.ask("POST /control", proof, body=json.dumps({"operation": operation}))
            assert "knows no operation" in json.loads(text)["error"]
        for path in (
            "/static/",
            "/static/..%2fpage.py",
            "/static/../static/page.js",
            "/static/uPlot.LICENSE",
            "/etc/passwd",
            "//x",
        ):
            assert (await node.ask(f"GET {path}"))[0] == 404
        assert len(node.told) == 1


async def test_bytes_that_are_no_request_end_one_connection_and_nothing_else() -> None:
    rng = random.Random(7)
    async with served() as node:
        proof = f"Authorization: Bearer {node.token}"
        assert (
            b" 413 "
            in (
                await node.send(
                    f"POST /control HTTP/1.1\r\nHost: 127.0.0.1\r\n{proof}\r\n\r\n".encode().replace(
                        b"\r\n\r\n", b"\r\nContent-Length: 99999\r\n\r\n"
                    )
                    + b"x" * 99_999
                )
            )[:20]
        )
        assert b" 431 " in (await node.send(b"GET / HTTP/1.1\r\nHost: " + b"a" * 40_000))[:20]
        for junk in (
            b"\x16\x03\x01",
            b"GET\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            *(rng.randbytes(300) + b"\r\n\r\n" for _ in range(20)),
        ):
            assert (await node.send(junk))[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431", b"HTTP/1.1 501", b"")
        assert (await node.ask(f"GET /?token={node.token}"))[0] == 200


async def test_connections_that_say_nothing_leave_room_once_they_are_gone() -> None:
    async with served() as node:
        silent = [await trio.open_tcp_stream("127.0.0.1", node.port) for _ in range(MAX_CONNECTIONS)]
        assert await node.send(REQUEST) == b""  # no room: hung up on
        for stream in silent:
            await stream.aclose()
        with trio.fail_after(TIMEOUT_S):
            while not await node.send(REQUEST):
                await trio.sleep(0.01)


def test_the_page_may_be_asked_by_its_own_origin_alone() -> None:
    for host in ("127.0.0.1:80", "localhost:9", "[::1]:9", "[::1]", "127.0.0.1"):
        assert access.foreign({"host": host}) is None
        assert access.foreign({"host": host, "origin": f"http://{host}"}) is None
        assert access.foreign({"host": host, "origin": "http://127.0.0.1:1"}) is not None
    assert access.foreign({}) is not None
