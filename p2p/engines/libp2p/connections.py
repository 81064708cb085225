"""Implements discovery's `Connections` on py-libp2p: connections, pings, topics and the DHT's providers."""

import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import multiaddr
import trio
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStoreError

from p2p.address import Endpoint, parse_endpoint
from p2p.admission.fair_queue import in_turn
from p2p.engines.discovery import AddressRecord, Dialled
from p2p.engines.libp2p.dht import bounded
from p2p.engines.libp2p.network import (
    SIMULTANEOUS_S,
    circuit,
    close_socket,
    direct,
    heard_at,
    remote_address,
    remote_host,
)
from p2p.engines.libp2p.stack import Stack
from p2p.netgroup import LOCAL, NAME, group_of, group_of_host
from p2p.topic import Topic
from p2p.types import Peer, PeerId, Unanswered

# Seconds between two calls of `refresh`.
TICK_S = 1.0
DIAL_TIMEOUT_S, DHT_TIMEOUT_S = 8.0, 20.0
# A connection that is silent for PING_AFTER_S is pinged.
PING_AFTER_S, PING_TIMEOUT_S = 20.0, 10.0
# Unchanged addresses of a member are reported again after this many seconds.
NOTED_S = 10.0

log = logging.getLogger(__name__)
T = TypeVar("T")

# Cached, because decoding base58 takes the library 0.1 ms.
_id_of = lru_cache(maxsize=4096)(ID.from_string)


