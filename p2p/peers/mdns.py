"""Discovery on the local network by multicast DNS, as in libp2p (github.com/libp2p/specs, discovery/mdns.md).

A node announces the service `_p2p._udp.local` under a random name. The TXT record has a string
`dnsaddr=<multiaddress>` for each of the node's addresses on this network, and `swarmd=<16 hex digits>` for
each of its swarms (a bootstrap node has several). It contains no swarm's name and no public address.

Announcements are not signed: every machine on the network can send any. So we only dial addresses on networks
that this machine is in, and the peer that answers must prove its key.
"""

import contextlib
import ipaddress
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256

import psutil
import trio
import zeroconf

from p2p.address import parse_bootstrap, parse_endpoint
from p2p.errors import BadAddress
from p2p.topic import Topic
from p2p.types import PeerId

SERVICE = "_p2p._udp.local."
# Maximum number of addresses of one node.
MAX_ADDRESSES = 8
# Seconds between two checks whether our addresses have changed.
CHECK_EVERY_S = 15.0
# The wait after a failure.
TRY_AGAIN_S = 300.0
CLOSE_TIMEOUT_S = 5.0
# Timeout for the records of an announced service.
ANSWER_TIMEOUT_MS = 3000
# Longest string of a TXT record (RFC 1035, 3.3.14).
_MAX_TEXT_BYTES = 255

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

log = logging.getLogger(__name__)


def swarm_tag(topic: Topic) -> str:
    """Return the digest that identifies a swarm in announcements. It does not reveal the swarm's name."""
    return sha256(b"swarmd mdns:" + topic.swarm_id).hexdigest()[:16]


def text_of(tags: Sequence[str], addresses: Sequence[str]) -> bytes:
    """Return the data of the TXT record: length-prefixed strings."""
    strings = [
        *(f"swarmd={tag}" for tag in tags),
        *(f"dnsaddr={address}" for address in addresses[:MAX_ADDRESSES]),
    ]
    return b"".join(
        bytes([len(data)]) + data for text in strings if len(data := text.encode()) <= _MAX_TEXT_BYTES
    )


def read_text(
    data: bytes, tags: Sequence[str], networks: Sequence[Network]
) -> tuple[PeerId, list[str]] | None:
    """Parse an announcement into the peer and its addresses on our networks.

    None if it is malformed, or names none of our swarms.
    """
    strings: list[bytes] = []
    at = 0
    while at < len(data):
        strings.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    if not any(f"swarmd={tag}".encode() in strings for tag in tags):
        return None
    found: dict[PeerId, list[str]] = {}
    for text in strings[: 4 * MAX_ADDRESSES]:
        # Skip other programs' addresses of other transports.
        with contextlib.suppress(BadAddress, UnicodeDecodeError):
            if text.startswith(b"dnsaddr="):
                peer, endpoint = parse_bootstrap(text[len(b"dnsaddr=") :].decode("ascii"))
                if endpoint.kind in ("ip4", "ip6") and any(
                    ipaddress.ip_address(endpoint.host) in network for network in networks
                ):
                    found.setdefault(peer, []).append(str(endpoint))
    return next(iter(found.items())) if len(found) == 1 else None


def own_networks() -> dict[str, Network]:
    """Return this machine's addresses and their networks, except loopback and link-local ones."""
    found: dict[str, Network] = {}
    for item in (item for items in psutil.net_if_addrs().values() for item in items):
        if item.family in (socket.AF_INET, socket.AF_INET6) and item.netmask:
            # The prefix length of a netmask such as 255.255.255.0 or ffff:ffff::.
            bits = int(ipaddress.ip_address(item.netmask)).bit_count()
            network = ipaddress.ip_network(f"{item.address.split('%')[0]}/{bits}", strict=False)
            if not network.is_loopback and not network.is_link_local:
                found[item.address.split("%")[0]] = network
    return found


