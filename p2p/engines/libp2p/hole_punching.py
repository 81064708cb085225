"""Hole punching (DCUtR, github.com/libp2p/specs, relay/DCUtR.md).

Two peers behind NAT that a relay connects dial each other at one moment. The peer that was dialled through
the relay begins. Both dial from the port that they listen on, at the address at which members see the other:
most routers keep the port. py-libp2p's own (`DCUtRProtocol`) also works, but dials whatever addresses the
other side names.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import multiaddr
import trio
from libp2p.custom_types import TProtocol
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from multiaddr.exceptions import Error as MultiaddrError

from p2p.address import Endpoint, parse_endpoint
from p2p.engines.libp2p.network import circuit, direct
from p2p.engines.libp2p.relay import drop, receive, send
from p2p.nat.dial_back import MIN_PORT
from p2p.netgroup import is_public
from p2p.rate_limit import TokenBucket

DCUTR = TProtocol("/libp2p/dcutr")
# Addresses of the other side that are dialled.
MAX_DIALLED = 2
TRIES, TRY_AGAIN_S = 6, 10.0
# The time for one try.
TRY_TIMEOUT_S = 6.0
# Tries with all peers together: a peer may name a third party's address.
TRIES_PER_S, TRIES_AT_ONCE = 0.1, 8.0

log = logging.getLogger(__name__)


class HolePunching:
    """Punches holes for peers that are connected through a relay.

    here: where others see this node, with the port that we listen on; None while that is not known, or others
    can dial us anyway.
    """

    def __init__(self, host: Any, listen: Endpoint, here: Callable[[], Sequence[str]]) -> None:
        self._host, self._network, self._listen, self._here = host, host.get_network(), listen, here
        self._tries = TokenBucket(TRIES_PER_S, TRIES_AT_ONCE, trio.current_time())

    async def begin(self, peer: Any) -> None:
        """Punch a hole to a peer that came to us through a relay.

        A new one does not know yet where others see it, and refuses at first.
        """
        for _ in range(TRIES):
            if self._here() and not self._tries.wait(trio.current_time()):
                try:
                    await self._begin(peer)
                except Exception as error:  # it refuses, knows no hole punching, or says something else
                    log.debug("no hole punching with %s: %r", peer, error)
            if direct(self._network.get_connections(peer)):
                return
            await trio.sleep(TRY_AGAIN_S)

    async def _begin(self, peer: Any) -> None:
        stream = await self._host.new_stream(peer, [DCUTR])
        try:
            asked = trio.current_time()
            await send(stream, self._connect())
            there = dialable(await _told(stream, HolePunch.CONNECT))
            half = (trio.current_time() - asked) / 2
            await send(stream, HolePunch(type=HolePunch.SYNC))
            await trio.sleep(half)
            await self._dial(peer, there, self._network.dial_addr_as_responder)
        finally:
            await drop(stream)

    async def handle(self, stream: Any) -> None:
        """Handle a stream: a peer that we dialled through a relay begins. Nobody else may."""
        peer = stream.muxed_conn.peer_id
        ours = circuit(stream) is not None and stream.muxed_conn.is_initiator
        try:
            if ours and self._here() and not self._tries.wait(trio.current_time()):
                there = dialable(await _told(stream, HolePunch.CONNECT))
                await send(stream, self._connect())
                await _told(stream, HolePunch.SYNC)
                await self._dial(peer, there, self._network.dial_addr)
        finally:
            await drop(stream)

    def _connect(self) -> HolePunch:
        return HolePunch(
            type=HolePunch.CONNECT,
            ObsAddrs=[multiaddr.Multiaddr(address).to_bytes() for address in self._here()],
        )

    async def _dial(self, peer: Any, addresses: Sequence[str], dial: Any) -> None:
        async def one(address: str) -> None:
            try:
                await dial(multiaddr.Multiaddr(address), peer, (self._listen.host, self._listen.port))
            except Exception as error:  # nothing came through, or not from there
                log.debug("no hole to %s at %s: %r", peer, address, error)

        with trio.move_on_after(TRY_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    nursery.start_soon(one, address)
        if direct(self._network.get_connections(peer)):
            log.info("%s: connected without the relay, by hole punching", peer)


def dialable(addresses: Iterable[bytes]) -> list[str]:
    """Return the named addresses that we dial: public IP addresses, with no port of a system service."""
    found: dict[str, None] = {}
    for raw in addresses:
        with contextlib.suppress(MultiaddrError, ValueError, LookupError):
            endpoint = parse_endpoint(str(multiaddr.Multiaddr(bytes(raw))))
            if endpoint is not None and is_public(endpoint.host) and endpoint.port >= MIN_PORT:
                found[str(endpoint)] = None
    return [*found][:MAX_DIALLED]


async def _told(stream: Any, wanted: int) -> Sequence[bytes]:
    """Return the addresses in the next message. Raises ValueError where it is of another type."""
    message = await receive(stream, HolePunch)
    if message.type != wanted:
        raise ValueError(f"message of type {message.type}")
    return list(message.ObsAddrs)
