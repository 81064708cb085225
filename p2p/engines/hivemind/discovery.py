"""Finding the members of a swarm through p2pd, and staying connected to enough of them. The same sources as in `libp2p_discovery`:
the address book, what connected peers say of themselves, and the swarm's provider record in the DHT, which both engines share.
"""

import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Sequence

import trio
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from p2p.address import parse_endpoint
from p2p.admission.host_bans import HostBans
from p2p.engines.common.lasting import Shards
from p2p.engines.hivemind.p2pd import P2pd, P2pdRefused, peer_bytes, peer_of
from p2p.netgroup import group_of
from p2p.peers.addressbook import AddressBook
from p2p.peers.outbound import TARGET, Outbound
from p2p.peers.shard_peers import RequestConnections, ShardPeers
from p2p.topic import Topic
from p2p.types import Peer, PeerId, Unanswered

TICK, QUICK_TICK = 1.0, 0.1  # seconds between looks at who is there; the second while nobody is, somebody is new, or one shut out
BACK = 5.0  # was here within so many seconds
HEARTBEAT = 0.5  # seconds; GossipSub's, at which a new neighbour is taken into the mesh
MESHED = 1.5 * HEARTBEAT  # seconds after which it is in the mesh; before, nobody passes anything on to it
FORGOTTEN = 10.0  # seconds a connected member may be missing from the topic
DIAL_TIMEOUT = 8  # seconds; whole ones, as p2pd takes them
DHT_TIMEOUT = 20
DHT_FIRST, DHT_EVERY = 3.0, 120.0  # seconds; doubling from the first to the last
PROVIDERS = 20

log = logging.getLogger(__name__)


