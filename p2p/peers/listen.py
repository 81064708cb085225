"""Listen addresses: finds free ports, and the addresses at which others dial them. For all engines."""

import contextlib
import errno
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import psutil

from p2p.address import Endpoint
from p2p.errors import CannotListen


@contextlib.contextmanager
def held_ports(listen: Sequence[Endpoint]) -> Iterator[list[Endpoint]]:
    """Hold a free port in place of every 0. Raises CannotListen.

    Ports are checked without SO_REUSEPORT, which libraries set and which would let two nodes share a port. On
    Linux no other program is given them meanwhile: a bound socket that does not listen is not in the way of
    one with SO_REUSEADDR, which libraries set. Once it is left, listen at once.
    """
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(_bound(endpoint)).getsockname()[1] for endpoint in listen]
        if sys.platform != "linux":
            stack.close()
        yield [replace(endpoint, port=port) for endpoint, port in zip(listen, ports, strict=True)]


def dialable(addresses: Sequence[str]) -> list[str]:
    """Return listen addresses as others dial them: this machine's own in place of 0.0.0.0 and ::.

    Loopback comes first.
    """
    found: list[str] = []
    for address in addresses:
        parts = address.split("/")
        if parts[2] not in ("0.0.0.0", "::"):  # noqa: S104  # compared, not bound
            found.append(address)
            continue
        family = socket.AF_INET if parts[1] == "ip4" else socket.AF_INET6
        own = {
            item.address
            for items in psutil.net_if_addrs().values()
            for item in items
            if item.family == family
        }
        hosts = sorted(
            (host for host in own if "%" not in host),
            key=lambda host: (host not in ("127.0.0.1", "::1"), host),
        )
        found.extend("/".join([*parts[:2], host, *parts[3:]]) for host in hosts)
    return found


def _bound(endpoint: Endpoint) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if endpoint.kind == "ip6" else socket.AF_INET, socket.SOCK_STREAM)
    # Connections of a node that was just stopped do not count.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((endpoint.host, endpoint.port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise CannotListen(
                f"another program is using port {endpoint.port} ({endpoint}); stop it, or change"
                " swarm.listen, where port 0 takes any free one"
            ) from None
        raise CannotListen(
            f"cannot listen on {endpoint}: {error.strerror}; change swarm.listen, /ip4/0.0.0.0/tcp/0 works"
            " everywhere"
        ) from None
    return bound
