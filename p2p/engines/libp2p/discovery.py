"""Finding the members of a swarm, and staying connected to enough of them. Off the critical path, every step under a timeout.

Sources: the operator's bootstrap addresses and the last known peers, both in the address book; what connected members say of
themselves (identify); the swarm's provider record in the DHT. `p2p.peers.outbound` says whom to dial; this does it.
"""

import contextlib
import logging
import random
import socket
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import multiaddr
import trio
from libp2p.host.ping import PingService
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo

from p2p.address import Endpoint, parse_endpoint
from p2p.engines.common.lasting import Shards
from p2p.engines.libp2p.network import close_socket, remote_host
from p2p.engines.libp2p.stack import Stack
from p2p.netgroup import LOCAL, group_of_host
from p2p.peers.addressbook import AddressBook
from p2p.peers.outbound import TARGET, Outbound
from p2p.peers.shard_peers import RequestConnections, ShardPeers
from p2p.topic import Topic
from p2p.types import PeerId, Unanswered

TICK = 1.0  # seconds between looks at whether enough members are connected
DIAL_TIMEOUT = 8.0
DHT_TIMEOUT = 20.0
SIMULTANEOUS = 5.0  # seconds within which two peers that dial each other make two connections in good faith
FORGOTTEN = 10.0  # seconds a connected member may be missing from the topic
DHT_FIRST, DHT_EVERY = 3.0, 120.0  # seconds; doubling from the first to the last
PING_AFTER, PING_TIMEOUT = 20.0, 10.0  # seconds of silence
NOTED_FOR = 10.0  # seconds for which what a member says of itself stays noted

log = logging.getLogger(__name__)


_id_of = lru_cache(maxsize=4096)(ID.from_string)  # decodes base58, which takes the library a tenth of a millisecond


