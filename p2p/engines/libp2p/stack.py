"""py-libp2p 0.8.1 put together for one swarm: TCP, Noise, yamux, GossipSub, Kademlia; and its failures contained.

The library's defaults do not suit a daemon that talks to strangers; each departure from them is named where it is made:

- `new_host` also accepts plaintext and secio, which prove nobody's identity. Here Noise alone.
- What a stream handler or a service task raises ends the whole host, and identify runs as a trio system task, whose failure ends
  the process. A peer can make them raise with a few bytes. Here such a failure ends that stream or that task.
- GossipSub's heartbeat is 120 s; it penalises whoever forwards more than 10 messages a second; it starts its message counter
  from the clock in seconds, so a node that restarts repeats its own ids and is not heard for `seen_ttl`.
- Listening sockets are opened with SO_REUSEPORT, so a second node on the same port is not refused but steals half the connections.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import multiaddr
import trio
from libp2p import generate_peer_id_from
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.peerstore import PeerStore
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.score import ScoreParams
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader

from p2p.address import Endpoint
from p2p.admission.host_bans import HostBans
from p2p.admission.reputation import SHUNNED
from p2p.engines.libp2p.metering import ITEM, READ, Meter, Metered, cost
from p2p.engines.libp2p.network import MUXERS, Muxing, Network
from p2p.engines.libp2p.services import keep_running, running
from p2p.envelope import MAX_FRAME
from p2p.errors import CannotListen
from p2p.identity import Identity
from p2p.peers.listen import dialable
from p2p.rate_limit import RateLimit
from p2p.topic import Topic
from p2p.types import PeerId, Score, Verdict

Hear = Callable[[bytes, PeerId | None, Sequence[str]], Verdict]  # a message's data, who handed it over, and its topics
MESHSUB = (TProtocol("/meshsub/1.1.0"), TProtocol("/meshsub/1.0.0"))
SEEN_TTL = 600  # seconds; twice the inbox's window, as its own memory is
HEARTBEAT = 1  # seconds
ADDRESSES_FOR = 5.0  # seconds
SUBSCRIPTIONS = 16  # topics of a peer that we take note of
STREAMS = 64  # that a peer may have open to us

log = logging.getLogger(__name__)

# The library silences itself on import. What it warns of is worth hearing, but for what every failed dial or lost peer causes.
for name, level in {
    "libp2p": logging.WARNING,
    "libp2p.network.auto_connector": logging.WARNING,
    "libp2p.kad_dht": logging.ERROR,
    "libp2p.pubsub": logging.ERROR,
}.items():
    logging.getLogger(name).setLevel(level)
logging.getLogger("libp2p").propagate = True
logging.getLogger("libp2p.transport.tcp").setLevel(logging.CRITICAL)  # a port in use: we say so ourselves


class Host(BasicHost):  # type: ignore[misc]  # the library is not typed for us
    """A host that outlives what its peers send."""

    _addrs: Sequence[Any] = ()
    _addrs_at = float("-inf")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._handled: Counter[Any] = Counter()  # peer -> streams of its that are being handled

    def get_addrs(self) -> list[Any]:
        """As of some seconds ago: the library asks for each message that it sends, and it takes a millisecond."""
        now = trio.current_time()
        if not self._addrs or now - self._addrs_at > ADDRESSES_FOR:
            self._addrs, self._addrs_at = super().get_addrs(), now
        return list(self._addrs)

    async def _swarm_stream_handler(self, net_stream: Any) -> None:
        peer = net_stream.muxed_conn.peer_id
        self._handled[peer] += 1
        try:
            if self._handled[peer] > STREAMS:
                await net_stream.reset()
            else:
                await super()._swarm_stream_handler(net_stream)
        except Exception as error:  # any handler of the library, on any bytes; the peer hears of it by the reset
            log.debug("a stream ended: %r", error)
            with contextlib.suppress(Exception):  # it may be closed already
                await net_stream.reset()
        finally:
            self._handled[peer] -= 1
            if not self._handled[peer]:
                del self._handled[peer]

    async def _identify_task_entry(self, peer_id: Any, reason: str) -> None:
        try:
            await super()._identify_task_entry(peer_id, reason)
        except Exception as error:  # a system task of trio: what it raises would end the process; the peer stays unidentified
            log.debug("identify failed: %r", error)


@dataclass(slots=True)
class _Visit:
    passed: bool  # nothing was wrong with the message


class _AnyShard(Container[object]):
    """Every topic of our swarms: whoever is in a shard said so when it met us, which may be long before we are in that shard too."""

    def __init__(self, topics: Sequence[Topic]) -> None:
        self._topics = topics

    def __contains__(self, topic: object) -> bool:
        return isinstance(topic, str) and any(ours.shard_in(topic) is not None for ours in self._topics)


class TopicPubsub(Pubsub):  # type: ignore[misc]
    """Pubsub that makes each connected peer pay for what it hands us, well or badly formed."""

    def __init__(
        self, *args: Any, hear: Hear, clock: Callable[[], float], topics: Sequence[Topic], rate_limit: RateLimit, **options: Any
    ) -> None:
        # validation_cache_ttl: our verdict depends on the time and the quota, so none is reused.
        super().__init__(
            *args,
            max_inbound_rpc_size=4 * MAX_FRAME,
            max_subscriptions_per_peer=SUBSCRIPTIONS,
            seen_ttl=SEEN_TTL,
            validation_cache_ttl=-1,
            **options,
        )
        self.allowed_topics = _AnyShard(topics)
        self.counter = int(clock() * 1e9)
        self.rate_limit = rate_limit
        self._hear = hear
        self._clock = clock
        self._visit = _Visit(True)
        self.meter = Meter(rate_limit, clock, self._cut_off)
        self._reading: Any = None  # the peer whose RPC is being gone through
        self.heard_at: dict[Any, float] = {}  # peer -> when anything came of it, in trio's time
        self._inbound: Counter[Any] = Counter()  # peer -> streams it has open to us

    async def enter(self, topic: Topic) -> Any:
        """Subscribe. Returns the library's subscription, whose messages `hear` has seen."""
        self.set_topic_validator(str(topic), self._validate, is_async_validator=False)
        return await self.subscribe(str(topic))

    async def leave(self, topic: Topic) -> None:
        await self.unsubscribe(str(topic))
        self.remove_topic_validator(str(topic))

    async def push_msg(self, msg_forwarder: Any, msg: Any) -> None:
        if msg_forwarder == self.my_id:
            await super().push_msg(msg_forwarder, msg)
            return
        if self.rate_limit.banned(str(msg_forwarder), self._clock()):
            return
        # The library does not await before the validator has run, so what `_validate` finds in `_visit` is this message's.
        visit = self._visit = _Visit(passed=self._is_msg_seen(msg))
        try:
            await super().push_msg(msg_forwarder, msg)
        finally:
            if not visit.passed:
                self.meter.pays(msg_forwarder, frames=0.0, broken=True)

    async def continuously_read_stream(self, stream: Any) -> None:
        await super().continuously_read_stream(Metered(stream, self._came))

    def _came(self, peer: Any) -> None:
        self._reading, self.heard_at[peer] = peer, trio.current_time()
        self.meter.talks(peer, READ)

    def _is_subscribed_to_msg(self, msg: Any) -> bool:
        """Asked for each message of an RPC before there is a task for it: ours or not, new or not, it is paid for here."""
        return self.meter.pays(self._reading) and super()._is_subscribed_to_msg(msg) and not self._is_msg_seen(msg)

    def handle_subscription(self, origin_id: Any, sub_message: Any) -> None:
        if self.meter.talks(origin_id, ITEM):
            super().handle_subscription(origin_id, sub_message)

    def _cut_off(self, peer: Any, why: str) -> None:
        log.warning("cut off %s: %s", peer, why)
        self.manager.run_task(self.host.disconnect, peer)

    # A peer that is back before its old connection is seen to be dead has two for a while. The library then keeps to the stream on
    # the dead one, where nothing it writes fails, and the peer is never sent anything again; and when a stream ends it forgets what
    # the peer subscribed to, though it said so on the other. So: a stream is as dead as its connection, and a subscription lasts as
    # long as any stream from the peer.

    async def handle_dead_peer_queue(self) -> None:
        async with self.dead_peer_receive_channel:
            self.event_handle_dead_peer_queue_started.set()
            async for peer in self.dead_peer_receive_channel:
                stream = self.peers.get(peer)
                connections = self.host.get_network().get_connections(peer)
                if stream is None or all(connection.muxed_conn is not stream.muxed_conn for connection in connections):
                    self._handle_dead_peer(peer)  # registers it again, where it is connected

    async def stream_handler(self, stream: Any) -> None:
        peer = stream.muxed_conn.peer_id
        self._inbound[peer] += 1
        try:
            await super().stream_handler(stream)
        finally:
            self._inbound[peer] -= 1
            if self._inbound[peer] <= 0:
                del self._inbound[peer]
                self._forget_all_subscriptions(peer)

    def _forget_all_subscriptions(self, peer_id: Any) -> None:
        if peer_id not in self._inbound:
            super()._forget_all_subscriptions(peer_id)

    def _validate(self, forwarder: Any, msg: Any) -> bool:
        if msg.from_id == self.my_id.to_bytes():
            self._visit.passed = True
            return True
        verdict = self._hear(msg.data, PeerId(str(forwarder)), msg.topicIDs)
        self._visit.passed = verdict is not Verdict.REJECT
        return verdict is Verdict.ACCEPT


