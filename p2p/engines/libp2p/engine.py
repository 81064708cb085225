"""The engine that goes over the network, on py-libp2p. Whatever breaks in the library, this starts it again and stays what it was."""

from collections.abc import Callable, Sequence
from typing import Any

import trio

from p2p.address import parse_listen
from p2p.engines.common.network_engine import Networked
from p2p.engines.libp2p.discovery import Discovery
from p2p.engines.libp2p.network import remote
from p2p.engines.libp2p.shards import keep_subscribed
from p2p.engines.libp2p.stack import Stack, open_stack
from p2p.engines.libp2p.streams import PROTOCOL, Asker, serve
from p2p.identity import Identity
from p2p.peers.listen import check_listen, dialable
from p2p.rate_limit import RateLimit
from p2p.topic import Topic
from p2p.types import Handlers, Peer, PeerId, Started


class Libp2pEngine(Networked):
    """Implements `Engine`. TCP, Noise, yamux, GossipSub, Kademlia. The arguments are those of `Networked`."""

    def __init__(self, identity: Identity, topic: Topic, handlers: Handlers, **options: Any) -> None:
        super().__init__(identity, topic, handlers, RateLimit(), **options)
        self._stack: Stack | None = None
        self._discovery: Discovery | None = None

    async def run(self, task_status: Started | None = None) -> None:
        """Be in the swarm until cancelled. Reports its addresses when it listens. Raises PortInUse or CannotListen at the start."""
        check_listen(self._listen)
        self._file.load()
        await self._lasting.run(self._live, self.addresses, task_status)

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
        topics = [topic, *handlers.also]
        try:
            opened = open_stack(
                self._identity, topics, self._hear, self._listen, self._clock, self._rate_limit, self._host_bans, handlers.score
            )
            async with opened as stack:
                self._stack = stack
                self._listen = [parse_listen(str(address)) for address in stack.host.get_transport_addrs()]
                stack.host.set_stream_handler(PROTOCOL, serve(self._desk))
                self._finding = self._discovery = discovery = Discovery(stack, topics, self._shards, self._book, self._clock, self._rng)

                async def send(frame: bytes, shard: int) -> None:
                    await stack.pubsub.publish(str(topic.of(shard)), frame)

                try:
                    async with trio.open_nursery() as nursery:
                        self._asking = Asker(stack.host.get_network(), discovery.visit, nursery)
                        nursery.start_soon(self._outbox.send_all, lambda shard: not discovery.members(shard), send)
                        nursery.start_soon(discovery.run)
                        nursery.start_soon(keep_subscribed, stack, topic, self._shards)
                        nursery.start_soon(self._file.save_now_and_then)
                        nursery.start_soon(_hang_up_at_the_end, stack)
                        up()
                finally:
                    self._asking = None
        finally:
            self._stack = self._discovery = self._finding = None
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
