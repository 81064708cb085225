"""Network groups: addresses that one attacker can get cheaply form one group. Pure.

A group is a /16 of IPv4 or a /32 of IPv6, as in Bitcoin Core's address manager (netgroup.cpp). Thousands of
addresses at one provider are usually one group, while thousands of groups take many providers. IPv4 inside
IPv6 (RFC 4291 2.5.5.2, 3056, 4380, 6052) counts as the IPv4 address. Loopback and all private networks are
one group, because somebody has let those machines into the local network.
"""

import ipaddress
from functools import lru_cache

from p2p.address import parse_endpoint

LOCAL = "local"
# The lowest port that we dial if only a peer named it.
MIN_PORT = 1024
# The group of host names. Only the operator gives names; they are resolved when they are dialled.
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
    """Return the group of a multiaddress, or None if nobody can dial it."""
    if (endpoint := parse_endpoint(address)) is None:
        return None
    return group_of_host(endpoint.host) if endpoint.kind.startswith("ip") else NAME


def share_group_of_host(host: str) -> str | None:
    """Return the group of a host for fair shares of incoming frames.

    It is `group_of_host`, except that each machine of a local network is a separate group. Somebody let that
    machine in, but it can make as many keys as it likes.
    """
    group = group_of_host(host)
    return f"{LOCAL} {machine_of_host(host)}" if group == LOCAL else group


@lru_cache(maxsize=1 << 14)
def group_of_host(host: str) -> str | None:
    """Return the group of an IP address.

    None if no peer can have the address: it is multicast, unspecified, reserved or malformed.
    """
    ip = _ip(host)
    if ip is None or ip.is_multicast or ip.is_unspecified or (ip.version == 4 and ip.is_reserved):
        return None
    if any(ip in network for network in _LOCAL):
        return LOCAL
    return ip.packed[:4].hex() if ip.version == 6 else f"{ip.packed[0]}.{ip.packed[1]}"


def is_public(host: str) -> bool:
    """Return whether this is an IP address of the internet: not private, local or reserved."""
    return (ip := _ip(host)) is not None and ip.is_global and group_of_host(host) not in (LOCAL, None)


def on_internet(address: str) -> bool:
    """Return whether the multiaddress, or its relay's, has a public host and an unprivileged port.

    So a peer cannot make us dial our own network or a machine's system services by naming them.
    """
    endpoint = parse_endpoint(address.split("/p2p/")[0])
    return endpoint is not None and endpoint.port >= MIN_PORT and is_public(endpoint.host)


def machine_of_host(host: str) -> str:
    """Return the part of an address that a machine cannot change by itself.

    This is a whole IPv4 address, or the /64 of an IPv6 address (RFC 4291 2.5.4). A link-local IPv6 address
    counts whole, because all machines on the link share one /64. Text that is no address is returned
    unchanged.
    """
    if isinstance(ip := _ip(host), ipaddress.IPv6Address) and not ip.is_link_local:
        return ip.packed[:8].hex()
    return host if ip is None else str(ip)


def block_of_host(host: str) -> str | None:
    """Return the /24 of an IPv4 address or the /48 of an IPv6 address; mostly one site has the whole block.

    None if no peer can have the address.
    """
    if (ip := _ip(host)) is None or group_of_host(host) is None:
        return None
    return str(ipaddress.ip_network((ip, 24 if ip.version == 4 else 48), strict=False))


@lru_cache(maxsize=1 << 14)
def only_here(address: str) -> bool:
    """Return whether the address is loopback or link-local, so it leads each peer to a different machine."""
    if (endpoint := parse_endpoint(address)) is None or not endpoint.kind.startswith("ip"):
        return False
    ip = ipaddress.ip_address(endpoint.host)
    return ip.is_loopback or ip.is_link_local


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address, ignoring its zone. If IPv6 embeds an IPv4 address, return that."""
    try:
        ip = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return None
    if not isinstance(ip, ipaddress.IPv6Address):
        return ip
    if ip in _NAT64:
        return ipaddress.IPv4Address(ip.packed[12:])
    return ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else ip)
