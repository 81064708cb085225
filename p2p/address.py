"""TCP multiaddresses. Pure; does not import libp2p, so that a configuration can be checked quickly.

Grammar (github.com/multiformats/multiaddr): /ip4|ip6|dns|dns4|dns6/<host>/tcp/<port>, then optionally
/p2p/<peer id>.
"""

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from p2p.errors import BadAddress
from p2p.identity import peer_id_of, public_key_of
from p2p.types import PeerId

EXAMPLE = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
# Allows _, because names of containers have it, although host names should not.
_DNS_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
# Below the ports of outgoing connections: 32768 and up on Linux, 49152 and up on other systems.
OWN_PORTS: Final = range(10_000, 30_000)
# Length of a packed address -> length of the IP address in it. The two long forms lead through a relay.
PACKED_BYTES: Final = {6: 4, 18: 16, 38: 4, 50: 16}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A TCP host and port to dial or to listen at. `str()` gives its multiaddress without a peer id."""

    kind: str  # ip4, ip6, dns, dns4 or dns6
    host: str
    port: int

    def __str__(self) -> str:
        return f"/{self.kind}/{self.host}/tcp/{self.port}"


def own_ports(peer: PeerId) -> list[int]:
    """Return the four ports that a node tries to listen at, in this order.

    They are derived from its peer id. So a node has the same port after a restart or on another machine, and
    two nodes on one machine have different ports.
    """
    drawn = hashlib.sha256(f"swarmd port {peer}".encode()).digest()
    return [OWN_PORTS[int.from_bytes(drawn[at : at + 8], "big") % len(OWN_PORTS)] for at in range(0, 32, 8)]


def parse_bootstrap(text: str) -> tuple[PeerId, Endpoint]:
    """Parse the address of a bootstrap node into its peer id and endpoint.

    Raises:
        BadAddress: the text is malformed; the message has an example.
    """
    try:
        return _bootstrap(text)
    except ValueError as error:
        raise BadAddress(f"{text!r} is not a bootstrap address: {error}. Write it like {EXAMPLE}") from None


def parse_listen(text: str) -> Endpoint:
    """Parse an address to listen at.

    Raises:
        BadAddress: the text is malformed; the message has an example.
    """
    try:
        return _listen(text)
    except ValueError as error:
        raise BadAddress(
            f"{text!r} is not a listen address: {error}. Write it like /ip4/0.0.0.0/tcp/4001"
        ) from None


def parse_endpoint(text: str) -> Endpoint | None:
    """Parse an address that another peer sent. Never raises.

    Returns None if it is no TCP address, cannot be dialled, or leads through a relay.
    """
    if "/p2p-circuit" in text:
        # The host and port of such an address are the relay's, not the peer's.
        return None
    try:
        endpoint = _endpoint(text.split("/p2p/")[0].split("/"))
    except ValueError:
        return None
    unspecified = endpoint.kind.startswith("ip") and ipaddress.ip_address(endpoint.host).is_unspecified
    return None if unspecified or endpoint.port == 0 else endpoint


def packed(address: str) -> bytes:
    """Encode a multiaddress as IP address, port and, if it leads through a relay, the relay's key.

    The result has 6, 18, 38 or 50 bytes, or none if the address has another form.
    """
    direct, _, relay = address.removesuffix("/p2p-circuit").partition("/p2p/")
    if (endpoint := parse_endpoint(direct)) is None or not endpoint.kind.startswith("ip"):
        return b""
    key = public_key_of(relay) if relay else b""
    return ipaddress.ip_address(endpoint.host).packed + endpoint.port.to_bytes(2, "big") + key


def unpacked(raw: bytes) -> str:
    """Decode the result of `packed`. Raises KeyError on any other length."""
    cut = PACKED_BYTES[len(raw)]
    host, port, key = ipaddress.ip_address(raw[:cut]), raw[cut : cut + 2], raw[cut + 2 :]
    direct = f"/ip{host.version}/{host}/tcp/{int.from_bytes(port, 'big')}"
    return f"{direct}/p2p/{peer_id_of(key)}/p2p-circuit" if key else direct


def _bootstrap(text: str) -> tuple[PeerId, Endpoint]:
    if len(parts := text.split("/")) != 7 or parts[5] != "p2p":
        raise ValueError("it must end in /p2p/<peer id>")
    public_key_of(parts[6])
    endpoint = _endpoint(parts[:5])
    if endpoint.port == 0:
        raise ValueError("nobody can dial port 0")
    return PeerId(parts[6]), endpoint


def _listen(text: str) -> Endpoint:
    endpoint = _endpoint(text.split("/"))
    if not endpoint.kind.startswith("ip"):
        raise ValueError("it must be an IP address, not a name")
    return endpoint


def _endpoint(parts: list[str]) -> Endpoint:
    if len(parts) != 5 or parts[0] != "" or parts[3] != "tcp":
        raise ValueError("only TCP addresses are supported")
    kind, host, port = parts[1], parts[2], parts[4]
    if kind == "ip4":
        host = str(ipaddress.IPv4Address(host))
    elif kind == "ip6":
        host = str(ipaddress.IPv6Address(host))
    elif kind not in ("dns", "dns4", "dns6"):
        raise ValueError(f"/{kind} is not supported; use /ip4, /ip6 or /dns")
    elif len(host) > 253 or not _DNS_NAME.fullmatch(host):
        raise ValueError(f"{host!r} is not a host name")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{port!r} is not a port")
    return Endpoint(kind, host, int(port))
