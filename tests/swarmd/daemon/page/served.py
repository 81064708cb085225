"""A page served for tests.

The real server and page over documents of the test's choice, and requests byte by byte.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import trio

from swarmd.daemon.local_api.control import Handler
from swarmd.daemon.page.opening import PageOpening
from swarmd.state.status import KnownPeer, PeerList, Status
from tests.swarmd.cli.test_view import PEER, status_of

PEERS = [
    KnownPeer(
        PEER, "brave-otter", f"/ip4/192.0.2.9/tcp/4001/p2p/{PEER}", "inbound", 1.0, 1.0, 7, 2, 5, "tiny"
    )
]


@dataclass
class Events:
    stream: trio.SocketStream
    received: bytes = b""

    async def next(self) -> dict[str, Any]:
        """Return the next event that has data."""
        while True:
            while b"\n\n" not in self.received:
                some = await self.stream.receive_some(1 << 20)
                assert some, "the node hung up"
                self.received += some
            event, _, self.received = self.received.partition(b"\n\n")
            _, data, text = event.partition(b"data: ")
            if data:
                return dict(json.loads(text))


@dataclass
class Node:
    """A stand-in for the daemon: a status that a test may change, and the requests to it."""

    status: Status = field(default_factory=status_of)
    peers: list[KnownPeer] = field(default_factory=lambda: [*PEERS])
    looks: int = 0  # how often the page asked for the status
    told: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    address: str = ""
    invitation: str = "swarm:main,check=89abcdef"

    @property
    def origin(self) -> str:
        return self.address.partition("/?")[0]

    @property
    def port(self) -> int:
        return int(self.origin.rpartition(":")[2])

    @property
    def token(self) -> str:
        return self.address.partition("token=")[2]

    def handlers(self) -> dict[str, Handler]:
        async def status(_: Mapping[str, Any]) -> Status:
            self.looks += 1
            return self.status

        async def peers(_: Mapping[str, Any]) -> PeerList:
            return PeerList(self.peers)

        def told(name: str) -> Handler:
            async def tell(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
                self.told.append((name, arguments))
                return {"schema": 1}

            return tell

        async def invitation(_: Mapping[str, Any]) -> Mapping[str, Any]:
            return {
                "schema": 1,
                "invitation": self.invitation,
                "notes": ["nobody outside this network can dial it"],
            }

        async def compare(_: Mapping[str, Any]) -> Mapping[str, Any]:
            answers = {"now": ["<answer>42</answer>", 1.0], "first": ["<answer>7</answer>", 0.0]}
            return {"schema": 1, "question": "What is 12 + 30?", "round": 120, **answers}

        others = ("pause", "resume", "stop", "network")
        return {"status": status, "peers": peers, "invitation": invitation, "compare": compare} | {
            name: told(name) for name in others
        }

    async def ask(
        self, request: str, *headers: str, body: str = "", host: str | None = None
    ) -> tuple[int, str, str]:
        """Return status, head and body of the answer to "GET /path"; headers are given as "name: value"."""
        lines = [
            f"{request} HTTP/1.1",
            f"Host: {self.origin.removeprefix('http://') if host is None else host}",
            *headers,
        ]
        lines += [f"Content-Length: {len(body.encode())}"] if body else []
        answer = await self.send("\r\n".join([*lines, "", body]).encode("latin-1"))
        head, _, text = answer.decode().partition("\r\n\r\n")
        return int(head.split()[1]), head, text

    async def send(self, data: bytes) -> bytes:
        """Return the server's bytes until it hangs up."""
        answer = bytearray()
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(data)
            # It may hang up before it has read all, and its answer is there to read
            with contextlib.suppress(trio.BrokenResourceError):
                async for some in stream:
                    answer += some
        return bytes(answer)

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator["Events"]:
        """Yield the page's events."""
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            await stream.send_all(
                f"GET /events?token={self.token} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n\r\n".encode()
            )
            yield Events(stream)


@contextlib.asynccontextmanager
async def served(node: Node | None = None) -> AsyncIterator[Node]:
    node = node or Node()
    async with trio.open_nursery() as nursery:
        opening = PageOpening(nursery, node.handlers())
        node.address = (await opening.on_ui({}))["address"]
        # One server, however often it is asked for
        assert (await opening.on_ui({}))["address"] == node.address
        yield node
        nursery.cancel_scope.cancel()