class Discovery:
    """topics: our swarm's first; the members of all count as ours."""

    def __init__(
        self, stack: Stack, topics: Sequence[Topic], shards: Shards, book: AddressBook, clock: Callable[[], float], rng: random.Random
    ) -> None:
        self._stack, self._topics, self._shards, self._book, self._clock, self._rng = stack, topics, shards, book, clock, rng
        self._topic = topics[0]
        self._outbound, self._shard_peers, self._request_connections = Outbound(book, clock()), ShardPeers(), RequestConnections()
        self._reaching: WeakValueDictionary[PeerId, trio.Lock] = WeakValueDictionary()
        self._nursery: trio.Nursery | None = None
        self._connected: set[PeerId] = set()
        self._were_members: set[PeerId] = set()
        self._missed: dict[PeerId, float] = {}
        self._noted: dict[PeerId, tuple[Sequence[Any], float]] = {}  # member -> its addresses, and when they were noted

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._keep_enough, nursery)
            nursery.start_soon(self._ask_dht)
            nursery.start_soon(self._search_shards)
            nursery.start_soon(self._ping)

    def members(self, shard: int = 0) -> set[PeerId]:
        """Connected peers that are in a shard: of shard 0, those of our swarm."""
        there = {peer for topic in (self._topics if shard == 0 else [self._topic.of(shard)]) for peer in self._in(topic)}
        return {peer for peer in there if not self._shut_out(peer)}

    def connected(self) -> set[PeerId]:
        """As of the last look."""
        return self._connected

    def present(self, topic: Topic) -> int:
        return len(self._in(topic))

    def _in(self, topic: Topic) -> set[PeerId]:
        network, topics = self._stack.host.get_network(), self._stack.pubsub.peer_topics
        return {PeerId(str(peer)) for peer in topics.get(str(topic), ()) if network.get_connections(peer)}

    def hang_up_soon(self, peer: PeerId) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._hang_up, _id_of(peer))

    async def visit(self, peer: PeerId) -> bool:
        """Make sure that it is connected, to ask it something."""
        if not self._stack.host.get_network().get_connections(_id_of(peer)):
            if not await self._reach(peer):
                return False
            self._request_connections.begin(peer, self._clock())
        self._request_connections.used(peer, self._clock())
        return True

    def _shut_out(self, peer: PeerId) -> bool:
        return self._stack.pubsub.rate_limit.banned(peer, self._clock())

    def _inside(self) -> dict[int, set[PeerId]]:
        return {shard: self.members(shard) for shard in sorted(self._shards.wanted)}

    async def _keep_enough(self, nursery: trio.Nursery) -> None:
        while True:
            connected = {PeerId(str(peer)) for peer in self._stack.host.get_connected_peers()}
            self._note(connected)
            await self._close_stale(connected)
            now, members, inside = self._clock(), self.members(), self._inside()
            over = [peer for peer in connected if self._shut_out(peer)]
            over += [*self._outbound.prune(connected, members, now, self._rng), *self._shard_peers.prune(inside, connected, now)]
            over += self._request_connections.prune(connected, now) if len(members) > TARGET else []
            for peer in over:
                log.debug("%s is hung up on: not needed, or shut out", peer)
                await self._hang_up(_id_of(peer))
            dials = self._outbound.choose(connected, members, now, self._rng)
            feeler = self._outbound.feeler(connected, now, self._rng)
            for peer, addresses in [*dials, *([feeler] if feeler else [])]:
                nursery.start_soon(self._dial, peer, addresses)
            for peer in self._shard_peers.choose(inside, connected, now, self._rng):
                nursery.start_soon(self._dial_neighbour, peer)
            await trio.sleep(TICK)

    def _note(self, connected: set[PeerId]) -> None:
        """What members say of themselves, heard over a connection that proves who they are."""
        now, members = self._clock(), self.members()
        for peer in self._connected - connected:
            self._book.lost(peer, now)
            self._stack.host.get_network().unprotect(_id_of(peer), "outbound")
        store = self._stack.host.get_peerstore()
        for peer in connected:
            with contextlib.suppress(Exception):  # nothing is known of a peer that has not identified itself yet
                if peer in members:
                    self._note_addresses(peer, tuple(store.addrs(_id_of(peer))), now)
            if peer not in self._connected:
                self._book.succeeded(peer, None, now)
                if not self._chosen(peer):
                    self._request_connections.begin(peer, now)
        self._connected = connected
        self._noted = {peer: noted for peer, noted in self._noted.items() if peer in connected}

    def _note_addresses(self, peer: PeerId, addresses: Sequence[Any], now: float) -> None:
        """Where they are others than before, or it is time again: to make them text takes the library a while."""
        before, at = self._noted.get(peer, ((), 0.0))
        if addresses != before or not 0 <= now - at < NOTED_FOR:
            self._noted[peer] = (addresses, now)
            self._book.add(peer, [str(address) for address in addresses], now, source=self._group(_id_of(peer)))

    def _chosen(self, peer: PeerId) -> bool:
        """Not so for one that the library's DHT dialled, to ask it something: it would stay for good."""
        connections = self._stack.host.get_network().get_connections(_id_of(peer))
        ours = any(connection.direction.name.lower() == "outbound" for connection in connections)
        return not ours or peer in self._outbound.links or peer in self._shard_peers

    def _group(self, peer: Any) -> str:
        """The network group that the peer's connection comes from. Of one that is not connected any more: as if from afar, unless we
        know of nothing that is.
        """
        network = self._stack.host.get_network()
        near, all_of_them = network.get_connections(peer), network.get_connections()
        groups = {group_of_host(remote_host(connection)) or "" for connection in near or all_of_them}
        return LOCAL if groups == {LOCAL} else min(groups - {LOCAL}, default="") if near else "unknown"

    async def _close_stale(self, connected: set[PeerId]) -> None:
        """Of several connections to a peer one is kept. And a member that has not left and yet is missing from the topic is
        connected anew.
        """
        now, members = self._clock(), self.members()
        for peer, connections in list(self._stack.host.get_network().get_connections_map().items()):
            for connection in _superfluous(str(self._stack.host.get_id()) > str(peer), connections, now):
                await close_socket(connection)
        self._missed = {peer: self._missed.get(peer, now) for peer in (self._were_members & connected) - members}
        self._were_members = (self._were_members & connected) | members
        for peer, since in self._missed.items():
            if now - since > FORGOTTEN:
                log.info("%s is connected and not in the topic; connecting anew", peer)
                await self._hang_up(_id_of(peer))

    async def _hang_up(self, peer: Any) -> None:
        with contextlib.suppress(Exception):  # it may be gone by now
            await self._stack.host.disconnect(peer)

    async def _dial(self, peer: PeerId, addresses: list[str]) -> None:
        """Each address by itself: the library tries one address of a kind and then refuses the peer for a minute."""
        found = _id_of(peer)
        answered = "" if self._shut_out(peer) else await self._first_to_answer(found, addresses)
        # Where the peer dialled us in the meantime, the library is content with that connection, and the address is unproved.
        connections = self._stack.host.get_network().get_connections(found)
        ours = [connection for connection in connections if connection.direction.name.lower() == "outbound"]
        if not answered:
            self._outbound.missed(peer, self._clock())
        elif not ours:
            self._outbound.crossed(peer)
        else:
            self._outbound.reached(peer, answered, group_of_host(remote_host(ours[0])) or "", self._clock())
            self._stack.host.get_network().protect(found, "outbound")

    async def _dial_neighbour(self, peer: PeerId) -> None:
        if await self._reach(peer):
            self._shard_peers.reached(peer, self._clock())
        else:
            self._shard_peers.missed(peer)

    async def _reach(self, peer: PeerId) -> bool:
        """Connected, if need be by a dial at the addresses that we know."""
        found = _id_of(peer)
        lock = self._reaching.setdefault(peer, trio.Lock())
        async with lock:
            if self._stack.host.get_network().get_connections(found):
                return True
            if peer not in self._book or self._shut_out(peer):
                return False
            addresses = list(self._book[peer].addresses)
            answered = await self._first_to_answer(found, addresses)
            if answered:
                self._book.succeeded(peer, answered, self._clock())
            else:
                self._book.failed(peer, self._clock(), addresses)
            return bool(answered)

    async def _first_to_answer(self, peer: Any, addresses: list[str]) -> str:
        for address in addresses:
            with trio.move_on_after(DIAL_TIMEOUT):
                for resolved in await _resolve(address):
                    if await self._connect(peer, resolved):
                        return address
        return ""

    async def _connect(self, peer: Any, address: str) -> bool:
        self._stack.host.get_network().unblock_peer(peer)
        with contextlib.suppress(Exception):  # a peer not in the store has no addresses to clear
            self._stack.host.get_peerstore().clear_addrs(peer)
        try:
            await self._stack.host.connect(PeerInfo(peer, [multiaddr.Multiaddr(address)]))
        except Exception as error:  # nobody there, somebody else, or an answer the library stumbles over; the next address is tried
            log.debug("could not dial %s at %s: %r", peer, address, error)
            return False
        return True

    async def _ask_dht(self) -> None:
        wait = DHT_FIRST
        while True:
            await trio.sleep(wait * self._rng.uniform(0.75, 1.25))
            wait = min(2 * wait, DHT_EVERY)
            if not self._connected:
                wait = DHT_FIRST
                continue
            with trio.move_on_after(DHT_TIMEOUT):
                try:
                    await self._announce_and_look()
                except Exception as error:  # any of the library's many; peers may still be found at the next turn
                    log.debug("asking the DHT failed: %r", error)

    async def _announce_and_look(self) -> None:
        for topic in self._topics:
            await self._look_for(topic)
            await self._stack.dht.provider_store.provide(topic.provider_key)

    async def announce(self, topic: Topic) -> None:
        """Raises Unanswered."""
        with trio.move_on_after(DHT_TIMEOUT):
            try:
                await self._stack.dht.provider_store.provide(topic.provider_key)
            except Exception as error:  # any of the library's many; the caller hears of it
                raise Unanswered(f"nobody took the record: {error!r}") from None
            return
        raise Unanswered(f"nobody took the record in {DHT_TIMEOUT:.0f} s")

    async def find(self, topic: Topic) -> list[PeerId]:
        """Raises Unanswered."""
        with trio.move_on_after(DHT_TIMEOUT):
            try:
                return list(dict.fromkeys(await self._look_for(topic)))
            except Exception as error:  # any of the library's many; the caller hears of it
                raise Unanswered(f"nobody knows: {error!r}") from None
        raise Unanswered(f"nobody knew in {DHT_TIMEOUT:.0f} s")

    async def _look_for(self, topic: Topic) -> list[PeerId]:
        """Who announced itself under the topic. The address book hears of them."""
        dht, host = self._stack.dht, self._stack.host
        for peer in host.get_connected_peers():
            await dht.add_peer(peer)
        key = topic.provider_key
        # A store of its own to look with: the DHT's answers from itself as soon as it holds one record, and that may be ours.
        lookup = _Lookup(host=host, peer_routing=dht.peer_routing)
        await lookup.find_providers(key)
        me = host.get_id()
        told = [*lookup.told, *((me, info) for info in dht.provider_store.get_providers(key))]
        now = self._clock()
        for teller, info in told:
            addresses = [str(address) for address in info.addrs]
            self._book.add(PeerId(str(info.peer_id)), addresses, now, teller=PeerId(str(teller)), source=self._group(teller))
        return [PeerId(str(info.peer_id)) for _, info in told if info.peer_id != me]

    async def _search_shards(self) -> None:
        """Those in our shards, by the provider records of these."""
        while True:
            await trio.sleep(TICK)
            for shard, look, announce in self._shard_peers.searches_due(self._inside(), self._clock()) if self._connected else ():
                topic = self._topic.of(shard)
                with trio.move_on_after(DHT_TIMEOUT):
                    try:
                        if look:
                            self._shard_peers.add(shard, await self._look_for(topic))
                        if announce:
                            await self._stack.dht.provider_store.provide(topic.provider_key)
                    except Exception as error:  # any of the library's many; neighbours may still be found at the next turn
                        log.debug("asking the DHT for a shard failed: %r", error)

    async def _ping(self) -> None:
        """A peer whose machine lost its power never closes the connection, and would be sent to for a quarter of an hour. Who says anything
        else is alive, and is spared: a ping is a stream of its own.
        """
        pubsub = self._stack.pubsub
        while True:
            await trio.sleep(PING_AFTER / 4)
            now, connected = trio.current_time(), self._stack.host.get_connected_peers()
            pubsub.heard_at = {peer: pubsub.heard_at.get(peer, now) for peer in connected}
            async with trio.open_nursery() as nursery:
                for peer in [peer for peer, at in pubsub.heard_at.items() if now - at >= PING_AFTER]:
                    nursery.start_soon(self._ping_one, peer)

    async def _ping_one(self, peer: Any) -> None:
        with trio.move_on_after(PING_TIMEOUT):
            try:
                await PingService(self._stack.host).ping(peer)
            except Exception as error:  # it answered something, if only that it knows no ping: it is alive, or about to be dropped
                log.debug("ping of %s: %r", peer, error)
            self._stack.pubsub.heard_at[peer] = trio.current_time()
            return
        log.info("%s does not answer and is disconnected", peer)
        await self._hang_up(peer)


