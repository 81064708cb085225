"""Opens the node's page if `swarmd ui` asks for it, and /metrics if the configuration sets an address.

The HTTP server is imported only then.
"""

import errno
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import trio

from swarmd.daemon.local_api.control import Handler
from swarmd.errors import SwarmdError, Unreachable

if TYPE_CHECKING:
    from swarmd.daemon.page.http import Respond

HOST = "127.0.0.1"
LOOPBACK = (HOST, "localhost", "::1")


class PageOpening:
    """Answers "ui" of the control API.

    The first call starts the page's server; every call returns its address.
    """

    def __init__(self, nursery: trio.Nursery, handlers: Mapping[str, Handler]) -> None:
        self._nursery, self._handlers = nursery, handlers
        self._address: str | None = None
        self._lock = trio.Lock()

    async def on_ui(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        from swarmd.daemon.page.page import NodePage

        async with self._lock:
            if self._address is None:
                page = NodePage(self._handlers)
                port = await self._serve(page.respond, HOST, 0)
                self._address = f"http://{HOST}:{port}/?token={page.token}"
        return {"schema": 1, "address": self._address}

    async def serve_metrics(self, address: str) -> None:
        """Serve /metrics at "host:port". Raises SwarmdError if the node cannot listen there."""
        from swarmd.daemon.page.page import metrics_at

        host, port = split_address(address)
        await self._serve(metrics_at(self._handlers["status"], anybody=host not in LOOPBACK), host, port)

    async def _serve(self, respond: "Respond", host: str, port: int) -> int:
        from swarmd.daemon.page.http import serve

        listeners = await listen(host, port, "metrics.listen")
        self._nursery.start_soon(serve, respond, listeners)
        return int(listeners[0].socket.getsockname()[1])


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" into host and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


async def listen(host: str, port: int, setting: str = "--listen") -> list[trio.SocketListener]:
    """Listen at a TCP port; 0 means any free one. Raises SwarmdError, which names the setting."""
    try:
        return list(await trio.open_tcp_listeners(port, host=host))
    except OSError as error:
        # A service restarts after Unreachable (network or name server may be late), not after SwarmdError.
        kind = Unreachable if error.errno in (errno.EADDRNOTAVAIL, socket.EAI_AGAIN) else SwarmdError
        raise kind(
            f"{setting}: {host}:{port}: cannot listen there: {error.strerror or error}. Choose another"
            " address or port."
        ) from None
