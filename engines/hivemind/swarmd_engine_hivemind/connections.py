"""Implements discovery's `Connections` on p2pd: dials, hangs up, and lists the members of topics.

p2pd answers requests but sends no events, so all results are as old as the last `refresh`.
"""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence

import trio
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from p2p.address import parse_endpoint
from p2p.admission.host_bans import HostBans
from p2p.engines.discovery import AddressRecord, Dialled
from p2p.netgroup import group_of
from p2p.peers.listen import has_route
from p2p.topic import Topic
from p2p.types import Peer, PeerId, Unanswered
from swarmd_engine_hivemind.p2pd import P2pd, P2pdRefused, peer_bytes, peer_of

# Seconds between two refreshes. The short time is used while no member is in the mesh, a member is not in it
# yet, or a banned peer was connected within BACK_S.
TICK_S, QUICK_TICK_S = 1.0, 0.1
BACK_S = 5.0
# GossipSub's heartbeat, which takes new neighbours into the mesh.
HEARTBEAT_S = 0.5
# A subscribed neighbour is in the mesh after this time. Before that it gets no messages.
MESHED_S = 1.5 * HEARTBEAT_S
# p2pd takes whole seconds.
DIAL_TIMEOUT_S = 8
DHT_TIMEOUT_S = 20
MAX_PROVIDERS = 20

log = logging.getLogger(__name__)


