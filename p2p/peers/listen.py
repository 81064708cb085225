"""Listen addresses: finds free ports, and the addresses at which others dial them. For all engines."""

import contextlib
import errno
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from ipaddress import IPv6Address
from pathlib import Path
from typing import Final

import psutil

from p2p.address import Endpoint
from p2p.errors import AddressMissing, CannotListen

# Interfaces of Docker, libvirt, VMware, VirtualBox, Podman and LXC: no other machine can dial them.
_BRIDGE: Final = re.compile(r"docker\d+|br-[0-9a-f]{12}|(virbr|vmnet|vboxnet|podman|cni|lxcbr|lxdbr).*")
# Addresses of the internet, as far as routes go: they are for documents, and nobody has them.
SOMEWHERE: Final = (Endpoint("ip4", "192.0.2.1", 9), Endpoint("ip6", "2001:db8::1", 9))


@contextlib.contextmanager
def held_ports(listen: Sequence[Endpoint], own: Sequence[int] = ()) -> Iterator[list[Endpoint]]:
    """Hold a port in place of every 0, the same for IPv4 and IPv6 if it can be. Raises CannotListen.

    It is the first of `own` that is free, else any free one. /ip6/:: beside other addresses is left out on a
    machine without IPv6.

    Ports are checked without SO_REUSEPORT, which libraries set and which would let two nodes share a port. On
    Linux no other program is given them meanwhile: a bound socket that does not listen is not in the way of
    one with SO_REUSEADDR, which libraries set. Once it is left, listen at once.
    """
    with contextlib.ExitStack() as stack:
        held: list[Endpoint] = []
        for endpoint in listen:
            beside = next((one.port for one in held if one.kind != endpoint.kind), 0)
            bound = _bound(endpoint, [*filter(None, [beside]), *own], needed=len(listen) == 1)
            if bound is not None:
                held.append(replace(endpoint, port=stack.enter_context(bound).getsockname()[1]))
        if sys.platform != "linux":
            stack.close()
        yield held


def dialable(addresses: Sequence[str]) -> list[str]:
    """Return listen addresses as others dial them: this machine's own in place of 0.0.0.0 and ::.

    Loopback comes first, then what `outward_first` says. Those of bridges to containers and virtual machines
    are left out, and those that will soon be gone.
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
            for name, items in psutil.net_if_addrs().items()
            for item in items
            if item.family == family and not _BRIDGE.fullmatch(name)
        }
        hosts = sorted(
            outward_first(host for host in own - _passing() if "%" not in host),
            key=lambda host: host not in ("127.0.0.1", "::1"),
        )
        found.extend("/".join([*parts[:2], host, *parts[3:]]) for host in hosts)
    return found


def outward_first(hosts: Iterable[str], towards: Sequence[Endpoint] = SOMEWHERE) -> list[str]:
    """Sort this machine's addresses: first those that what it sends to the internet comes from."""
    sources = {*map(_source, towards)}
    return sorted(hosts, key=lambda host: (host not in sources, host))


def _passing() -> set[str]:
    """Return IPv6 addresses that this machine drops after a day or a week (RFC 8981). Linux alone says so."""
    try:
        found = [line.split() for line in Path("/proc/net/if_inet6").read_text("ascii").splitlines()]
    except OSError:
        return set()
    # The kernel's flags: temporary, deprecated.
    return {
        str(IPv6Address(bytes.fromhex(host))) for host, _, _, _, flags, _ in found if int(flags, 16) & 0x21
    }


def has_route(endpoint: Endpoint) -> bool:
    """Return whether there is a route to this IP address; where a name leads is not looked up."""
    return not endpoint.kind.startswith("ip") or _source(endpoint) is not None


def _source(endpoint: Endpoint) -> str | None:
    """Return the address that what is sent there comes from; None: there is no route.

    Sends nothing: connecting a UDP socket only looks a route up.
    """
    family = socket.AF_INET6 if endpoint.kind == "ip6" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((endpoint.host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _bound(endpoint: Endpoint, first: Sequence[int], *, needed: bool) -> socket.socket | None:
    """Bind a socket there, in place of port 0 at one of `first` that is free.

    Returns None where the machine has no IPv6 and the address is not needed.
    """
    try:
        for port in first if endpoint.port == 0 else ():
            with contextlib.suppress(OSError):
                return _open(replace(endpoint, port=port))
        return _open(endpoint)
    except OSError as error:
        if not needed and endpoint.host == "::" and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            return None
        if error.errno == errno.EADDRINUSE:
            raise CannotListen(
                f"another program is using port {endpoint.port} ({endpoint}); stop it, or change"
                " swarm.listen, where port 0 takes any free one"
            ) from None
        kind = AddressMissing if error.errno == errno.EADDRNOTAVAIL else CannotListen
        raise kind(
            f"cannot listen on {endpoint}: {error.strerror}; change swarm.listen, /ip4/0.0.0.0/tcp/0 works"
            " everywhere"
        ) from None


def _open(endpoint: Endpoint) -> socket.socket:
    six = endpoint.kind == "ip6"
    bound = socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Connections of a node that was just stopped do not count.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if six:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((endpoint.host, endpoint.port))
    except OSError:
        bound.close()
        raise
    return bound