class Mdns:
    """Announces this node and listens for other nodes.

    heard: called with each announced member and its addresses.
    """

    def __init__(
        self,
        topics: Sequence[Topic],
        me: PeerId,
        addresses: Callable[[], Sequence[str]],
        heard: Callable[[PeerId, Sequence[str]], None],
    ) -> None:
        self._tags, self._me, self._addresses, self._heard = [*map(swarm_tag, topics)], me, addresses, heard
        self._networks: dict[str, Network] = {}

    async def run(self) -> None:
        """Announce and listen until cancelled.

        If this node has no address on a local network, wait for one. If multicast does not work, log a
        warning once and try again every TRY_AGAIN_S, because the machine may move to another network.
        """
        said = False
        while True:
            try:
                self._networks = own_networks()
                if own := self._announced():
                    await self._announce(own)
                else:
                    await trio.sleep(CHECK_EVERY_S)
            except Exception as error:
                # zeroconf raises many kinds of exceptions, for sockets, interfaces and packets.
                level, said = logging.DEBUG if said else logging.WARNING, True
                log.log(
                    level,
                    'members on the local network cannot be found: %s; swarm.mdns = "off" ends this message',
                    error or repr(error),
                )
                await trio.sleep(TRY_AGAIN_S)

    def _announced(self) -> list[str]:
        """Return our listen addresses that are on one of this machine's networks."""
        found = [(address, parse_endpoint(address)) for address in self._addresses()]
        return [
            address for address, endpoint in found if endpoint is not None and endpoint.host in self._networks
        ][:MAX_ADDRESSES]

    async def _announce(self, own: Sequence[str]) -> None:
        open_one = await trio.to_thread.run_sync(self._open, own, trio.lowlevel.current_trio_token())
        try:
            while own == self._announced() and self._networks == own_networks():
                await trio.sleep(CHECK_EVERY_S)
        finally:
            with trio.CancelScope(deadline=trio.current_time() + CLOSE_TIMEOUT_S, shield=True):
                # The installed stubs of trio, a dependency of libp2p, are older than trio itself.
                await trio.to_thread.run_sync(open_one.close, abandon_on_cancel=True)  # type: ignore[call-arg]

    def _open(self, own: Sequence[str], token: trio.lowlevel.TrioToken) -> zeroconf.Zeroconf:
        """Open zeroconf and register the service. Blocks, so it must run in a thread."""
        hosts = [endpoint.host for _, endpoint in map(parse_bootstrap, own)]
        name = secrets.token_hex(20)
        service = zeroconf.ServiceInfo(
            SERVICE,
            f"{name}.{SERVICE}",
            port=parse_bootstrap(own[0])[1].port,
            properties=text_of(self._tags, own),
            server=f"{name}.local.",
            parsed_addresses=list(dict.fromkeys(hosts)),
        )
        there = zeroconf.Zeroconf(
            interfaces=[host for host in dict.fromkeys(hosts) if ":" not in host]
            or zeroconf.InterfaceChoice.Default
        )
        try:
            # The name is random, so the library need not check first whether another node has it.
            there.register_service(service, cooperating_responders=True)
            zeroconf.ServiceBrowser(there, SERVICE, handlers=[partial(self._changed, token)])
        except BaseException:
            there.close()
            raise
        return there

    def _changed(
        self,
        token: trio.lowlevel.TrioToken,
        zeroconf: zeroconf.Zeroconf,
        service_type: str,
        name: str,
        state_change: zeroconf.ServiceStateChange,
    ) -> None:
        # zeroconf calls this in its own thread.
        if state_change.name == "Removed":
            return
        try:
            info = zeroconf.get_service_info(service_type, name, ANSWER_TIMEOUT_MS)
        except Exception as error:
            # A bad packet would otherwise end the library's thread.
            log.debug("malformed announcement: %r", error)
            return
        if info is not None and info.text:
            # The node may be stopping.
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(self._noticed, info.text)

    def _noticed(self, data: bytes) -> None:
        found = read_text(data, self._tags, [*self._networks.values()])
        if found is not None and found[0] != self._me:
            self._heard(*found)
