"""The p2p engine on p2pd, the Go daemon that hivemind ships. Meets `Libp2pEngine`s in the same swarm.

Two things differ from `Libp2pEngine`, because p2pd's control socket knows no validators and does not say who
forwarded a message:

- A frame is admitted after p2pd has passed it on. p2pd checks the libp2p signature before that; our own and
  all other rules come after. So what a hostile peer signs goes through a node with this engine, once, and is
  stopped by the others, which may cut off the node that passed it on (`p2p.rate_limit`). Here the author is
  charged, and disconnected as often as it connects. Of what p2pd drops by itself it names no author:
  `flood_watch` finds the senders by the kernel's byte counters.
- It is unknown whether a peer dialled us or p2pd's DHT dialled it: only what we dialled is "outbound".
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

# How often to ask p2pd where others see us.
IDENTIFY_EVERY_S = 10.0
# What an author is charged for.
MESSAGES, BROKEN = "messages", "broken messages"
# Bootstrap peers that are asked to relay for us when nobody can dial us.
MAX_RELAYS = 8
# Signed and verified, as py-libp2p's default is: both engines drop what is not. TCP alone is listened on: the
# address book knows nothing else. A relay passes on at most 64 MiB for each pair and keeps 64 KiB; p2pd's
# defaults are 4 GiB and 16 MiB.
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
    # Tells others whether they can be dialled, and punches holes.
    "-autonat",
    "-relayDataLimit=67108864",
    "-relayBufferSize=65536",
)

log = logging.getLogger(__name__)


class HivemindEngine(NetworkEngine):
    """Implements `P2pEngine` by p2pd, a child process.

    p2pd speaks TCP, Noise, yamux, GossipSub, Kademlia, AutoNAT, circuit relay and hole punching.

    The arguments are those of `NetworkEngine`. A public engine relays from the start, and does not wait for
    AutoNAT, which takes peers that can be dialled themselves. Raises also EngineMissing where p2pd cannot
    run.
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
        # Multiaddresses through relays that have taken us in, since nobody can dial us.
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
                # Kept, so that the ports are the same after a restart.
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
                    # Started first, as whoever finds us may ask at once.
                    await nursery.start(serve, p2pd, self._responder, self._line)
                    nursery.start_soon(self._send_all, connections.in_mesh, partial(self._send, p2pd, outbox))
                    nursery.start_soon(discovery.run)
                    nursery.start_soon(self._book_file.save_regularly)
                    nursery.start_soon(self._keep_addresses, p2pd, listen)
                    try:
                        up()
                        await trio.sleep_forever()
                    finally:
                        # p2pd is killed before it can leave the topic: neighbours keep a peer that leaves out
                        # of their mesh for 10 s, and one that asks meanwhile for 60.
                        p2pd.end()
        finally:
            starting.close()
            self._discovery = self._ask = None
            self._addresses, self.relayed = [], ()
            self._book_file.save()

    def _line(self, peer: PeerId) -> Line:
        """Return how a peer shares our upload. All that come through one relay count as one machine."""
        address = next((each.address for each in self.peers() if each.id == peer), "")
        endpoint = parse_endpoint(address)
        return line_of_host(endpoint.host if endpoint else address, peer)

    def _flags(self, listen: Sequence[Endpoint]) -> list[str]:
        flags = [*FLAGS, f"-hostAddrs={','.join(map(str, listen))}"]
        if self._public:
            flags += ["-forceReachabilityPublic"]
        elif self._relays:
            # One address of each: p2pd waits for minutes once the first that it is given cannot be dialled.
            relays: dict[PeerId, str] = {}
            for text in sorted(self._relays, key=lambda text: not has_route(parse_bootstrap(text)[1])):
                relays.setdefault(parse_bootstrap(text)[0], text)
            trusted = ",".join([*relays.values()][:MAX_RELAYS])
            flags += ["-autoRelay", "-relayDiscovery=false", f"-trustedRelays={trusted}"]
        return flags

    async def _identify(self, p2pd: P2pd) -> list[str]:
        """Return where p2pd says it can be reached, without relays. Raises P2pdGone where it is not us."""
        identified = (await p2pd.ask(type=p2pd.pb.Request.IDENTIFY)).identify
        if peer_of(identified.id) != self.me:
            raise P2pdGone("p2pd runs under another key than ours")
        found = texts(identified.addrs)
        self.relayed = [text for text in found if "/p2p-circuit" in text]
        return [str(endpoint) for text in direct(found) if (endpoint := parse_endpoint(text)) is not None]

    async def _check_ports(self, p2pd: P2pd, listen: Sequence[Endpoint]) -> None:
        """Check that p2pd listens on our ports. Raises P2pdGone.

        Only at the start: when nobody can dial us, p2pd no longer names its public addresses.
        """
        ports = {int(text.rsplit("/", 1)[1]) for text in await self._identify(p2pd)}
        if absent := {endpoint.port for endpoint in listen} - ports:
            raise P2pdGone(f"p2pd does not listen on port {', '.join(map(str, sorted(absent)))}")

    async def _note_addresses(self, p2pd: P2pd, listen: Sequence[Endpoint]) -> None:
        """Note where others can dial us: our own addresses first, then those that others see us at."""
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

        Nothing here may wait for long: p2pd keeps 32 messages for us and drops the rest.
        """
        async with trio.open_nursery() as nursery:
            while True:
                message = await inbox.receive(p2pd.pb.PSMessage)
                watch.useful(len(message.data))
                # The author is proved by the signature that p2pd checked.
                author = peer_of(getattr(message, "from"))
                if author is None or author == self.me:
                    continue
                if self._banned(author):
                    # The peer came back; p2pd passes on what it sends until it is gone again.
                    nursery.start_soon(discovery.hang_up, author)
                    continue
                verdict = self._on_frame(message.data, None, message.topicIDs)
                what = BROKEN if verdict is Verdict.REJECT else MESSAGES
                if not self._rate_limit.pay(author, self._clock(), what):
                    log.warning("cut off %s: too many %s", author, what)
                    nursery.start_soon(discovery.hang_up, author)

    def _cut_off_for_junk(self, peer: PeerId) -> None:
        log.warning("cut off %s: it sends much that p2pd has no use for", peer)
        self.shut_out(peer, self._rate_limit.ban_again(peer, self._clock()))