class Libp2pConnections:
    """Implements `Connections`.

    Args:
        stack: the library's objects.
        topics: our swarm's topic comes first. Members of all topics count the same.
        clock: returns seconds since the epoch.
        note: called with a peer and its reported addresses.
    """

    def __init__(
        self,
        stack: Stack,
        topics: Sequence[Topic],
        clock: Callable[[], float],
        note: Callable[[PeerId, Sequence[str]], None],
    ) -> None:
        self._stack, self._topics, self._clock, self._note = stack, topics, clock, note
        self._network = stack.host.get_network()
        # Member -> its addresses, and when they were reported.
        self._noted: dict[PeerId, tuple[Sequence[Any], float]] = {}

    async def refresh(self, dialled: Collection[PeerId]) -> float:  # noqa: ARG002
        for peer, connections in list(self._network.get_connections_map().items()):
            kept = self._network.kept(connections, peer)
            for connection in _superfluous(connections, kept, self._clock()):
                await close_socket(connection)
        for peer in [peer for peer in self.connected() if self._banned(peer)]:
            await self.hang_up(peer)
        return TICK_S

    def connected(self) -> dict[PeerId, Peer]:
        found = {}
        for peer, connections in self._network.get_connections_map().items():
            if connections:
                # If both sides dialled, there are two connections for a while. Both sides report the one that
                # they will keep.
                kept, name = self._network.kept(connections, peer), PeerId(str(peer))
                found[name] = Peer(name, remote_address(kept), kept.direction.name.lower(), kept._created_at)
        return found

    def is_connected(self, peer: PeerId) -> bool:
        return bool(self._network.get_connections(_id_of(peer)))

    def subscribed(self) -> set[PeerId]:
        return {peer for topic in self._topics for peer in self._in(topic) if not self._banned(peer)}

    # Approximately right: a new neighbour is in the mesh after one heartbeat.
    in_mesh = subscribed

    def present(self, topic: Topic) -> int:
        return len(self._in(topic))

    def _in(self, topic: Topic) -> set[PeerId]:
        return {
            PeerId(str(peer))
            for peer in self._stack.pubsub.peer_topics.get(str(topic), ())
            if self._network.get_connections(peer)
        }

    def _banned(self, peer: PeerId) -> bool:
        return self._stack.pubsub.rate_limit.banned(peer, self._clock())

    async def identified(self) -> list[AddressRecord]:
        """Return members' addresses from identify, whose connections have proved their ids.

        Only new addresses, and those last reported NOTED_S ago, because the library is slow to convert
        addresses to text.
        """
        now, members, store, news = self._clock(), self.subscribed(), self._stack.host.get_peerstore(), []
        self._noted = {peer: noted for peer, noted in self._noted.items() if peer in members}
        for peer in members:
            try:
                addresses = tuple(store.addrs(_id_of(peer)))
            except PeerStoreError:
                # The peer has not identified itself yet.
                continue
            before, at = self._noted.get(peer, ((), 0.0))
            if addresses != before or not 0 <= now - at < NOTED_S:
                self._noted[peer] = (addresses, now)
                said = [str(address) for address in addresses]
                self._note(peer, said)
                news.append(AddressRecord(peer, said, source=self._group_of(_id_of(peer))))
        return news

    def _group_of(self, peer: Any) -> str:
        """Return the network group of the peer's connection.

        If the peer is no longer connected, the result is "unknown", or LOCAL if all our connections are
        local.
        """
        near, all_of_them = self._network.get_connections(peer), self._network.get_connections()
        groups = {group_of_host(remote_host(connection)) or "" for connection in near or all_of_them}
        return LOCAL if groups == {LOCAL} else min(groups - {LOCAL}, default="") if near else "unknown"

    async def dial(self, peer: PeerId, addresses: Sequence[str]) -> Dialled | None:
        """Dial the addresses one by one; without addresses, dial those that the DHT's peers reported.

        If the library got all addresses at once, it would try one of each kind, and then refuse the peer for
        a minute.
        """
        answered = await self._first_to_answer(_id_of(peer), addresses or self._told_of(_id_of(peer)))
        if not answered:
            return None
        # If the peer dialled us in the meantime, the library uses that connection, and the address is
        # unproved.
        for connection in self._network.get_connections(_id_of(peer)):
            if connection.direction.name.lower() == "outbound":
                return Dialled(answered, group_of_host(remote_host(connection)) or "")
        return Dialled()

    def _told_of(self, peer: Any) -> Sequence[str]:
        """Return the addresses in the library's store, for a peer that the address book does not know."""
        near, told = self._group_of(peer) == LOCAL, list[str]()
        with contextlib.suppress(PeerStoreError):
            told = [str(address) for address in self._stack.host.get_peerstore().addrs(peer)]
        # Leave out local addresses and names, for the reason in `LimitedNetwork.new_stream`.
        return [one for one in told if (group := group_of(one)) and (near or group not in (LOCAL, NAME))]

    async def hang_up(self, peer: PeerId) -> None:
        with contextlib.suppress(Exception):
            # The peer may already be gone.
            await self._stack.host.disconnect(_id_of(peer))

    async def _first_to_answer(self, peer: Any, addresses: Sequence[str]) -> str:
        for address in addresses:
            with trio.move_on_after(DIAL_TIMEOUT_S):
                for resolved in await _resolve(address):
                    self._network.unblock_peer(peer)
                    with contextlib.suppress(PeerStoreError):
                        # PeerStoreError: the peer is not in the store, so there is nothing to clear.
                        self._stack.host.get_peerstore().clear_addrs(peer)
                    try:
                        await self._stack.host.connect(PeerInfo(peer, [multiaddr.Multiaddr(resolved)]))
                    except Exception as error:
                        # No peer or another peer answers, or the library fails on the answer. Try the next
                        # address.
                        log.debug("could not dial %s at %s: %r", peer, resolved, error)
                    else:
                        return address
        return ""

    async def ping(self) -> None:
        """Ping silent connections until cancelled.

        A machine that lost its power never closes its connections, and we would send to it for a quarter of
        an hour. Any bytes from the peer count as an answer, because under a rate limit the answer to a ping
        waits behind other traffic.
        """
        while True:
            await trio.sleep(PING_AFTER_S / 4)
            now = trio.current_time()
            async with trio.open_nursery() as nursery:
                for peer, connections in list(self._network.get_connections_map().items()):
                    # Ping only direct connections; relays end silent circuits themselves.
                    ours = direct(connections)
                    if ours and all(now - heard_at(connection) >= PING_AFTER_S for connection in ours):
                        nursery.start_soon(_ping_one, peer, ours)

    async def provide(self, topic: Topic) -> None:
        await _in_time(self._stack.dht.provider_store.provide(topic.provider_key))

    async def providers(self, topic: Topic) -> list[AddressRecord]:
        dht, host, key = self._stack.dht, self._stack.host, topic.provider_key
        # Use a separate store for the lookup. The DHT's store asks no other node once it holds one record,
        # which may be our own record.
        lookup = _Lookup(host=host, peer_routing=dht.peer_routing)
        with contextlib.suppress(Unanswered):
            # After a timeout, the answers so far still count.
            await _in_time(self._look_up(lookup, key))
        records = [
            AddressRecord(
                PeerId(str(info.peer_id)),
                [str(a) for a in bounded(info.addrs)],
                PeerId(str(teller)),
                self._group_of(teller),
            )
            for teller, info in (
                *lookup.told,
                *((host.get_id(), info) for info in dht.provider_store.get_providers(key)),
            )
        ]
        for record in records:
            self._note(record.peer, record.addresses)
        return records

    async def _look_up(self, lookup: "_Lookup", key: bytes) -> None:
        for peer, connections in self._network.get_connections_map().items():
            if direct(connections):
                await self._stack.dht.add_peer(peer)
        await lookup.find_providers(key)