class Discovery:
    """`topics`: our swarm's first; the members of all count as ours. `shut_out`: whether a peer is to stay away; it is disconnected as
    often as it comes. p2pd lets in whoever dials: who comes from where nobody is let in (`host_bans`) is disconnected at the next look.
    """

    def __init__(
        self,
        p2pd: P2pd,
        topics: Sequence[Topic],
        shards: Shards,
        book: AddressBook,
        clock: Callable[[], float],
        rng: random.Random,
        shut_out: Callable[[PeerId], bool],
        host_bans: HostBans,
    ) -> None:
        self._p2pd, self._topics, self._shards, self._book = p2pd, topics, shards, book
        self._topic = topics[0]
        self._present: dict[Topic, int] = {}  # connected peers, as of the last look
        self._clock, self._rng, self._shut_out, self._host_bans = clock, rng, shut_out, host_bans
        self._subscribed: dict[int, dict[PeerId, float]] = {0: {}}  # shard -> connected peers in its topic, and since when, in trio's time
        self._members: dict[int, set[PeerId]] = {0: set()}  # those of them that are in the mesh by now
        self._shard_peers, self._request_connections = ShardPeers(), RequestConnections()
        self._nursery: trio.Nursery | None = None
        self._connected: dict[PeerId, Peer] = {}
        self._outbound = Outbound(book, clock())
        self._dialling: set[PeerId] = set()
        self._dialled: set[PeerId] = set()  # those of the connected that we dialled
        self._hanging_up: set[PeerId] = set()
        self._were_members: set[PeerId] = set()
        self._missed: dict[PeerId, float] = {}  # connected, and in the topic no more, and since when
        self._was_back = -BACK  # when one who is shut out was here last
        self._unidentified: set[PeerId] = set()  # connected, and we have not heard yet where they listen

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._ask_dht, nursery)
            nursery.start_soon(self._search_shards)
            while True:
                await self._look()
                await self._identify()
                await self._keep_enough(nursery)
                settled = self._members[0] and all(len(self._members[shard]) == len(there) for shard, there in self._subscribed.items())
                settled = settled and self._clock() - self._was_back > BACK
                await trio.sleep(TICK if settled else QUICK_TICK)

    async def _keep_enough(self, nursery: trio.Nursery) -> None:
        now, connected, members = self._clock(), self._connected.keys(), self._subscribed[0].keys()
        inside = self._inside()
        over = [*self._outbound.prune(connected, members, now, self._rng), *self._shard_peers.prune(inside, connected, now)]
        over += self._request_connections.prune(connected, now) if len(members) > TARGET else []
        for peer in over:
            await self.hang_up(peer)
        dials = self._outbound.choose(connected, members, now, self._rng)
        feeler = self._outbound.feeler(connected, now, self._rng)
        for peer, addresses in [*dials, *([feeler] if feeler else [])]:
            self._start_dial(nursery, peer, addresses)
        for peer in self._shard_peers.choose(inside, connected, now, self._rng):
            nursery.start_soon(self._dial_neighbour, peer)

    def peers(self) -> list[Peer]:
        """Connected peers that are in our swarm and hear us, as of the last look."""
        return [self._connected[peer] for peer in sorted(self._members[0]) if peer in self._connected]

    def connected(self) -> set[PeerId]:
        """As of the last look."""
        return {*self._connected}

    def present(self, topic: Topic) -> int:
        return self._present.get(topic, 0)

    def members(self, shard: int) -> set[PeerId]:
        """The same, of any shard."""
        return self._members.get(shard, set())

    def _inside(self) -> dict[int, dict[PeerId, float]]:
        return {shard: self._subscribed.get(shard, {}) for shard in sorted(self._shards.wanted)}

    async def visit(self, peer: PeerId) -> bool:
        """See to it that it is connected, to ask it something, as far as we know how. False where it is shut out."""
        if self._shut_out(peer):
            return False
        if peer not in self._connected and await self._reach(peer):
            self._request_connections.begin(peer, self._clock())
        self._request_connections.used(peer, self._clock())
        return True

    async def _dial_neighbour(self, peer: PeerId) -> None:
        if not self._shut_out(peer) and await self._reach(peer):
            self._shard_peers.reached(peer, self._clock())
        else:
            self._shard_peers.missed(peer)

    async def _reach(self, peer: PeerId) -> bool:
        """Have p2pd connect, at the addresses that we know and those that it knows."""
        addresses = list(self._book[peer].addresses) if peer in self._book else []
        self._dialled.add(peer)
        self._dialling.add(peer)
        try:
            await self._connect(peer, addresses)
        except P2pdRefused as error:  # nobody there, or somebody else
            log.debug("could not reach %s: %s", peer, error)
            self._book.failed(peer, self._clock(), addresses)
            self._dialled.discard(peer)
            return False
        finally:
            self._dialling.discard(peer)
        return True

    async def _connect(self, peer: PeerId, addresses: Iterable[str]) -> None:
        request = {"peer": peer_bytes(peer), "addrs": [Multiaddr(address).to_bytes() for address in addresses], "timeout": DIAL_TIMEOUT}
        await self._p2pd.ask(DIAL_TIMEOUT, type=self._p2pd.pb.Request.CONNECT, connect=request)

    def hang_up_soon(self, peer: PeerId) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self.hang_up, peer)

    async def hang_up(self, peer: PeerId) -> None:
        if peer in self._hanging_up:
            return
        self._hanging_up.add(peer)
        self._connected.pop(peer, None)
        for there in self._members.values():
            there.discard(peer)
        try:
            if self._shut_out(peer) and peer not in self._dialled and not self._host_bans.knows(peer):
                came_from = (await self._listed()).get(peer)
                if came_from is not None:
                    self._host_bans.count(peer, _host(came_from), self._clock())
            await self._p2pd.ask(type=self._p2pd.pb.Request.DISCONNECT, disconnect={"peer": peer_bytes(peer)})
        except P2pdRefused as error:  # it is gone already
            log.debug("could not disconnect %s: %s", peer, error)
        finally:
            self._hanging_up.discard(peer)

    async def _look(self) -> None:
        now, listed = self._clock(), await self._listed()
        in_topic = {shard: await self._in_topic(shard) for shard in [0, *sorted(self._shards.wanted)]}
        connected: dict[PeerId, Peer] = {}
        for peer, address in listed.items():
            if self._unwelcome(peer, address, now):
                self._was_back = now
                await self.hang_up(peer)
            else:
                direction = "outbound" if peer in self._dialled else "inbound"
                since = self._connected[peer].connected_at if peer in self._connected else now
                connected[peer] = Peer(peer, address, direction, since)
        self._note(connected, now)
        moment = trio.current_time()
        known = self._subscribed
        self._subscribed = {
            shard: {peer: known.get(shard, {}).get(peer, moment) for peer in there & connected.keys()} for shard, there in in_topic.items()
        }
        self._members = {
            shard: {peer for peer, since in there.items() if moment - since >= MESHED} for shard, there in self._subscribed.items()
        }
        await self._connect_anew(now)

    async def _connect_anew(self, now: float) -> None:
        """Members that are connected and in the topic no more. Where a second node with one's key connects to the other, p2pd resets the
        streams of both until it gives up, and never tries again while either is connected.
        """
        members = {peer for there in self._subscribed.values() for peer in there}
        self._missed = {peer: self._missed.get(peer, now) for peer in (self._were_members & self._connected.keys()) - members}
        self._were_members = (self._were_members & self._connected.keys()) | members
        for peer in [peer for peer, since in self._missed.items() if now - since > FORGOTTEN]:
            log.info("%s is connected and not in the topic; connecting anew", peer)
            await self.hang_up(peer)

    def _unwelcome(self, peer: PeerId, address: str, now: float) -> bool:
        new = peer not in self._connected and peer not in self._dialled
        return self._shut_out(peer) or (new and not self._host_bans.admits(_host(address), now))

    async def _listed(self) -> dict[PeerId, str]:
        """Connected peers, and the other end's address of one connection each: "" where it is of a kind that we do not know."""
        listed: dict[PeerId, str] = {}
        for info in (await self._p2pd.ask(type=self._p2pd.pb.Request.LIST_PEERS)).peers:  # one of each connection
            if (peer := peer_of(info.id)) is not None:
                listed.setdefault(peer, next(iter(texts(info.addrs)), ""))
        return listed

    async def _in_topic(self, shard: int) -> set[PeerId]:
        found: set[PeerId] = set()
        for topic in self._topics if shard == 0 else [self._topic.of(shard)]:
            pubsub = {"type": self._p2pd.pb.PSRequest.LIST_PEERS, "topic": str(topic)}
            listed = await self._p2pd.ask(type=self._p2pd.pb.Request.PUBSUB, pubsub=pubsub)
            there = {peer for raw in listed.pubsub.peerIDs if (peer := peer_of(raw)) is not None}
            self._present[topic] = len(there)
            found |= there
        return found

    def _note(self, connected: dict[PeerId, Peer], now: float) -> None:
        gone, come = self._connected.keys() - connected.keys(), connected.keys() - self._connected.keys()
        for peer in gone:
            self._book.lost(peer, now)
        for peer in come:
            self._book.succeeded(peer, None, now)
        self._unidentified = (self._unidentified | come) & connected.keys()
        self._dialled &= connected.keys() | self._dialling
        self._connected = connected

    async def _identify(self) -> None:
        """Where the newcomers listen. p2pd answers for connected peers from what they told it, without asking the network."""
        find = self._p2pd.pb.DHTRequest.FIND_PEER
        for peer in sorted(self._unidentified):
            with contextlib.suppress(P2pdRefused):  # it is gone again
                dht = {"type": find, "peer": peer_bytes(peer), "timeout": 1}
                found = await self._p2pd.ask(type=self._p2pd.pb.Request.DHT, dht=dht)
                addresses = direct(texts(found.dht.peer.addrs))
                if addresses:
                    self._book.add(peer, addresses, self._clock())
                    self._unidentified.discard(peer)

    def _start_dial(self, nursery: trio.Nursery, peer: PeerId, addresses: Iterable[str]) -> None:
        if self._shut_out(peer):
            self._outbound.missed(peer, self._clock())
            return
        self._dialling.add(peer)
        nursery.start_soon(self._dial, peer, list(addresses))

    async def _dial(self, peer: PeerId, addresses: list[str]) -> None:
        """All addresses at once, and those p2pd knows besides, through relays too. It does not say which answered: they are of one
        network group, and the first stands for them.
        """
        self._dialled.add(peer)
        try:
            await self._connect(peer, addresses)
        except P2pdRefused as error:  # nobody there, or somebody else
            log.debug("could not dial %s: %s", peer, error)
            self._outbound.missed(peer, self._clock())
            self._dialled.discard(peer)
        else:
            if addresses and peer not in self._connected:
                self._outbound.reached(peer, addresses[0], group_of(addresses[0]) or "", self._clock())
            else:
                self._outbound.crossed(peer)
        finally:
            self._dialling.discard(peer)

    async def _ask_dht(self, nursery: trio.Nursery) -> None:
        wait = DHT_FIRST
        while True:
            await trio.sleep(wait * self._rng.uniform(0.75, 1.25))
            wait = min(2 * wait, DHT_EVERY)
            if not self._connected:
                wait = DHT_FIRST
                continue
            with contextlib.suppress(P2pdRefused):  # nobody in its table yet; at the next turn there may be
                for topic in self._topics:
                    for peer, addresses in await self._providers(topic):
                        self._book.add(peer, direct(addresses), self._clock(), teller=self._book.me)
                        if addresses and not direct(addresses) and peer not in self._connected.keys() | self._dialling:
                            self._start_dial(nursery, peer, ())  # behind a relay: p2pd has kept how to reach it
                    await self._announce(topic)

    async def _search_shards(self) -> None:
        """Those in our shards, by the provider records of these."""
        while True:
            await trio.sleep(TICK)
            for shard, look, announce in self._shard_peers.searches_due(self._inside(), self._clock()) if self._connected else ():
                with contextlib.suppress(P2pdRefused):  # nobody in its table yet; at the next turn there may be
                    if look:
                        for peer, addresses in await self._providers(self._topic.of(shard)):
                            self._book.add(peer, direct(addresses), self._clock(), teller=self._book.me)
                            self._shard_peers.add(shard, [peer])
                    if announce:
                        await self._announce(self._topic.of(shard))

    async def announce(self, topic: Topic) -> None:
        """Raises Unanswered."""
        try:
            await self._announce(topic)
        except P2pdRefused as error:
            raise Unanswered(f"nobody took the record: {error}") from None

    async def find(self, topic: Topic) -> list[PeerId]:
        """Who announced itself; the address book hears of them. Raises Unanswered."""
        try:
            found = await self._providers(topic)
        except P2pdRefused as error:
            raise Unanswered(f"nobody knows: {error}") from None
        for peer, addresses in found:
            self._book.add(peer, direct(addresses), self._clock(), teller=self._book.me)
        return [peer for peer, _ in found]

    async def _announce(self, topic: Topic) -> None:
        dht = {"type": self._p2pd.pb.DHTRequest.PROVIDE, "cid": _cid(topic), "timeout": DHT_TIMEOUT}
        await self._p2pd.ask(DHT_TIMEOUT, type=self._p2pd.pb.Request.DHT, dht=dht)

    async def _providers(self, topic: Topic) -> list[tuple[PeerId, list[str]]]:
        pb, found = self._p2pd.pb, []
        dht = {"type": pb.DHTRequest.FIND_PROVIDERS, "cid": _cid(topic), "count": PROVIDERS, "timeout": DHT_TIMEOUT}
        with trio.move_on_after(DHT_TIMEOUT):
            async with self._p2pd.wire() as wire:
                await self._p2pd.answer(wire, type=pb.Request.DHT, dht=dht)
                while (answer := await wire.receive(pb.DHTResponse)).type != pb.DHTResponse.END:
                    peer = peer_of(answer.peer.id)
                    if peer is not None and peer != self._book.me:
                        found.append((peer, texts(answer.peer.addrs)))
        return found


def _cid(topic: Topic) -> bytes:
    """CIDv1, raw, over the key that both engines announce under."""
    return b"\x01\x55" + topic.provider_key


def texts(addresses: Iterable[bytes]) -> list[str]:
    """Multiaddresses as text; those of kinds that we do not know are left out."""
    found: list[str] = []
    for raw in addresses:
        with contextlib.suppress(MultiaddrError, ValueError, LookupError):  # a peer may say anything of itself
            found.append(str(Multiaddr(bytes(raw))))
    return found


def _host(address: str) -> str:
    """The IP address in it; what comes by a relay comes from nowhere that we know."""
    endpoint = parse_endpoint(address) if "/p2p-circuit" not in address else None
    return endpoint.host if endpoint is not None else ""


def direct(addresses: Iterable[str]) -> list[str]:
    """Without those through a relay, whose first half is the relay's own address."""
    return [address for address in addresses if "/p2p-circuit" not in address]