class Router(GossipSub):  # type: ignore[misc]
    def _check_graft_flood_protection(self, peer_id: Any, topic: str) -> bool:  # noqa: ARG002
        """Backing off is enough, and what is asked too often is paid for (`libp2p_metered`). The library's own protection lasts longer than
        the back-off that it tells the peer of, by the fraction of a second that it leaves out there, and begins anew each time: who came
        back at the wrong moment was never let in again.
        """
        return True

    async def handle_rpc(self, rpc: Any, sender_peer_id: Any) -> None:
        if self.pubsub.meter.talks(sender_peer_id, cost(rpc.control)):
            await super().handle_rpc(rpc, sender_peer_id)

    def send_rpc(self, peer_id: Any, rpc: Any, priority: bool = False) -> None:
        """Without our signed addresses, which the library adds to each message: identify has told them, and every receiver of every copy
        would check their signature again.
        """
        rpc.ClearField("senderRecord")
        ours = any(message.from_id == self.pubsub.my_id.to_bytes() for message in rpc.publish)
        if ours and (queue := self.pubsub.peer_queues.get(peer_id)) is not None:
            # It holds 32: when others send more at once than can be passed on, what is lost is not ours.
            waiting = queue._queue
            if len(waiting) >= waiting.max_size and waiting._non_priority:
                waiting._non_priority.popleft()
        super().send_rpc(peer_id, rpc, priority or ours)

    async def leave(self, topic: str) -> None:
        """The library goes through the mesh while others change it."""
        for peer in self.mesh.pop(topic, set()):
            self._add_back_off(peer, topic, True)
            await self.emit_prune(topic, peer, False, True)


