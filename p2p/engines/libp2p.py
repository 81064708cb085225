"""The engine that goes over the network, on py-libp2p. Whatever breaks in the library, this starts it again and stays what it was."""

import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import trio

from p2p.address import Endpoint, parse_listen
from p2p.engines.lasting import BookFile, Lasting, Outbox, pinned_book
from p2p.engines.libp2p_discovery import Discovery
from p2p.engines.libp2p_network import remote
from p2p.engines.libp2p_stack import Stack, open_stack
from p2p.identity import Identity
from p2p.listening import check_listen, dialable
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

    def publish(self, frame: bytes, shard: int = 0) -> None:  # noqa: ARG002
        self._outbox.put(frame)

    def subscribe(self, shards: Collection[int]) -> None:
        self._shards = frozenset(shards)

    async def request(self, peer: PeerId, question: bytes, limit: int) -> bytes:  # noqa: ARG002
        raise Unanswered(f"{peer} cannot be asked yet")

    def shut_out(self, peer: PeerId, seconds: float) -> None:  # noqa: ARG002
        pass

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
        try:
            async with open_stack(self._identity, str(self._topic), self._handlers.deliver, self._listen, self._clock) as stack:
                self._stack = stack
                self._listen = [parse_listen(str(address)) for address in stack.host.get_transport_addrs()]
                self._discovery = discovery = Discovery(stack, self._topic, self._book, self._clock, self._rng)

                async def send(frame: bytes) -> None:
                    await stack.pubsub.publish(str(self._topic), frame)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._outbox.send_all, lambda: not discovery.members(), send)
                    nursery.start_soon(discovery.run)
                    nursery.start_soon(self._file.save_now_and_then)
                    up()
        finally:
            self._stack = self._discovery = None
            self._file.save()


def _remote(connection: object) -> str:
    """The other end's multiaddress, or "" where the library does not know it."""
    host, port = remote(connection)
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}" if host else ""