class HivemindConnections:
    """Implements `Connections`.

    p2pd accepts every connection. So at each refresh, banned peers and new peers from banned hosts
    (`host_bans`) are disconnected.

    topics: our swarm's topic comes first. Members of all topics count the same.
    """

    def __init__(
        self,
        p2pd: P2pd,
        me: PeerId,
        topics: Sequence[Topic],
        banned: Callable[[PeerId], bool],
        host_bans: HostBans,
        clock: Callable[[], float],
    ) -> None:
        self._p2pd, self._me, self._topics = p2pd, me, topics
        self._banned, self._host_bans, self._clock = banned, host_bans, clock
        self._dialled: Collection[PeerId] = ()
        self._connected: dict[PeerId, Peer] = {}
        self._present: dict[Topic, int] = {}  # number of connected peers
        # Connected peer in our topics -> time at which it was first seen there, in trio's time.
        self._subscribed: dict[PeerId, float] = {}
        self._in_mesh: set[PeerId] = set()
        self._hanging_up: set[PeerId] = set()
        # When a banned peer was last connected.
        self._was_back = -BACK_S
        # Connected peers whose addresses are not known yet.
        self._unidentified: set[PeerId] = set()

    async def refresh(self, dialled: Collection[PeerId]) -> float:
        self._dialled = dialled
        now, listed = self._clock(), await self._listed()
        members = await self._members()
        connected: dict[PeerId, Peer] = {}
        for peer, address in listed.items():
            if self._unwelcome(peer, address, now):
                self._was_back = now
                await self.hang_up(peer)
            else:
                since = self._connected[peer].connected_at if peer in self._connected else now
                connected[peer] = Peer(peer, address, "outbound" if peer in dialled else "inbound", since)
        self._unidentified = (
            self._unidentified | (connected.keys() - self._connected.keys())
        ) & connected.keys()
        self._connected = connected
        moment = trio.current_time()
        self._subscribed = {peer: self._subscribed.get(peer, moment) for peer in members & connected.keys()}
        self._in_mesh = {peer for peer, since in self._subscribed.items() if moment - since >= MESHED_S}
        settled = self._in_mesh and len(self._in_mesh) == len(self._subscribed)
        return TICK_S if settled and now - self._was_back > BACK_S else QUICK_TICK_S

    def connected(self) -> dict[PeerId, Peer]:
        return self._connected

    def is_connected(self, peer: PeerId) -> bool:
        return peer in self._connected

    def subscribed(self) -> Collection[PeerId]:
        return self._subscribed.keys()

    def in_mesh(self) -> Collection[PeerId]:
        return self._in_mesh

    def present(self, topic: Topic) -> int:
        return self._present.get(topic, 0)

    async def identified(self) -> list[AddressRecord]:
        """Look up the addresses of new peers. For connected ones p2pd answers without asking the network."""
        news = []
        for peer in sorted(self._unidentified):
            with contextlib.suppress(P2pdRefused):
                # P2pdRefused: the peer has left.
                dht = {"type": self._p2pd.pb.DHTRequest.FIND_PEER, "peer": peer_bytes(peer), "timeout": 1}
                found = await self._p2pd.ask(type=self._p2pd.pb.Request.DHT, dht=dht)
                if addresses := direct(texts(found.dht.peer.addrs)):
                    news.append(AddressRecord(peer, addresses))
                    self._unidentified.discard(peer)
        return news

    async def dial(self, peer: PeerId, addresses: Sequence[str]) -> Dialled | None:
        """Dial all addresses at once, and also those that p2pd knows, including relays.

        p2pd does not say which address answered. Mostly all are of one network group, so the first one is
        returned for all. Addresses without a route are left out before, because p2pd would not report them.
        """
        endpoints = ((text, parse_endpoint(text)) for text in addresses)
        addresses = [text for text, endpoint in endpoints if endpoint is not None and has_route(endpoint)]
        try:
            request = {
                "peer": peer_bytes(peer),
                "addrs": [Multiaddr(address).to_bytes() for address in addresses],
                "timeout": DIAL_TIMEOUT_S,
            }
            await self._p2pd.ask(DIAL_TIMEOUT_S, type=self._p2pd.pb.Request.CONNECT, connect=request)
        except P2pdRefused as error:
            # No peer answers, or another one.
            log.debug("could not dial %s: %s", peer, error)
            return None
        if not addresses or peer in self._connected:
            return Dialled()
        return Dialled(addresses[0], group_of(addresses[0]) or "", sure=len(addresses) == 1)

    async def hang_up(self, peer: PeerId) -> None:
        if peer in self._hanging_up:
            return
        self._hanging_up.add(peer)
        self._connected.pop(peer, None)
        self._in_mesh.discard(peer)
        try:
            if self._banned(peer) and peer not in self._dialled and not self._host_bans.knows(peer):
                came_from = (await self._listed()).get(peer)
                if came_from is not None:
                    self._host_bans.count(peer, _host(came_from), self._clock())
            await self._p2pd.ask(type=self._p2pd.pb.Request.DISCONNECT, disconnect={"peer": peer_bytes(peer)})
        except P2pdRefused as error:
            # The peer has already left.
            log.debug("could not disconnect %s: %s", peer, error)
        finally:
            self._hanging_up.discard(peer)

    def _unwelcome(self, peer: PeerId, address: str, now: float) -> bool:
        new = peer not in self._connected and peer not in self._dialled
        return self._banned(peer) or (new and not self._host_bans.admits(_host(address), now))

    async def _listed(self) -> dict[PeerId, str]:
        """Return the connected peers, each with the remote address of one of its connections.

        The address is "" if it is of an unknown kind.
        """
        listed: dict[PeerId, str] = {}
        # p2pd lists one entry for each connection.
        for info in (await self._p2pd.ask(type=self._p2pd.pb.Request.LIST_PEERS)).peers:
            if (peer := peer_of(info.id)) is not None:
                listed.setdefault(peer, next(iter(texts(info.addrs)), ""))
        return listed

    async def _members(self) -> set[PeerId]:
        found: set[PeerId] = set()
        for topic in self._topics:
            pubsub = {"type": self._p2pd.pb.PSRequest.LIST_PEERS, "topic": str(topic)}
            listed = await self._p2pd.ask(type=self._p2pd.pb.Request.PUBSUB, pubsub=pubsub)
            there = {peer for raw in listed.pubsub.peerIDs if (peer := peer_of(raw)) is not None}
            self._present[topic] = len(there)
            found |= there
        return found

    async def provide(self, topic: Topic) -> None:
        dht = {"type": self._p2pd.pb.DHTRequest.PROVIDE, "cid": _cid(topic), "timeout": DHT_TIMEOUT_S}
        try:
            await self._p2pd.ask(DHT_TIMEOUT_S, type=self._p2pd.pb.Request.DHT, dht=dht)
        except P2pdRefused as error:
            raise Unanswered(f"no peer stored the record: {error}") from None

    async def providers(self, topic: Topic) -> list[AddressRecord]:
        """Look up providers. The teller is this node, because p2pd does not say which peer reported them."""
        pb, found = self._p2pd.pb, []
        dht = {
            "type": pb.DHTRequest.FIND_PROVIDERS,
            "cid": _cid(topic),
            "count": MAX_PROVIDERS,
            "timeout": DHT_TIMEOUT_S,
        }
        try:
            with trio.move_on_after(DHT_TIMEOUT_S):
                async with self._p2pd.wire() as wire:
                    await self._p2pd.answer(wire, type=pb.Request.DHT, dht=dht)
                    while (answer := await wire.receive(pb.DHTResponse)).type != pb.DHTResponse.END:
                        if (peer := peer_of(answer.peer.id)) is not None:
                            addresses = texts(answer.peer.addrs)
                            # p2pd remembers the relays of such a peer.
                            relayed = bool(addresses) and not direct(addresses)
                            found.append(AddressRecord(peer, direct(addresses), self._me, relayed=relayed))
        except P2pdRefused as error:
            raise Unanswered(f"no peer has a record: {error}") from None
        return found


def _cid(topic: Topic) -> bytes:
    """Return the CIDv1 (codec raw) of the DHT key that both engines use."""
    return b"\x01\x55" + topic.provider_key


def texts(addresses: Iterable[bytes]) -> list[str]:
    """Return multiaddresses as text, except unknown kinds."""
    found: list[str] = []
    for raw in addresses:
        # Peers may send anything as an address.
        with contextlib.suppress(MultiaddrError, ValueError, LookupError):
            found.append(str(Multiaddr(bytes(raw))))
    return found


def _host(address: str) -> str:
    """Return the IP address in a multiaddress; "" if it leads through a relay: the host is unknown."""
    endpoint = parse_endpoint(address) if "/p2p-circuit" not in address else None
    return endpoint.host if endpoint is not None else ""


def direct(addresses: Iterable[str]) -> list[str]:
    """Return the addresses that do not lead through a relay."""
    return [address for address in addresses if "/p2p-circuit" not in address]
