"""The p2p engine on py-libp2p. If the library fails, it is restarted with the same key and port."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import trio

from p2p.address import own_ports
from p2p.engines.libp2p.circuits import Circuits
from p2p.engines.libp2p.connections import Libp2pConnections
from p2p.engines.libp2p.metering import message_limits
from p2p.engines.libp2p.relay import DCUTR, GUEST_BYTES_PER_S, HOP, STOP, Relay, RelayLimits
from p2p.engines.libp2p.stack import Host, Stack, open_stack
from p2p.engines.libp2p.streams import PROTOCOL, Libp2pRequests, serve
from p2p.engines.network_engine import NetworkEngine
from p2p.identity import Identity
from p2p.peers.listen import dialable, held_ports
from p2p.topic import Topic
from p2p.types import Handlers, PeerId


class Libp2pEngine(NetworkEngine):
    """Implements `P2pEngine` on TCP, Noise, yamux, GossipSub, Kademlia, circuit relay and hole punching.

    options: the keyword arguments of `NetworkEngine`.
    """

    def __init__(self, identity: Identity, topic: Topic, handlers: Handlers, **options: Any) -> None:
        super().__init__(identity, topic, handlers, message_limits(), **options)
        self._stack: Stack | None = None
        self._circuits: Circuits | None = None

    def addresses(self) -> Sequence[str]:
        if self._stack is None:
            return []
        # `reached_at` may differ from the listen addresses, if a router forwards a port to us.
        own = dict.fromkeys([*dialable([*map(str, self._listen)]), self.reached_at()])
        return [f"{address}/p2p/{self.me}" for address in own if address and "/p2p-circuit" not in address]

    def told_of(self, peer: PeerId, address: str) -> None:
        super().told_of(peer, address)
        if self._circuits is not None:
            self._circuits.note(peer, [address])

    def reached_at(self) -> str:
        return self._circuits.reached_at() if self._circuits is not None else ""

    @property
    def relayed(self) -> Sequence[str]:
        """Our multiaddresses through relays, if no node can dial us directly."""
        return self._circuits.addresses() if self._circuits is not None else []

    async def _live(self, up: Callable[[], None]) -> None:
        starting = contextlib.ExitStack()
        try:
            listen = starting.enter_context(held_ports(self._listen, own_ports(self.me)))
            async with open_stack(
                self._identity,
                self._topics,
                self._on_frame,
                listen,
                self._clock,
                self._rate_limit,
                self._host_bans,
                self._handlers.score,
                self._traffic,
                self._prepare,
            ) as stack:
                starting.close()
                self._stack = stack
                self._listen = listen
                self._circuits = circuits = Circuits(
                    stack.host,
                    self._book,
                    self.request,
                    lambda peer: discovery.reach(peer),
                    lambda: connections.connected().values(),
                    self._banned,
                    self._listen,
                    self._clock,
                )
                stack.host.set_stream_handler(STOP, circuits.take_in)
                stack.host.set_stream_handler(DCUTR, circuits.hole_punching.handle)
                connections = Libp2pConnections(stack, self._topics, self._clock, circuits.note)
                self._discovery = discovery = self._discover(connections)
                async with trio.open_nursery() as nursery:
                    self._ask = Libp2pRequests(stack.host.get_network(), circuits.reach, nursery).ask
                    nursery.start_soon(
                        self._send_all,
                        connections.in_mesh,
                        partial(stack.pubsub.publish, str(self._topic)),
                    )
                    for task in (
                        discovery.run,
                        connections.ping,
                        circuits.keep,
                        self._book_file.save_regularly,
                    ):
                        nursery.start_soon(task)
                    try:
                        up()
                        await trio.sleep_forever()
                    finally:
                        # No more questions may start in the nursery.
                        self._ask = None
                        # Close the connections before the nursery waits for the other tasks. A write cannot
                        # be cancelled, and would wait for a peer that reads nothing.
                        await stack.host.get_network().close_sockets()
        finally:
            starting.close()
            self._stack = self._discovery = self._circuits = None
            self._book_file.save()

    def _prepare(self, host: Host) -> None:
        """Set the stream handlers before the host listens.

        A peer may ask a question at once, and it learns only once, from identify, that we are a relay.
        """
        host.get_network().vouches = self._book.vouches
        limits = RelayLimits() if self._public else RelayLimits(rate=GUEST_BYTES_PER_S)
        host.set_stream_handler(PROTOCOL, serve(self._responder))
        host.set_stream_handler(HOP, Relay(host, self._banned, self._clock, limits).handle)
