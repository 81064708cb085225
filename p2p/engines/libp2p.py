"""The engine that goes over the network, on py-libp2p. Whatever breaks in the library, this starts it again and stays what it was."""

import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import trio

from p2p.address import Endpoint, parse_listen
from p2p.addressbook import NEARBY
from p2p.engines.asking import Desk
from p2p.engines.lasting import BookFile, Lasting, Outbox, Shards, pinned_book
from p2p.engines.libp2p_asking import PROTOCOL, Asker, serve
from p2p.engines.libp2p_discovery import Discovery
from p2p.engines.libp2p_network import remote
from p2p.engines.libp2p_shards import keep_subscribed
from p2p.engines.libp2p_stack import Stack, open_stack
from p2p.identity import Identity
from p2p.listening import check_listen, dialable
from p2p.netgroup import LOCAL
from p2p.toll import Toll
from p2p.topic import Topic
from p2p.types import Handlers, Peer, PeerId, Started, Unanswered


class Libp2pEngine:
    """Implements `Engine`. TCP, Noise, yamux, GossipSub, Kademlia.

    listen: multiaddresses; port 0 is replaced by the port it got, so a restart keeps it. bootstrap: multiaddresses ending in
    /p2p/<peer id>; our own is ignored. addressbook: the file of last known peers, or None to keep none. clock: seconds since the
    epoch. Raises BadAddress, naming what is not an address.
    """

    def __init__(
        self,
        identity: Identity,
        topic: Topic,
        handlers: Handlers,
        *,
        listen: Sequence[str],
        bootstrap: Sequence[str],
        addressbook: Path | None,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.me = identity.peer_id
        self._identity, self._topic, self._handlers = identity, topic, handlers
        self._clock, self._rng = clock, rng
        self._listen: Sequence[Endpoint] = [parse_listen(text) for text in listen]
        self._book = pinned_book(self.me, bootstrap)
        self._file = BookFile(self._book, addressbook)
        self._outbox = Outbox(clock)
        self._lasting = Lasting(clock)
        self._toll = Toll()
        self._desk = Desk(handlers.answer, lambda peer: self._toll.banned(peer, clock()))
        self._shards = Shards()
        self._asker: Asker | None = None
        self._stack: Stack | None = None
        self._discovery: Discovery | None = None

    @property
    def restarts(self) -> int:
        return self._lasting.restarts

    async def run(self, task_status: Started | None = None) -> None:
        """Be in the swarm until cancelled. Reports its addresses when it listens. Raises PortInUse or CannotListen at the start."""
        check_listen(self._listen)
        self._file.load()
        await self._lasting.run(self._live, self.addresses, task_status)

    def publish(self, frame: bytes, shard: int = 0) -> None:
        self._outbox.put(frame, shard)

    def subscribe(self, shards: Collection[int]) -> None:
        self._shards.change(shards)

    async def request(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        if self._asker is None:
            raise Unanswered(f"{peer}: the engine is not up")
        return await self._asker.ask(peer, question, limit)

    def shut_out(self, peer: PeerId, seconds: float) -> None:
        self._toll.ban(peer, self._clock(), seconds)
        if self._discovery is not None:
            self._discovery.hang_up(peer)

    async def announce(self, topic: Topic) -> None:
        if self._discovery is None:
            raise Unanswered("the engine is not up")
        await self._discovery.announce(topic)

    async def find(self, topic: Topic) -> Sequence[PeerId]:
        if self._discovery is None:
            raise Unanswered("the engine is not up")
        return await self._discovery.find(topic)

    def heard_nearby(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self._book.heard(peer, addresses, self._clock(), teller=NEARBY, source=LOCAL)

    def peers(self) -> Sequence[Peer]:
        """Connected members of our swarm; other peers may be connected too, for the DHT's sake."""
        if self._stack is None or self._discovery is None:
            return []
        members = self._discovery.members()
        found = []
        for peer, connections in self._stack.host.get_network().get_connections_map().items():
            if str(peer) in members and connections:
                first = connections[0]
                found.append(Peer(PeerId(str(peer)), _remote(first), first.direction.name.lower(), first._created_at))
        return found

    def addresses(self) -> Sequence[str]:
        if self._stack is None:
            return []
        listening = [str(address) for address in self._stack.host.get_transport_addrs()]
        return [f"{address}/p2p/{self.me}" for address in dialable(listening)]

    async def _live(self, up: Callable[[], None]) -> None:
        handlers, topic = self._handlers, self._topic
        try:
            async with open_stack(self._identity, topic, handlers.deliver, self._listen, self._clock, self._toll, handlers.score) as stack:
                self._stack = stack
                self._listen = [parse_listen(str(address)) for address in stack.host.get_transport_addrs()]
                stack.host.set_stream_handler(PROTOCOL, serve(self._desk))
                self._discovery = discovery = Discovery(stack, topic, self._shards, self._book, self._clock, self._rng)

                async def send(frame: bytes, shard: int) -> None:
                    await stack.pubsub.publish(str(topic.of(shard)), frame)

                try:
                    async with trio.open_nursery() as nursery:
                        self._asker = Asker(stack.host.get_network(), discovery.visit, nursery)
                        nursery.start_soon(self._outbox.send_all, lambda shard: not discovery.members(shard), send)
                        nursery.start_soon(discovery.run)
                        nursery.start_soon(keep_subscribed, stack, topic, self._shards)
                        nursery.start_soon(self._file.save_now_and_then)
                        nursery.start_soon(_hang_up_at_the_end, stack)
                        up()
                finally:
                    self._asker = None
        finally:
            self._stack = self._discovery = None
            self._file.save()


async def _hang_up_at_the_end(stack: Stack) -> None:
    """Before the other tasks end: what they write is written whole, and may wait for a peer that takes nothing."""
    try:
        await trio.sleep_forever()
    finally:
        await stack.host.get_network().close_sockets()


def _remote(connection: object) -> str:
    """The other end's multiaddress, or "" where the library does not know it."""
    host, port = remote(connection)
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}" if host else ""
