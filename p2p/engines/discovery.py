"""Peer discovery: finds the members of a swarm and stays connected to enough of them.

Addresses come from three sources: the address book, which has the operator's bootstrap addresses and the
known peers; the identify messages of connected peers; and the swarm's provider records in the DHT.
`p2p.peers.outbound` chooses the peers to dial, and this module dials them. It reaches the network library
only through the protocol `Connections`.
"""

import contextlib
import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import trio

from p2p.peers.addressbook import AddressBook
from p2p.peers.outbound import DHT_IDLE_S, TARGET_MEMBERS, Outbound, RequestConnections
from p2p.rate_limit import counted
from p2p.topic import Topic
from p2p.types import Peer, PeerId, Unanswered

# A connected member that has left the topic for this long is reconnected.
MISSING_S = 10.0
# Seconds between two DHT lookups. The time doubles from the first value to the last.
DHT_FIRST_S, DHT_EVERY_S = 3.0, 120.0
# The share of later lookups that a node makes if it has enough members. For a lookup all nodes of a swarm
# connect to the same 20 nodes, which are nearest to its key, and stay connected for DHT_IDLE_S. The addresses
# from one lookup serve fetches for two hours.
DHT_TURNS = 1 / 4

log = logging.getLogger(__name__)


class AddressRecord(NamedTuple):
    """Addresses at which a peer listens, as reported by `teller`. For the fields see `AddressBook.add`."""

    peer: PeerId
    addresses: Sequence[str]
    teller: PeerId | None = None
    source: str | None = None
    relayed: bool = False  # the peer is behind a relay, and the library itself knows how to reach it


class Dialled(NamedTuple):
    """A dial that succeeded.

    address: the address that answered. "" if the peer dialled us meanwhile, which proves no address.
    """

    address: str = ""
    group: str = ""  # the network group of the connection
    sure: bool = True  # False if another of the dialled addresses may have answered instead


class Connections(Protocol):
    """Interface to the network library: connections, members of topics, and the DHT's provider records."""

    async def refresh(self, dialled: Collection[PeerId]) -> float:
        """Update the list of connections, and close those to banned peers and second ones to one peer.

        Returns the seconds until the next call. dialled: the peers that we dialled or are dialling. The
        collection changes later.
        """

    def connected(self) -> Mapping[PeerId, Peer]: ...

    def is_connected(self, peer: PeerId) -> bool: ...

    def subscribed(self) -> Collection[PeerId]:
        """Return the connected members of all topics."""

    def in_mesh(self) -> Collection[PeerId]:
        """Return the connected members that get the frames we publish."""

    def present(self, topic: Topic) -> int:
        """Return how many connected peers are in a topic."""

    async def identified(self) -> Sequence[AddressRecord]:
        """Return new addresses of connected peers, from their identify messages."""

    async def dial(self, peer: PeerId, addresses: Sequence[str]) -> Dialled | None:
        """Dial a peer. Return None if no peer answers, or if another peer answers."""

    async def hang_up(self, peer: PeerId) -> None:
        """End all connections to a peer. Does not fail if the peer is gone."""

    async def provide(self, topic: Topic) -> None:
        """Publish our provider record of a topic in the DHT. Takes about 20 s at most. Raises Unanswered."""

    async def providers(self, topic: Topic) -> Sequence[AddressRecord]:
        """Look up a topic's provider records in the DHT. Takes about 20 s at most. Raises Unanswered."""


