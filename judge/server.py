"""Run the judge under uvicorn, with a clean shutdown.

    open_service       the evaluation: open questions, store, verifier, receipts (judge/evaluation/)
    create_app         HTTP over it: signed requests, public reading, pages (judge/app.py)
        JudgeServer        uvicorn, which reports that it listens and whether Ctrl-C stopped it

Calls go downwards: server → app → service → store. The service knows no HTTP; the app keeps no state except
rate limits. uvicorn limits the number of connections; the reverse proxy of docs/judge.md drops slow clients.
"""

import asyncio
import contextlib
import gc
import resource
import signal
import socket
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_address, ip_network
from types import FrameType

import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from judge import config
from judge.app import create_app
from judge.errors import JudgeError
from judge.evaluation.service import open_service
from swarmd.terminal import hang_up

# Seconds for answers in progress when the judge is stopped.
GRACE_S = 3
# Longer than asyncio needs between accepting a connection and telling its protocol: two turns of its loop.
ACCEPTED_S = 0.05


class JudgeServer(uvicorn.Server):
    """A uvicorn server that reports when it listens, and returns after SIGTERM or Ctrl-C."""

    interrupted = False

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections until none is left.

        uvicorn lists its connections only once. A connection that is accepted at that moment is not on the
        list and would delay the shutdown, so the listeners are closed first.
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
        # A second Ctrl-C ends the server without waiting.
        self.force_exit = self.should_exit and number == signal.SIGINT
        self.should_exit = True


def serve(settings: config.JudgeSettings, announce: Callable[[str], None]) -> bool:
    """Serve until SIGTERM or Ctrl-C; `announce` gets the URL once requests are answered.

    Returns whether it was Ctrl-C. Raises OperatorError.
    """
    _allow_connections()
    with listening_socket(settings.host, settings.port) as listener:
        try:
            return asyncio.run(_serve(settings, listener, announce))
        except (SQLAlchemyError, sqlite3.Error) as error:
            # Raised only while the judge starts; later a failure becomes a refusal to the peer.
            why = getattr(error, "orig", None) or error
            raise JudgeError(
                f"the judge cannot start, as its database fails: {why}. Free some space,"
                " restore a backup, or see its server."
            ) from None


async def _serve(
    settings: config.JudgeSettings, listener: socket.socket, announce: Callable[[str], None]
) -> bool:
    async with open_service(settings) as service:
        options = uvicorn.Config(
            create_app(service),
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            # uvicorn warns of every request that is not HTTP.
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=bool(settings.proxy),
            forwarded_allow_ips=in_both_families(settings.proxy),
            limit_concurrency=config.CONNECTIONS,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=GRACE_S,
            h11_max_incomplete_event_size=16 * 1024,
        )
        # The garbage collector skips the objects that exist by now: scanning them takes 0.1 s and more, every
        # 10 s under load.
        gc.freeze()
        server = JudgeServer(options, lambda: announce(url_of(listener)))
        await server.serve(sockets=[listener])
        return server.interrupted


def in_both_families(proxies: Sequence[str]) -> list[str]:
    """Return the proxies' addresses in both forms: an IPv6 socket reports 192.0.2.7 as `::ffff:192.0.2.7`."""
    networks = [ip_network(proxy) for proxy in proxies if proxy != "*"]
    return [
        *proxies,
        *(f"::ffff:{each.network_address}/{96 + each.prefixlen}" for each in networks if each.version == 4),
    ]


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind a socket that does not listen yet. Raises JudgeError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        # Includes socket.gaierror.
        raise JudgeError(
            f"{host} is not an address of this machine: {error.strerror}. Give another one with --host."
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise JudgeError(
            f"cannot listen on {host} port {port}: {error.strerror}. Give another --port (0 takes any free"
            " one) or --host."
        ) from None
    return listener


def reach(host: str) -> str:
    """Describe which machines can reach a judge that listens at this host."""
    ip = ip_address(socket.getaddrinfo(host, None)[0][4][0])
    if ip.is_loopback:
        return "Only this machine reaches it."
    where = "every address of this machine" if ip.is_unspecified else host
    return f"It listens at {where}: every machine that reaches it can use it, without TLS (docs/judge.md)."


def url_of(listener: socket.socket) -> str:
    """Return the URL of this socket for the same machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - it is read, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _allow_connections() -> None:
    """Raise the limit of open files to the number that CONNECTIONS needs, if the system allows it.

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
