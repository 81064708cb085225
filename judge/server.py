"""Runs the judge under uvicorn, with deadlines for slow clients and a clean shutdown.

    open_service       the evaluation: open questions, store, verifier, receipts (judge/evaluation/)
    create_app         HTTP over it: signed requests, public reading, pages (judge/app.py)
    PatientProtocol    deadlines of a connection, which uvicorn lacks; `SlowReaders` bounds their number
    JudgeServer        uvicorn, which says when it listens and how it was stopped

Arrows go down: server → app → service → store. The service knows no HTTP; the app keeps no state of its own
but rate limits.
"""

import asyncio
import contextlib
import gc
import resource
import signal
import socket
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from types import FrameType
from typing import Generic, TypeVar

import h11
import uvicorn
from sqlalchemy.exc import SQLAlchemyError
from uvicorn.protocols.http.h11_impl import H11Protocol

from judge import config
from judge.app import create_app
from judge.config import JudgeSettings
from judge.errors import DatabaseUnusable, JudgeCannotListen
from judge.evaluation.service import open_service
from judge.types import network_of
from swarmd.terminal import hang_up

R = TypeVar("R", bound=Hashable)


class SlowReaders(Generic[R]):
    """Connections with a response that is not yet read.

    Limited per network and in all, so memory is bounded.
    """

    def __init__(self, of_a_network: int, of_all: int) -> None:
        self._of_a_network, self._of_all = of_a_network, of_all
        # Slow readers and their networks, the longest waiting first.
        self._networks: OrderedDict[R, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._networks)

    def begin(self, reader: R, network: str) -> R | None:
        """Note that `reader` is slow from now on.

        Returns the reader to cut off, if any: the longest waiting of its network, or of all.
        """
        if reader in self._networks:
            return None
        self._networks[reader] = network
        near = [other for other, theirs in self._networks.items() if theirs == network]
        if len(near) > self._of_a_network:
            return self._drop(near[0])
        return self._drop(next(iter(self._networks))) if len(self._networks) > self._of_all else None

    def end(self, reader: R) -> None:
        self._networks.pop(reader, None)

    def _drop(self, reader: R) -> R:
        del self._networks[reader]
        return reader


# For answers under way when the judge is stopped.
GRACE_S = 3
# More than asyncio takes between accepting a connection and telling its protocol: two turns of its loop.
ACCEPTED_S = 0.05


class PatientProtocol(H11Protocol):
    """HTTP protocol with deadlines, which uvicorn lacks.

    A connection is cut after REQUEST_S without a whole request (slow loris), after RESPONSE_S without a
    response, after TAKE_S with a response that the client does not read, and if too many clients read slowly
    at once.
    """

    request_seconds = config.REQUEST_S
    response_seconds = config.RESPONSE_S
    take_seconds = config.TAKE_S
    readers: SlowReaders["PatientProtocol"]
    _patience: asyncio.TimerHandle | None = None
    _taking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's own
        super().connection_made(transport)
        if self.client is not None:
            # As --proxy names it: a socket of both families gives an IPv4 address as one of IPv6.
            self.client = self.client[0].removeprefix("::ffff:"), self.client[1]
        # We are told of whatever the system's own buffer does not take at once.
        transport.set_write_buffer_limits(high=0)
        self._wait(self.request_seconds)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taking = self.loop.call_later(self.take_seconds, self.transport.abort)
        cut = self.readers.begin(self, network_of(self.client[0] if self.client else ""))
        if cut is not None:
            cut.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def _taken(self) -> None:
        self.readers.end(self)
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self.cycle.scope["extensions"] = {config.TIMEOUT_EXTENSION: {"wait": self._wait}}
        self._watch()

    def on_response_complete(self) -> None:
        self._stop_waiting()
        # This may start the next request at once, where two were sent together.
        super().on_response_complete()
        if self.cycle.response_complete:
            # Idle: uvicorn's own timeout_keep_alive runs until the next byte.
            return
        self._watch()

    def _watch(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self.conn.their_state in (h11.DONE, h11.MUST_CLOSE):
            self._wait(self.response_seconds)
        elif self._patience is None:
            # A running clock is never set back: bytes that trickle in buy no time.
            self._wait(self.request_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._taken()
        super().connection_lost(exc)

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class JudgeServer(uvicorn.Server):
    """A uvicorn server that says when it listens, and returns after SIGTERM or Ctrl-C."""

    interrupted = False

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections until none is left.

        uvicorn looks for them only once. One that is accepted in that moment is not among them, and would
        hold up the end.
        """
        for server in self.servers:
            server.close()
        await asyncio.sleep(ACCEPTED_S)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        ends = (signal.SIGINT, signal.SIGTERM, *hang_up())
        before = {number: signal.signal(number, self._stop) for number in ends}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self.interrupted = self.interrupted or number == signal.SIGINT
        # A second Ctrl-C does not wait.
        self.force_exit = self.should_exit and number == signal.SIGINT
        self.should_exit = True


def serve(settings: JudgeSettings, announce: Callable[[str], None]) -> bool:
    """Serve until SIGTERM or Ctrl-C; `announce` gets the URL once requests are answered.

    Returns whether it was Ctrl-C. Raises OperatorError.
    """
    _allow_connections()
    with listening_socket(settings.host, settings.port) as listener:
        try:
            return asyncio.run(_serve(settings, listener, announce))
        except (SQLAlchemyError, sqlite3.Error) as error:
            # This is raised while the judge starts; later a peer is told.
            why = getattr(error, "orig", None) or error
            raise DatabaseUnusable(
                f"the judge cannot start, as its database fails: {why}; free some space,"
                " restore a backup, or see its server"
            ) from None


async def _serve(settings: JudgeSettings, listener: socket.socket, announce: Callable[[str], None]) -> bool:
    class Protocol(PatientProtocol):
        readers = SlowReaders(config.SLOW_READERS_OF_A_NETWORK, config.SLOW_READERS)

    async with open_service(settings) as service:
        options = uvicorn.Config(
            create_app(service),
            http=Protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            # It warns of each request that is none.
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=bool(settings.proxy),
            forwarded_allow_ips=list(settings.proxy),
            limit_concurrency=config.CONNECTIONS,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=GRACE_S,
            h11_max_incomplete_event_size=16 * 1024,
        )
        # Objects that exist by now are not collected: going through them takes 0.1 s and more, every 10 s
        # under load.
        gc.freeze()
        server = JudgeServer(options, lambda: announce(url_of(listener)))
        await server.serve(sockets=[listener])
        return server.interrupted


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind a socket that does not listen yet. Raises JudgeCannotListen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        # socket.gaierror is one of these.
        raise JudgeCannotListen(
            f"{host} is not an address of this machine: {error.strerror}; give another one with --host"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise JudgeCannotListen(
            f"cannot listen on {host} port {port}: {error.strerror}; give another --port (0 takes any free"
            " one) or --host"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the address to reach this socket by from the same machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - it is read, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _allow_connections() -> None:
    """Allow as many open files as CONNECTIONS need, where the system lets us.

    1,024 is a common default, and half-open connections add up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.CONNECTIONS + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE,
                (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard),
            )
