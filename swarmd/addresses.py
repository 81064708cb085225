"""The form of the addresses an operator types. Nothing is resolved or dialled.

A multiaddress names a transport in parts (github.com/multiformats/multiaddr): /ip4/192.0.2.7/tcp/4001/p2p/<peer id>.
"""

import re
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import urlsplit

_PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")  # base58 of an Ed25519 public key in libp2p's form
_HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*\.?")


def _port(address: str) -> int:
    """The port of /ip4|ip6|dns|dns4|dns6/<host>/tcp/<port>; ValueError where it is no such multiaddress."""
    parts = address.split("/")
    if len(parts) != 5 or parts[0] or parts[1] not in ("ip4", "ip6", "dns", "dns4", "dns6") or parts[3] != "tcp":
        raise ValueError("it is not of the form /ip4/<address>/tcp/<port>; ip6 and dns go as well")
    if parts[1] == "ip4":
        IPv4Address(parts[2])
    elif parts[1] == "ip6":
        IPv6Address(parts[2])
    elif not _HOST_NAME.fullmatch(parts[2]):
        raise ValueError(f"{parts[2][:40]!r} is not a host name")
    if not re.fullmatch("[0-9]{1,5}", parts[4]) or int(parts[4]) > 65_535:
        raise ValueError(f"{parts[4][:20]!r} is not a port")
    return int(parts[4])


def listen_address(text: str) -> str:
    """`text`, where a node could listen there; else ValueError."""
    if text.startswith("/dns"):
        raise ValueError("a name cannot be listened on; give the address of an interface")
    _port(text)
    return text


def bootstrap_address(text: str) -> str:
    """`text`, where a node could be dialled there: a multiaddress ending in /p2p/<peer id>; else ValueError."""
    address, _, peer_id = text.rpartition("/p2p/")
    if not _PEER_ID.fullmatch(peer_id) or not address:
        raise ValueError("it does not end in /p2p/ and that node's peer id, as its `swarmd status` shows it")
    if _port(address) == 0:
        raise ValueError("port 0 cannot be dialled")
    return text


def web_address(text: str) -> str:
    """`text`, where it is empty or the address of a web service; else ValueError."""
    if text:
        url = urlsplit(text)
        if url.scheme not in ("http", "https") or not url.hostname or url.username is not None or not text.isprintable() or " " in text:
            raise ValueError("it is not of the form http://host:port")
        _ = url.port  # ValueError where it is none
        if url.query or url.fragment:
            raise ValueError("it has a query or a fragment; give the judge's first page")
    return text
