"""Opens the node's page when `swarmd ui` asks for it, and /metrics where the configuration names an address.

The server is loaded only then. "Try it" on the page has the trainer answer a question with today's weights
and with the first.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from swarmd import link
from swarmd.daemon.local_api.control import Handler
from swarmd.errors import SwarmdError

if TYPE_CHECKING:
    from swarmd.daemon.page.http import Respond

HOST = "127.0.0.1"
LOOPBACK = (HOST, "localhost", "::1")


class PageOpening:
    """Answers "ui" of the control API.

    It starts the page's server at the first call, and returns its address at each.
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
        """Serve /metrics at "host:port". Raises SwarmdError where the node cannot listen there."""
        from swarmd.daemon.page.page import metrics_at

        host, port = split_address(address)
        anybody = host not in LOOPBACK
        await self._serve(metrics_at(self._handlers["status"], anybody=anybody), host, port)

    async def _serve(self, respond: "Respond", host: str, port: int) -> int:
        from swarmd.daemon.page.http import serve

        listeners = await listen(host, port)
        self._nursery.start_soon(serve, respond, listeners)
        return int(listeners[0].socket.getsockname()[1])


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


async def listen(host: str, port: int) -> list[trio.SocketListener]:
    """Listen at a TCP port; 0: any free one. Raises SwarmdError."""
    try:
        return list(await trio.open_tcp_listeners(port, host=host))
    except OSError as error:
        raise SwarmdError(
            f"{host}:{port}: cannot listen there: {error.strerror or error}. Choose another address or port."
        ) from None


# A round of a large model may take as long.
ANSWER_TIMEOUT_S: Final = 900.0


class Comparison:
    """Answers "compare" of the control API. One at a time: who asks meanwhile gets the same answer.

    why_not: why the trainer cannot answer now; "" where it can.
    """

    def __init__(self, tell: Callable[[link.ToTrainer], None], why_not: Callable[[], str]) -> None:
        self._tell, self._why_not = tell, why_not
        self._answer: link.ComparedAnswers | None = None
        self._answered: trio.Event | None = None

    async def on_compare(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if why := self._why_not():
            raise SwarmdError(why)
        if self._answered is None:
            self._answered = trio.Event()
            self._tell(link.CompareRequest())
        answered = self._answered
        with trio.move_on_after(ANSWER_TIMEOUT_S):
            await answered.wait()
        if self._answer is None or not answered.is_set():
            if self._answered is answered:
                self._answered = None
            raise SwarmdError("The trainer did not answer in time. Ask again after its round.")
        return {"schema": 1, **msgspec.to_builtins(self._answer)}

    def ask_again(self) -> None:
        """Ask a trainer that was restarted, where the one before has not answered."""
        if self._answered is not None:
            self._tell(link.CompareRequest())

    def answer(self, answer: link.ComparedAnswers) -> None:
        self._answer = answer
        if self._answered is not None:
            self._answered.set()
            self._answered = None
