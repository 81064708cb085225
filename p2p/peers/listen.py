"""Listen addresses, for all engines: finds free ports, and the addresses at which peers can dial us."""

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

# Interfaces of Docker, libvirt, VMware, VirtualBox, Podman and LXC. Other machines cannot dial them.
_BRIDGE: Final = re.compile(r"docker\d+|br-[0-9a-f]{12}|(virbr|vmnet|vboxnet|podman|cni|lxcbr|lxdbr).*")
# Documentation addresses (RFC 5737, 3849), used to look up the route to the internet. Nobody owns them.
SOMEWHERE: Final = (Endpoint("ip4", "192.0.2.1", 9), Endpoint("ip6", "2001:db8::1", 9))


@contextlib.contextmanager
def held_ports(listen: Sequence[Endpoint], own: Sequence[int] = ()) -> Iterator[list[Endpoint]]:
    """Replace each port 0 by a free port, and keep these ports bound inside the `with` block.

    A port 0 becomes the first free port of `own`, else any free port; the same for IPv4 and IPv6 if possible.
    If the machine has no IPv6, /ip6/:: is left out, unless it is the only address.

    The check binds without SO_REUSEPORT, which libraries set and which would let two nodes share a port. On
    Linux the library can listen inside the block, because a bound socket that does not listen does not block
    a socket with SO_REUSEADDR. Other systems refuse that, so there the ports are released first.

    Raises:
        CannotListen: a port is taken, or an address cannot be used.
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
    """Return the addresses to dial for listen addresses: replace 0.0.0.0 and :: by this machine's addresses.

    Loopback comes first, then the order of `outward_first`. Bridges to containers and virtual machines are
    left out, and so are temporary IPv6 addresses.
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
    """Sort this machine's addresses, with the source addresses of outgoing internet traffic first."""
    sources = {*map(_source, towards)}
    return sorted(hosts, key=lambda host: (host not in sources, host))


def _passing() -> set[str]:
    """Return the temporary IPv6 addresses, which last a day or a week (RFC 8981); empty except on Linux."""
    try:
        found = [line.split() for line in Path("/proc/net/if_inet6").read_text("ascii").splitlines()]
    except OSError:
        return set()
    # 0x21: the kernel's flags for temporary and deprecated addresses.
    return {
        str(IPv6Address(bytes.fromhex(host))) for host, _, _, _, flags, _ in found if int(flags, 16) & 0x21
    }


def has_route(endpoint: Endpoint) -> bool:
    """Return whether there is a route to this IP address. Names are not looked up and count as reachable."""
    return not endpoint.kind.startswith("ip") or _source(endpoint) is not None


def _source(endpoint: Endpoint) -> str | None:
    """Return our source address for packets to this endpoint; None if there is no route.

    No packet is sent: connecting a UDP socket only looks up the route.
    """
    family = socket.AF_INET6 if endpoint.kind == "ip6" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((endpoint.host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _bound(endpoint: Endpoint, first: Sequence[int], *, needed: bool) -> socket.socket | None:
    """Bind a socket to the endpoint. If its port is 0, try the ports `first` before any free port.

    Returns None if the machine has no IPv6 and the address is not needed.
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
                f"another program is using port {endpoint.port} ({endpoint}). Stop it, or change"
                " swarm.listen: port 0 takes any free port."
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
        # Old connections of a node that was just stopped must not block the port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if six:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((endpoint.host, endpoint.port))
    except OSError:
        bound.close()
        raise
    return bound