@dataclass(frozen=True, slots=True)
class Stack:
    host: Host
    pubsub: TopicPubsub
    router: Any  # GossipSub
    dht: Any  # KadDHT


@contextlib.asynccontextmanager
async def open_stack(
    identity: Identity,
    topics: Sequence[Topic],
    hear: Hear,
    listen: Sequence[Endpoint],
    clock: Callable[[], float],
    rate_limit: RateLimit | None = None,
    host_bans: HostBans | None = None,
    score: Score = lambda _: 0.0,
) -> AsyncIterator[Stack]:
    """The running stack, listening and subscribed to the topics. hear: called for each message that arrives. Raises CannotListen; later
    an exception group, where a service broke.
    """
    rate_limit = rate_limit or RateLimit()
    host = _host(identity)
    network = host.get_network()
    network.shut_out = lambda peer: rate_limit.banned(peer, clock())
    network.host_bans = host_bans or network.host_bans
    router = Router(
        protocols=MESHSUB,
        degree=4,  # in a small swarm everybody is in everybody's mesh up to degree_high, and that many copies of each frame come
        degree_low=3,
        degree_high=6,
        heartbeat_interval=HEARTBEAT,
        gossip_window=1,  # nearly all arrive by the mesh: to tell of each message three times cost a sixth of all bytes
        gossip_history=6,
        do_px=False,  # a pruning peer could make us dial anything
        prune_back_off=10,
        max_idontwant_messages=1000,
        adaptive_gossip_enabled=False,  # it stretches the heartbeat of a swarm it finds unhealthy, as any small one is
        spam_protection_enabled=False,  # ours is `RateLimit` and the inbox
        eclipse_protection_enabled=False,  # it wants three addresses in the mesh, which one LAN has not
        pending_messages_ttl=3.0,  # whole messages, kept for every connected peer that is not of this swarm
        # What we think of a peer is all that counts: whom the inbox ignores is not taken into the mesh and told nothing.
        score_params=ScoreParams(
            app_specific_score_fn=lambda peer: score(PeerId(str(peer))), p6_appl_slack_weight=1.0, graylist_threshold=SHUNNED
        ),
    )
    pubsub = TopicPubsub(host, router, hear=hear, clock=clock, topics=topics, rate_limit=rate_limit)
    wanted = [multiaddr.Multiaddr(str(endpoint)) for endpoint in listen]
    try:
        async with host.run(listen_addrs=wanted):
            if len(host.get_transport_addrs()) < len(wanted):
                raise CannotListen(f"cannot listen on all of {', '.join(map(str, listen))}; change swarm.listen")
            dht = KadDHT(host, DHTMode.SERVER)
            async with running(pubsub), running(router):
                await pubsub.wait_until_ready()
                subscriptions = [await pubsub.enter(topic) for topic in topics]
                try:
                    async with trio.open_nursery() as nursery:
                        for subscription in subscriptions:
                            nursery.start_soon(drain, subscription)
                        nursery.start_soon(_tidy, router)
                        nursery.start_soon(keep_running, dht)
                        yield Stack(host, pubsub, router, dht)
                        nursery.cancel_scope.cancel()
                finally:
                    await host.get_network().close_sockets()
    finally:
        pubsub.seen_messages.stop()  # a thread