class _Lookup(ProviderStore):  # type: ignore[misc]  # the library is not typed for us
    """Remembers who told what."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.told: list[tuple[Any, Any]] = []  # peer id, PeerInfo

    async def _get_providers_from_peer_with_closers(self, peer_id: Any, key: bytes) -> tuple[list[Any], list[Any]]:
        providers, closer = await super()._get_providers_from_peer_with_closers(peer_id, key)
        self.told += [(peer_id, info) for info in providers]
        return providers, closer


def _superfluous(prefer_ours: bool, connections: Sequence[Any], now: float) -> Sequence[Any]:
    """All but one of the connections to a peer. A later one means that the peer has lost the earlier, by a change of network or a
    loss of power. Two at about the same time mean that both dialled; then both sides keep the one that the peer with the larger id
    made, and should that be a dead one, the other side dials once more.
    """
    if len(connections) < 2:
        return []
    last = max(connection._created_at for connection in connections)
    late = [connection for connection in connections if last - connection._created_at <= SIMULTANEOUS]
    if len(late) == len(connections) and now - last <= SIMULTANEOUS:
        return []
    wanted = "outbound" if prefer_ours else "inbound"
    kept = max(late, key=lambda connection: (connection.direction.name.lower() == wanted, connection._created_at))
    return [connection for connection in connections if connection is not kept]


async def _resolve(address: str) -> list[str]:
    """IP addresses for a name; the library's own resolver does not know plain host names."""
    endpoint = parse_endpoint(address)
    if endpoint is None or endpoint.kind.startswith("ip"):
        return [address]
    family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(endpoint.kind, socket.AF_UNSPEC)
    try:
        found = await trio.socket.getaddrinfo(endpoint.host, endpoint.port, family, socket.SOCK_STREAM)
    except OSError as error:  # no such name, or no name server
        log.debug("cannot resolve %s: %s", endpoint.host, error)
        return []
    kinds = {socket.AF_INET: "ip4", socket.AF_INET6: "ip6"}
    return [str(Endpoint(kinds[family], str(where[0]), endpoint.port)) for family, _, _, _, where in found if family in kinds][:4]