async def _ping_one(peer: Any, connections: Sequence[Any]) -> None:
    asked = trio.current_time()
    with trio.move_on_after(PING_TIMEOUT_S):
        for connection in connections:
            with contextlib.suppress(Exception):
                # The connection has ended.
                await connection.muxed_conn.ping()
        while not any(connection.is_closed or heard_at(connection) >= asked for connection in connections):
            await trio.sleep(PING_TIMEOUT_S / 100)
        return
    log.info("%s does not answer pings: disconnected", peer)
    for connection in connections:
        await close_socket(connection)


def _superfluous(connections: Sequence[Any], kept: Any, now: float) -> Sequence[Any]:
    """Return the connections to a peer that must be closed.

    If there is a direct connection, all connections through relays are closed. Of several direct connections,
    all but `kept` are closed, but not while two simultaneous dials may still be settling.
    """
    if len(connections) < 2:
        return []
    through_relays = [connection for connection in connections if circuit(connection) is not None]
    if 0 < len(through_relays) < len(connections):
        return through_relays
    first, last = (of(connection._created_at for connection in connections) for of in (min, max))
    settling = last - first <= SIMULTANEOUS_S and now - last <= SIMULTANEOUS_S
    return [] if settling else [connection for connection in connections if connection is not kept]


async def _resolve(address: str) -> list[str]:
    """Return the IP addresses of a name, IPv6 and IPv4 in turns, because one of the two may not work.

    The library's resolver does not know plain host names.
    """
    if (endpoint := parse_endpoint(address)) is None or endpoint.kind.startswith("ip"):
        return [address]
    family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(endpoint.kind, socket.AF_UNSPEC)
    try:
        found = await trio.socket.getaddrinfo(endpoint.host, endpoint.port, family, socket.SOCK_STREAM)
    except OSError as error:
        # The name does not exist, or there is no name server.
        log.debug("cannot resolve %s: %s", endpoint.host, error)
        return []
    kinds = {socket.AF_INET: "ip4", socket.AF_INET6: "ip6"}
    hosts = [(kinds[family], str(where[0])) for family, *_, where in found if family in kinds]
    return [str(Endpoint(*host, endpoint.port)) for host in in_turn(hosts, lambda host: host[0])[:4]]


async def _in_time(call: Awaitable[T]) -> T:
    """Await a call of the library, with a timeout. Raises Unanswered."""
    with trio.move_on_after(DHT_TIMEOUT_S):
        try:
            return await call
        except Exception as error:
            # The library raises many kinds of exceptions.
            raise Unanswered(f"the DHT failed: {error!r}") from None
    raise Unanswered(f"the DHT did not answer in {DHT_TIMEOUT_S:.0f} s")


class _Lookup(ProviderStore):  # type: ignore[misc]  # the library is not typed for us
    """A provider store that records which peer reported each provider."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.told: list[tuple[Any, Any]] = []  # peer id, PeerInfo

    async def _get_providers_from_peer_with_closers(
        self, peer_id: Any, key: bytes
    ) -> tuple[list[Any], list[Any]]:
        providers, closer = await super()._get_providers_from_peer_with_closers(peer_id, key)
        self.told += [(peer_id, info) for info in providers]
        return providers, closer
