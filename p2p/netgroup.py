"""Network groups: addresses that one attacker gets cheaply count as one. Pure.

A group is a /16 of IPv4 or a /32 of IPv6, as in Bitcoin Core's address manager (netgroup.cpp): thousands of
addresses in one data centre or at one provider are one group, thousands of groups are thousands of providers.
IPv4 inside IPv6 (RFC 4291 2.5.5.2, 3056, 4380, 6052) counts as the IPv4 address. Loopback and all private
networks are one group together, as somebody let those machines in.
"""

import ipaddress
from functools import lru_cache

from p2p.address import parse_endpoint

LOCAL = "local"
# The lowest port that is dialled because a peer names it.
MIN_PORT = 1024
# The group of names. Only the operator gives names, and where they lead is known when they are dialled.
NAME = "name"
_LOCAL = [
    ipaddress.ip_network(text)
    for text in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "::1/128",
        "fc00::/7",
        "fe80::/10",
    )
]
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@lru_cache(maxsize=1 << 14)
def group_of(address: str) -> str | None:
    """Return the group of a multiaddress, or None where nobody can dial it."""
    endpoint = parse_endpoint(address)
    if endpoint is None:
        return None
    return group_of_host(endpoint.host) if endpoint.kind.startswith("ip") else NAME


def share_group_of_host(host: str) -> str | None:
    """Return the group by which shares of what arrives are counted.

    It is `group_of_host`, except that in a local network each machine is its own group: somebody let the
    machine in, but the names on it are as many as it likes.
    """
    group = group_of_host(host)
    return f"{LOCAL} {machine_of_host(host)}" if group == LOCAL else group


@lru_cache(maxsize=1 << 14)
def group_of_host(host: str) -> str | None:
    """Return the group of an IP address.

    None where it is none that a peer can have: multicast, reserved or malformed.
    """
    ip = _ip(host)
    if ip is None or ip.is_multicast or ip.is_unspecified or (ip.version == 4 and ip.is_reserved):
        return None
    if any(ip in network for network in _LOCAL):
        return LOCAL
    return ip.packed[:4].hex() if ip.version == 6 else f"{ip.packed[0]}.{ip.packed[1]}"


def is_public(host: str) -> bool:
    """Return whether this is an IP address on the internet, neither private nor local nor reserved."""
    ip = _ip(host)
    return ip is not None and ip.is_global and group_of_host(host) not in (LOCAL, None)


def on_internet(address: str) -> bool:
    """Return whether a multiaddress, or that of the relay in it, is public and of a port that any user has.

    Nobody can have us dial our own network, or the services of a machine, by naming such.
    """
    endpoint = parse_endpoint(address.split("/p2p/")[0])
    return endpoint is not None and endpoint.port >= MIN_PORT and is_public(endpoint.host)


def machine_of_host(host: str) -> str:
    """Return the part of an address that a machine cannot change by itself.

    That is all of an IPv4 address and the /64 of an IPv6 one (RFC 4291 2.5.4); but all of a link-local one,
    as its /64 is that of every machine on the link. Text that is no address is returned as it is.
    """
    ip = _ip(host)
    if isinstance(ip, ipaddress.IPv6Address) and not ip.is_link_local:
        return ip.packed[:8].hex()
    return host if ip is None else str(ip)


def block_of_host(host: str) -> str | None:
    """Return the /24 of an IPv4 address or the /48 of an IPv6 one, which mostly belong to one site.

    None where it is none that a peer can have.
    """
    ip = _ip(host)
    if ip is None or group_of_host(host) is None:
        return None
    return str(ipaddress.ip_network((ip, 24 if ip.version == 4 else 48), strict=False))


@lru_cache(maxsize=1 << 14)
def only_here(address: str) -> bool:
    """Return whether the address is loopback or link-local, and so names another machine to another peer."""
    endpoint = parse_endpoint(address)
    if endpoint is None or not endpoint.kind.startswith("ip"):
        return False
    ip = ipaddress.ip_address(endpoint.host)
    return ip.is_loopback or ip.is_link_local


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address without its zone; give the IPv4 address where one is embedded in IPv6."""
    try:
        ip = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return None
    return (_inner(ip) or ip) if isinstance(ip, ipaddress.IPv6Address) else ip


def _inner(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if ip in _NAT64:
        return ipaddress.IPv4Address(ip.packed[12:])
    return ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
