"""The p2p engine on p2pd, the Go daemon that hivemind ships. Works with `Libp2pEngine`s in one swarm.

It differs from `Libp2pEngine`, because p2pd's control socket has no validators and does not say which peer
forwarded a message:

- We check a frame only after p2pd has forwarded it. Before that p2pd checks only the libp2p signature. So a
  node with this engine forwards each bad frame of a hostile peer once. Nodes with `Libp2pEngine` stop the
  frame, and may cut off the node that forwarded it (`p2p.rate_limit`).
- We charge the frame's author instead of the forwarder, and disconnect a banned author whenever it connects.
- p2pd does not report the author of messages that it drops. `flood_watch` finds their senders by the kernel's
  byte counters.
- Only peers that our discovery dialled count as outbound. Of the other connections it is unknown whether the
  peer dialled us or p2pd's DHT dialled the peer.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import trio

from p2p.address import Endpoint, own_ports, parse_bootstrap, parse_endpoint
from p2p.engines.discovery import Discovery
from p2p.engines.network_engine import NetworkEngine
from p2p.engines.traffic import Line, line_of_host
from p2p.errors import EngineMissing
from p2p.identity import Identity
from p2p.peers.listen import dialable, has_route, held_ports
from p2p.rate_limit import RateLimit, TokenBuckets
from p2p.topic import Topic
from p2p.types import Handlers, PeerId, Verdict
from swarmd_engine_hivemind.connections import (
    HEARTBEAT_S,
    HivemindConnections,
    direct,
    texts,
)
from swarmd_engine_hivemind.flood_watch import FloodWatch
from swarmd_engine_hivemind.p2pd import P2pd, P2pdGone, P2pdRefused, Wire, missing, open_p2pd, peer_of
from swarmd_engine_hivemind.streams import HivemindRequests, serve

# Seconds between two questions to p2pd for our addresses.
IDENTIFY_EVERY_S = 10.0
# The kinds of charged traffic.
MESSAGES, BROKEN = "messages", "broken messages"
# Bootstrap peers that may relay for us if we cannot be dialled.
MAX_RELAYS = 8
# Messages are signed and verified, like py-libp2p's default: both engines drop unsigned ones. p2pd listens
# only on TCP, because the address book has only TCP addresses. As a relay it forwards at most 64 MiB for each
# pair of peers and buffers 64 KiB; the defaults are 4 GiB and 16 MiB.
FLAGS = (
    "-pubsub",
    "-pubsubRouter=gossipsub",
    "-pubsubSign=true",
    "-pubsubSignStrict=true",
    f"-gossipsubHeartbeatInterval={HEARTBEAT_S}s",
    "-dhtServer",
    "-connManager",
    "-connLo=128",
    "-connHi=160",
    # Tells peers whether they can be dialled, and punches holes.
    "-autonat",
    "-relayDataLimit=67108864",
    "-relayBufferSize=65536",
)

log = logging.getLogger(__name__)


class HivemindEngine(NetworkEngine):
    """Implements `P2pEngine` by p2pd, a child process.

    p2pd speaks TCP, Noise, yamux, GossipSub, Kademlia, AutoNAT, circuit relay and hole punching.

    For arguments and errors see `NetworkEngine`. A public engine relays from the start. It does not
    wait for AutoNAT, which needs peers that can be dialled.

    Raises:
        EngineMissing: p2pd cannot run here.
    """

    def __init__(
        self,
        identity: Identity,
        topic: Topic,
        handlers: Handlers,
        *,
        bootstrap: Sequence[str],
        **options: Any,
    ) -> None:
        if (reason := missing()) is not None:
            raise EngineMissing(f'{reason}; or set swarm.engine = "libp2p"')
        of_one_author = RateLimit({MESSAGES: TokenBuckets(50.0, 300.0), BROKEN: TokenBuckets(0.2, 5.0)})
        super().__init__(identity, topic, handlers, of_one_author, bootstrap=bootstrap, **options)
        self._relays = [text for text in bootstrap if parse_bootstrap(text)[0] != self.me]
        self._addresses: list[str] = []
        # Our multiaddresses through relays, if we cannot be dialled directly.
        self.relayed: Sequence[str] = ()

    def addresses(self) -> Sequence[str]:
        return self._addresses

    async def _live(self, up: Callable[[], None]) -> None:
        starting = contextlib.ExitStack()
        listen = starting.enter_context(held_ports(self._listen, own_ports(self.me)))
        try:
            async with (
                open_p2pd(self._identity, self._flags(listen)) as p2pd,
                p2pd.wire() as inbox,
                p2pd.wire() as outbox,
            ):
                await self._check_ports(p2pd, listen)
                starting.close()
                await self._note_addresses(p2pd, listen)
                # Keep the ports, so that they are the same after a restart.
                self._listen = listen
                await self._subscribe(p2pd, inbox, self._topic)
                connections = HivemindConnections(
                    p2pd, self.me, self._topics, self._banned, self._host_bans, self._clock
                )
                self._discovery = discovery = self._discover(connections)
                watch = FloodWatch(p2pd, self._cut_off_for_junk, self._traffic)
                requests = HivemindRequests(p2pd, discovery.reach, watch.useful)
                self._ask = requests.ask

                async with requests, trio.open_nursery() as nursery:
                    nursery.start_soon(self._receive, p2pd, inbox, discovery, watch)
                    for topic in self._handlers.also:
                        nursery.start_soon(self._be_in, p2pd, topic, discovery, watch)
                    nursery.start_soon(watch.run)
                    # Started before discovery, because a peer that finds us may ask a question at once.
                    await nursery.start(serve, p2pd, self._responder, self._line)
                    nursery.start_soon(self._send_all, connections.in_mesh, partial(self._send, p2pd, outbox))
                    nursery.start_soon(discovery.run)
                    nursery.start_soon(self._book_file.save_regularly)
                    nursery.start_soon(self._keep_addresses, p2pd, listen)
                    try:
                        up()
                        await trio.sleep_forever()
                    finally:
                        # Kill p2pd before it can leave the topic. After a leave, neighbours would keep us out
                        # of their mesh for 10 s, and for 60 s if we ask meanwhile.
                        p2pd.end()
        finally:
            starting.close()
            self._discovery = self._ask = None
            self._addresses, self.relayed = [], ()
            self._book_file.save()

    def _line(self, peer: PeerId) -> Line:
        """Return a peer's path in the shared upload rate. Peers behind one relay count as one machine."""
        address = next((each.address for each in self.peers() if each.id == peer), "")
        endpoint = parse_endpoint(address)
        return line_of_host(endpoint.host if endpoint else address, peer)

    def _flags(self, listen: Sequence[Endpoint]) -> list[str]:
        flags = [*FLAGS, f"-hostAddrs={','.join(map(str, listen))}"]
        if self._public:
            flags += ["-forceReachabilityPublic"]
        elif self._relays:
            # One address of each relay, because p2pd waits for minutes if the first one cannot be dialled.
            relays: dict[PeerId, str] = {}
            for text in sorted(self._relays, key=lambda text: not has_route(parse_bootstrap(text)[1])):
                relays.setdefault(parse_bootstrap(text)[0], text)
            trusted = ",".join([*relays.values()][:MAX_RELAYS])
            flags += ["-autoRelay", "-relayDiscovery=false", f"-trustedRelays={trusted}"]
        return flags

    async def _identify(self, p2pd: P2pd) -> list[str]:
        """Return p2pd's addresses, without relays. Raises P2pdGone if it runs with another key."""
        identified = (await p2pd.ask(type=p2pd.pb.Request.IDENTIFY)).identify
        if peer_of(identified.id) != self.me:
            raise P2pdGone("p2pd runs with another key")
        found = texts(identified.addrs)
        self.relayed = [text for text in found if "/p2p-circuit" in text]
        return [str(endpoint) for text in direct(found) if (endpoint := parse_endpoint(text)) is not None]

    async def _check_ports(self, p2pd: P2pd, listen: Sequence[Endpoint]) -> None:
        """Check that p2pd listens on our ports. Raises P2pdGone.

        Call this only at the start. Once p2pd finds that it cannot be dialled, it no longer reports its
        public addresses.
        """
        ports = {int(text.rsplit("/", 1)[1]) for text in await self._identify(p2pd)}
        if absent := {endpoint.port for endpoint in listen} - ports:
            raise P2pdGone(f"p2pd does not listen on port {', '.join(map(str, sorted(absent)))}")

    async def _note_addresses(self, p2pd: P2pd, listen: Sequence[Endpoint]) -> None:
        """Note the addresses at which peers can dial us: first our own, then those that peers see."""
        addresses = [*dialable([str(endpoint) for endpoint in listen]), *await self._identify(p2pd)]
        self._addresses = [f"{address}/p2p/{self.me}" for address in dict.fromkeys(addresses)]

    async def _keep_addresses(self, p2pd: P2pd, listen: Sequence[Endpoint]) -> None:
        while True:
            await trio.sleep(IDENTIFY_EVERY_S)
            await self._note_addresses(p2pd, listen)

    async def _subscribe(self, p2pd: P2pd, inbox: Wire, topic: Topic) -> None:
        """Subscribe to a topic for as long as this connection to p2pd is open."""
        pubsub = {"type": p2pd.pb.PSRequest.SUBSCRIBE, "topic": str(topic)}
        await p2pd.answer(inbox, type=p2pd.pb.Request.PUBSUB, pubsub=pubsub)

    async def _be_in(self, p2pd: P2pd, topic: Topic, discovery: Discovery, watch: FloodWatch) -> None:
        async with p2pd.wire() as inbox:
            await self._subscribe(p2pd, inbox, topic)
            await self._receive(p2pd, inbox, discovery, watch)

    async def _send(self, p2pd: P2pd, outbox: Wire, frame: bytes) -> None:
        pubsub = {"type": p2pd.pb.PSRequest.PUBLISH, "topic": str(self._topic), "data": frame}
        try:
            await p2pd.answer(outbox, type=p2pd.pb.Request.PUBSUB, pubsub=pubsub)
        except P2pdRefused as error:
            log.warning("p2pd did not send a frame: %s", error)

    async def _receive(self, p2pd: P2pd, inbox: Wire, discovery: Discovery, watch: FloodWatch) -> None:
        """Receive messages until cancelled.

        This must not wait for long, because p2pd queues only 32 messages for us and drops the rest.
        """
        async with trio.open_nursery() as nursery:
            while True:
                message = await inbox.receive(p2pd.pb.PSMessage)
                watch.useful(len(message.data))
                # p2pd has checked the author's signature.
                author = peer_of(getattr(message, "from"))
                if author is None or author == self.me:
                    continue
                if self._banned(author):
                    # The peer has reconnected, and p2pd forwards its messages until we hang up.
                    nursery.start_soon(discovery.hang_up, author)
                    continue
                verdict = self._on_frame(message.data, None, message.topicIDs)
                what = BROKEN if verdict is Verdict.REJECT else MESSAGES
                if not self._rate_limit.pay(author, self._clock(), what):
                    log.warning("cut off %s: too many %s", author, what)
                    nursery.start_soon(discovery.hang_up, author)

    def _cut_off_for_junk(self, peer: PeerId) -> None:
        log.warning("cut off %s: too many bytes that p2pd drops", peer)
        self.shut_out(peer, self._rate_limit.ban_again(peer, self._clock()))
