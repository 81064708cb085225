"""The py-libp2p 0.8.1 stack for one swarm: TCP, Noise, yamux, GossipSub, Kademlia, failures contained.

The library's defaults do not suit a daemon that talks to strangers. Each change is named where it is made:

- `new_host` also accepts plaintext and secio, which prove nobody's identity. Here Noise alone.
- An exception in a stream handler or a service task ends the whole host; one in identify, a trio system task,
  ends the process. A peer can cause both with a few bytes. Here such a failure ends that stream or that task.
- GossipSub's heartbeat is 120 s; it penalises peers that forward more than 10 messages a second; it starts
  its message counter from the clock in seconds, so a node that restarts repeats its own ids and is not heard
  for `seen_ttl`.
- Listening sockets are opened with SO_REUSEPORT, so a second node on the same port is not refused but steals
  half the connections.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import multiaddr
import trio
from libp2p import generate_peer_id_from
from libp2p.crypto import serialization
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyType
from libp2p.crypto.x25519 import create_new_key_pair as create_new_noise_key_pair
from libp2p.host.basic_host import BasicHost
from libp2p.host.ping import ID as PING_PROTOCOL
from libp2p.identity.identify import identify
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer import envelope
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.tools.anyio_service import TrioManager
from libp2p.transport.upgrader import TransportUpgrader

from p2p.address import Endpoint
from p2p.admission.host_bans import HostBans
from p2p.engines.libp2p.dht import BoundedPeerStore, Dht
from p2p.engines.libp2p.metering import Negotiation, message_limits
from p2p.engines.libp2p.network import MUXERS, LimitedNetwork, MuxerChoice, circuit, direct
from p2p.engines.libp2p.pubsub import OnFrame, Router, TopicPubsub
from p2p.engines.libp2p.streams import CountedTcp, end
from p2p.engines.traffic import Traffic
from p2p.errors import CannotListen
from p2p.identity import Identity
from p2p.peers.listen import dialable
from p2p.rate_limit import RateLimit, counted
from p2p.topic import Topic
from p2p.types import Score

# Streams that a peer may have open to us.
MAX_STREAMS = 64

log = logging.getLogger(__name__)

# The library silences itself on import. What it warns of is worth hearing, but for what every failed dial or
# lost peer causes, and for what a peer can cause with each message, or with each byte (yamux), with each
# forged proof (noise), or with each address that it names in the DHT (transport, dns_utils). A port in use we
# report ourselves.
for name, level in {
    "libp2p": logging.WARNING,
    "libp2p.network.auto_connector": logging.WARNING,
    "libp2p.kad_dht": logging.CRITICAL,
    "libp2p.pubsub": logging.CRITICAL,
    "libp2p.host.basic_host": logging.CRITICAL,
    "libp2p.identity": logging.CRITICAL,
    "libp2p.protocol_muxer": logging.CRITICAL,
    "libp2p.security.noise": logging.CRITICAL,
    "libp2p.stream_muxer": logging.CRITICAL,
    "libp2p.transport": logging.CRITICAL,
    "libp2p.utils.dns_utils": logging.CRITICAL,
}.items():
    logging.getLogger(name).setLevel(level)
logging.getLogger("libp2p").propagate = True
# A dial that meets another key, or nobody of libp2p, or that is cut off.
logging.getLogger("libp2p.network.swarm").addFilter(
    lambda record: not any(words in str(record.msg) for words in ("to upgrade", "[ADDCONN_FAIL]"))
)

# Replaced in the library, which would tell a peer behind a relay that it is at `/p2p/<relay>/p2p-circuit`:
# js-libp2p then gives up on identify, and so on hole punching. No address is seen there, and none is told.
identify._prefer_circuit_addr = lambda _host, _peer, seen: seen

# Taken from the library: no member has such a key, and with one of RSA whose exponent is as long as itself a
# signature takes 5 ms to check. A peer may send hundreds a second.
for kind in (KeyType.RSA, KeyType.Secp256k1):
    del serialization.key_type_to_public_key_deserializer[kind.value]
envelope.pub_key_from_protobuf = lambda key: serialization.deserialize_public_key(key.SerializeToString())


class Host(BasicHost):  # type: ignore[misc]  # the library is not typed for us
    """A host that no peer can end by what it sends.

    admits_stream: called with a peer that opens a stream and the relay it came through, or "".
    """

    _addrs: Sequence[Any] = ()
    _circuits: Sequence[Any] = ()
    _addrs_at = float("-inf")

    def __init__(self, *args: Any, admits_stream: Callable[[Any, str], bool], **options: Any) -> None:
        super().__init__(*args, **options)
        self.multiselect: Multiselect = Negotiation(self.multiselect.handlers)
        self._handled: Counter[Any] = Counter()  # streams that are being handled, by peer
        self._admits_stream = admits_stream

    def get_addrs(self) -> list[Any]:
        """Return our addresses, cached for five seconds.

        The library asks for them with each message that it sends, and they take a millisecond.
        """
        now = trio.current_time()
        if not self._addrs or now - self._addrs_at > 5.0:
            self._addrs, self._addrs_at = [*super().get_addrs(), *self._circuits], now
        return list(self._addrs)

    async def announce_through(self, circuits: Sequence[str]) -> None:
        """Tell connected peers and the DHT of these addresses through relays, in place of those before."""
        self._circuits, self._addrs = (
            [multiaddr.Multiaddr(f"{address}/p2p/{self.get_id()}") for address in circuits],
            (),
        )
        await self._push_identify_to_all_peers()

    async def _swarm_stream_handler(self, net_stream: Any) -> None:
        peer, through = net_stream.muxed_conn.peer_id, circuit(net_stream)
        with counted(self._handled, peer):
            try:
                if (
                    not self._admits_stream(peer, through.address if through else "")
                    or self._handled[peer] > MAX_STREAMS
                ):
                    await net_stream.reset()
                else:
                    await super()._swarm_stream_handler(net_stream)
            except Exception as error:
                # Any handler of the library may fail, on any bytes; the peer learns of it by the reset.
                log.debug("a stream ended: %r", error)
                await end(net_stream)

    async def _on_notifee_connected(self, conn: Any) -> None:
        """Have the peer identify itself over each new direct connection: it may be elsewhere now.

        The library asks nobody twice, and would go on telling where a peer was when it first came.
        """
        if circuit(conn) is None:
            self._identified_peers.pop(conn.muxed_conn.peer_id, None)
        await super()._on_notifee_connected(conn)

    def _has_cached_protocols(self, peer_id: Any) -> bool:
        if direct(self._network.get_connections(peer_id)):
            return peer_id in self._identified_peers
        return bool(super()._has_cached_protocols(peer_id))

    async def _identify_task_entry(self, peer_id: Any, reason: str) -> None:
        try:
            await super()._identify_task_entry(peer_id, reason)
        except Exception as error:
            # This is a system task of trio: what it raises would end the process. The peer stays
            # unidentified.
            log.debug("identify failed: %r", error)


@dataclass(frozen=True, slots=True)
class Stack:
    host: Host
    pubsub: TopicPubsub
    router: Router
    dht: Dht


@contextlib.asynccontextmanager
async def open_stack(
    identity: Identity,
    topics: Sequence[Topic],
    on_frame: OnFrame,
    listen: Sequence[Endpoint],
    clock: Callable[[], float],
    rate_limit: RateLimit | None = None,
    host_bans: HostBans | None = None,
    score: Score = lambda _: 0.0,
    traffic: Traffic | None = None,
    prepare: Callable[[Host], None] = lambda _: None,
) -> AsyncIterator[Stack]:
    """Start the stack, listening and subscribed to the topics.

    on_frame: called for each message that arrives. prepare: called before it listens, to set stream handlers.
    Raises CannotListen; later an exception group, where a service broke.
    """
    rate_limit = rate_limit or message_limits()
    host = make_host(
        identity,
        traffic,
        lambda peer: rate_limit.banned(peer, clock()),
        host_bans,
        lambda peer, relay: pubsub.meter.charge_stream(peer, relay),
    )
    prepare(host)
    router = Router(score)
    pubsub = TopicPubsub(host, router, on_frame=on_frame, clock=clock, topics=topics, rate_limit=rate_limit)
    host.set_stream_handler(PING_PROTOCOL, pubsub.meter.serve_ping)
    wanted = [multiaddr.Multiaddr(str(endpoint)) for endpoint in listen]
    try:
        async with host.run(listen_addrs=wanted):
            if len(host.get_transport_addrs()) < len(wanted):
                raise CannotListen(
                    f"cannot listen on all of {', '.join(map(str, listen))}; change swarm.listen"
                )
            dht = Dht(host, pubsub.meter.charge)
            async with running(pubsub), running(router):
                await pubsub.wait_until_ready()
                for topic in topics:
                    await pubsub.enter(topic)
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(router.tidy)
                        nursery.start_soon(pubsub.check_queue.run)
                        nursery.start_soon(keep_running, dht)
                        yield Stack(host, pubsub, router, dht)
                        nursery.cancel_scope.cancel()
                finally:
                    await host.get_network().close_sockets()
    finally:
        # A start that was cut off or failed may listen as well.
        await host.get_network().close_sockets()
        # These are system tasks of trio, which nothing else ends.
        for scope in host._identify_tasks:
            scope.cancel()
        # This ends the library's thread.
        pubsub.seen_messages.stop()


def make_host(
    identity: Identity,
    traffic: Traffic | None = None,
    shut_out: Callable[[str], bool] = lambda _: False,
    host_bans: HostBans | None = None,
    admits_stream: Callable[[Any, str], bool] = lambda *_: True,
) -> Host:
    """Make a host. shut_out: whether a peer is banned. admits_stream: as in `Host`."""
    traffic = traffic or Traffic()
    keys = create_new_key_pair(identity.seed)
    noise = NoiseTransport(keys, noise_privkey=create_new_noise_key_pair().private_key)
    store = BoundedPeerStore()
    me = generate_peer_id_from(keys)
    store.add_key_pair(me, keys)
    upgrader = TransportUpgrader({NOISE: noise}, MUXERS)
    upgrader.muxer_multistream = MuxerChoice(MUXERS, traffic)
    network = LimitedNetwork(
        me,
        store,
        upgrader,
        transports=[CountedTcp(traffic)],
        retry_config=RetryConfig(max_retries=0),  # the address book decides when to try again
        connection_config=ConnectionConfig(
            min_connections=0, low_watermark=0, high_watermark=128, max_connections=160
        ),
        traffic=traffic,
        shut_out=shut_out,
        host_bans=host_bans or HostBans(),
    )
    store.keeps = lambda peer: peer == me or bool(network.get_connections(peer))
    return Host(
        network,
        admits_stream=admits_stream,
        addrs_factory=lambda found: [
            multiaddr.Multiaddr(text) for text in dialable([str(address) for address in found])
        ],
    )


class Tasks(TrioManager):  # type: ignore[misc]
    """Runs a service whose one-off tasks may fail alone.

    Its daemon tasks may not: the engine then starts all anew.
    """

    def run_task(
        self,
        async_fn: Callable[..., Awaitable[Any]],
        *args: Any,
        daemon: bool = False,
        name: str | None = None,
        _internal: bool = False,
    ) -> None:
        if daemon or _internal:
            super().run_task(async_fn, *args, daemon=daemon, name=name, _internal=_internal)
            return

        async def alone() -> None:
            try:
                await async_fn(*args)
            except Exception as error:
                # The library could not handle one message or one peer; it is logged.
                log.debug("%s failed: %r", name or async_fn, error)

        # Started directly in the nursery: the library would go through all its tasks first.
        if self._task_nursery is not None and not self.is_cancelled:
            self._task_nursery.start_soon(alone, name=name)


@contextlib.asynccontextmanager
async def running(service: Any) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        manager = Tasks(service)
        service._manager = manager
        nursery.start_soon(manager.run)
        await manager.wait_started()
        try:
            yield
        finally:
            await manager.stop()


async def keep_running(dht: Any) -> None:
    """Keep the DHT running: when it breaks, it starts again by itself and nothing else stops.

    It serves only to find peers.
    """
    while True:
        try:
            async with running(dht):
                await dht.manager.wait_finished()
        except Exception as error:
            # Anything may break in the DHT; it is logged.
            log.warning("the DHT broke and starts again in a minute: %r", error)
        await trio.sleep(60)