class Discovery:
    """Keeps this node connected to enough members.

    Args:
        connections: interface to the network library.
        topics: our swarm's topic comes first. Members of all topics count the same.
        book: known peers.
        banned: whether a peer is banned now.
        clock: returns seconds since the epoch.
        rng: draws peers and waiting times.
    """

    def __init__(
        self,
        connections: Connections,
        topics: Sequence[Topic],
        book: AddressBook,
        banned: Callable[[PeerId], bool],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.connections, self._topics = connections, topics
        self._book, self._banned, self._clock, self._rng = book, banned, clock, rng
        self._outbound, self._request_connections = Outbound(book, clock()), RequestConnections()
        self._reaching: WeakValueDictionary[PeerId, trio.Lock] = WeakValueDictionary()
        # Peers that were connected at the last refresh, without those that we hung up on since.
        self.connected: frozenset[PeerId] = frozenset()
        self._dialling: set[PeerId] = set()
        # Peers that we are dialling, and connected peers that we dialled.
        self._dialled: set[PeerId] = set()
        # Connected peer -> when it was last in a topic.
        self._in_topic: dict[PeerId, float] = {}

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_dht, nursery)
            while True:
                pause = await self.connections.refresh(self._dialled)
                for record in await self.connections.identified():
                    self._note_record(record)
                self._note_connected()
                await self._reconnect_missing()
                await self._keep_enough(nursery)
                await trio.sleep(pause)

    def peers(self) -> list[Peer]:
        """Return the connected members of our swarm that get the frames we publish."""
        connected = self.connections.connected()
        return [connected[peer] for peer in sorted(self.connections.in_mesh()) if peer in connected]

    async def reach(self, peer: PeerId) -> bool:
        """Connect to a peer for a question, unless it is connected.

        Returns False if the peer is banned or cannot be reached.
        """
        if self._banned(peer):
            return False
        if not self.connections.is_connected(peer):
            async with self._reaching.setdefault(peer, trio.Lock()):
                if not self.connections.is_connected(peer) and not await self._dial_to_ask(peer):
                    return False
            self._request_connections.begin(peer, self._clock())
        self._request_connections.used(peer, self._clock())
        return True

    @contextlib.contextmanager
    def asking(self, peer: PeerId) -> Iterator[None]:
        """Prevent the connection from being closed as idle while a question to the peer runs."""
        with counted(self._request_connections.asked, peer):
            yield
        self._request_connections.used(peer, self._clock())

    async def hang_up(self, peer: PeerId) -> None:
        self.connected -= {peer}
        await self.connections.hang_up(peer)

    def _note_record(self, record: AddressRecord) -> None:
        self._book.add(
            record.peer, record.addresses, self._clock(), teller=record.teller, source=record.source
        )

    def _note_connected(self) -> None:
        now, connected = self._clock(), self.connections.connected()
        for peer in self.connected - connected.keys():
            self._book.lost(peer, now)
        for peer in connected.keys() - self.connected:
            self._book.succeeded(peer, None, now)
            if connected[peer].direction == "outbound" and peer not in self._dialled:
                # The library's DHT dialled the peer for a lookup, and would never close the connection.
                self._request_connections.begin(peer, now, DHT_IDLE_S)
        self._book.still_connected(connected, now)
        self.connected = frozenset(connected)
        self._dialled &= self.connected | self._dialling

    async def _reconnect_missing(self) -> None:
        """Reconnect members that are connected but no longer in the topic.

        A topic's stream can break on both sides at a bad moment, or because a second node has the peer's key.
        The libraries then never open it again while the connection lasts.
        """
        now = self._clock()
        seen = self._in_topic | dict.fromkeys(self.connections.subscribed(), now)
        self._in_topic = {peer: at for peer, at in seen.items() if peer in self.connected}
        for peer in [peer for peer, at in self._in_topic.items() if now - at > MISSING_S]:
            log.info("%s is connected but not in the topic: reconnecting", peer)
            await self.hang_up(peer)

    async def _keep_enough(self, nursery: trio.Nursery) -> None:
        now, connected, members = self._clock(), self.connected, self.connections.subscribed()
        enough = len(members) > TARGET_MEMBERS
        # A small swarm keeps idle members connected. Other nodes, which the DHT dialled, must leave or they
        # would fill all slots; but they stay DHT_IDLE_S longer, because hole punching needs their relayed
        # connections.
        idle = self._request_connections.prune(connected, now if enough else now - DHT_IDLE_S)
        over = self._outbound.prune(connected, members, now)
        for peer in [*over, *(peer for peer in idle if enough or peer not in members)]:
            log.debug("hanging up on %s: not needed", peer)
            await self.hang_up(peer)
        dials = self._outbound.choose(connected, members, now, self._rng)
        feeler = self._outbound.feeler(connected, now, self._rng)
        for peer, addresses in [*dials, *([feeler] if feeler else [])]:
            nursery.start_soon(self._dial, peer, addresses)

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        found = None if self._banned(peer) else await self._connect(peer, addresses)
        if found is None:
            self._outbound.missed(peer, self._clock())
        else:
            self._outbound.reached(peer, found.address, found.group, self._clock())

    async def _dial_to_ask(self, peer: PeerId) -> bool:
        addresses = list(self._book.known[peer].addresses) if peer in self._book.known else []
        if (found := await self._connect(peer, addresses)) is None:
            self._book.failed(peer, self._clock(), addresses)
        elif found.address and found.sure:
            self._book.succeeded(peer, found.address, self._clock())
        return found is not None

    async def _connect(self, peer: PeerId, addresses: Sequence[str]) -> Dialled | None:
        self._dialling.add(peer)
        self._dialled.add(peer)
        try:
            found = await self.connections.dial(peer, addresses)
        finally:
            self._dialling.discard(peer)
        if found is None:
            self._dialled.discard(peer)
        return found

    async def _ask_dht(self, nursery: trio.Nursery) -> None:
        """Find providers of our swarms in the DHT and publish our record, until cancelled."""
        wait = DHT_FIRST_S
        while True:
            await trio.sleep(wait * self._rng.uniform(0.75, 1.25))
            wait = min(2 * wait, DHT_EVERY_S)
            if not self.connected:
                wait = DHT_FIRST_S
                continue
            enough = wait == DHT_EVERY_S and len(self.connections.subscribed()) > TARGET_MEMBERS
            if enough and self._rng.random() > DHT_TURNS:
                continue
            for topic in self._topics:
                # The DHT's routing table may still be empty; the next lookup may find peers.
                with contextlib.suppress(Unanswered):
                    for record in await self.connections.providers(topic):
                        self._note_record(record)
                        if record.relayed and record.peer not in (
                            self.connected | self._dialling | {self._book.me}
                        ):
                            nursery.start_soon(self._dial, record.peer, ())
                    await self.connections.provide(topic)