def _host(identity: Identity) -> Host:
    keys = create_new_key_pair(identity.seed)
    noise = NoiseTransport(keys, noise_privkey=create_new_noise_key_pair().private_key)
    store = PeerStore()
    me = generate_peer_id_from(keys)
    store.add_key_pair(me, keys)
    upgrader = TransportUpgrader({NOISE: noise}, MUXERS)
    upgrader.muxer_multistream = Muxing(MUXERS)
    network = Network(
        me,
        store,
        upgrader,
        transports=[TCP()],
        retry_config=RetryConfig(max_retries=0),  # the address book knows when to try again
        connection_config=ConnectionConfig(min_connections=0, low_watermark=0, high_watermark=128, max_connections=160, dial_timeout=5.0),
    )
    return Host(network, addrs_factory=lambda found: [multiaddr.Multiaddr(text) for text in dialable([str(address) for address in found])])


async def drain(subscription: Any) -> None:
    async for _ in subscription:  # delivered by the validator already; the channel would fill up and complain
        pass


async def _tidy(router: Any) -> None:
    """Two of the router's records only grow, or keep a thousand whole messages, while adaptive gossip is off."""
    while True:
        await trio.sleep(10)
        router.recent_message_deliveries.clear()
        router.equivocation_detection.clear()  # the inbox refuses a repeated sequence number itself
