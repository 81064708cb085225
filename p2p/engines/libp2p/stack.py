"""The py-libp2p 0.8.1 stack for one swarm: TCP, Noise, yamux, GossipSub, Kademlia; contains its failures.

The library's defaults do not suit a daemon that talks to untrusted peers. The main changes are listed here; a
comment at each patch explains it.

- `new_host` also accepts plaintext and secio, which do not prove the peer's identity. We allow only Noise.
- An exception in a stream handler or a service task ends the whole host. An exception in identify, a trio
  system task, ends the process. A peer can cause both with a few bytes. Here such a failure ends only that
  stream or task.
- GossipSub's heartbeat is 120 s. It penalises peers that forward more than 10 messages a second. It starts
  its message counter from the clock in seconds, so a restarted node repeats its message ids, and peers ignore
  it for `seen_ttl`.
- The library listens with SO_REUSEPORT, so a second node on the same port is not refused, but gets half of
  the connections.
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

# Maximum number of streams that one peer may have open to us.
MAX_STREAMS = 64

log = logging.getLogger(__name__)

# The library turns its logs off on import. We turn its warnings on, except in modules where a failed dial, a
# lost peer or a hostile peer causes them: with each message, with each byte (yamux), with each forged proof
# (noise), with each connection that it ends at once (network.swarm), or with each address that it names in
# the DHT (transport, dns_utils). We report a port in use ourselves.
for name, level in {
    "libp2p": logging.WARNING,
    "libp2p.network.auto_connector": logging.WARNING,
    "libp2p.network.swarm": logging.CRITICAL,
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

# Patches identify, which would tell a peer behind a relay that we see it at `/p2p/<relay>/p2p-circuit`. After
# such an address js-libp2p aborts identify, and then never tries hole punching. We send no address instead,
# because we do not see the peer's address.
identify._prefer_circuit_addr = lambda _host, _peer, seen: seen

# Removes other kinds of keys from the library. No member has one, and for an RSA key whose exponent is as
# long as the key, checking a signature takes 5 ms. A peer could send hundreds a second.
for kind in (KeyType.RSA, KeyType.Secp256k1):
    del serialization.key_type_to_public_key_deserializer[kind.value]
envelope.pub_key_from_protobuf = lambda key: serialization.deserialize_public_key(key.SerializeToString())


class Host(BasicHost):  # type: ignore[misc]  # the library is not typed for us
    """A host that survives any bytes that a peer sends.

    admits_stream: whether a peer may open a stream; called with the peer and its relay's address, or "".
    """

    _addrs: Sequence[Any] = ()
    _circuits: Sequence[Any] = ()
    _addrs_at = float("-inf")

    def __init__(self, *args: Any, admits_stream: Callable[[Any, str], bool], **options: Any) -> None:
        super().__init__(*args, **options)
        self.multiselect: Multiselect = Negotiation(self.multiselect.handlers)
        self._handled: Counter[Any] = Counter()  # peer -> streams that are being handled
        self._admits_stream = admits_stream

    def get_addrs(self) -> list[Any]:
        """Return our addresses, cached for five seconds.

        The library calls this for each message that it sends, and computing them takes 1 ms.
        """
        now = trio.current_time()
        if not self._addrs or now - self._addrs_at > 5.0:
            self._addrs, self._addrs_at = [*super().get_addrs(), *self._circuits], now
        return list(self._addrs)

    async def announce_through(self, circuits: Sequence[str]) -> None:
        """Replace our addresses through relays, and send the new ones to all connected peers."""
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
                # Any handler of the library may fail on unexpected bytes. The reset tells the peer.
                log.debug("a stream ended: %r", error)
                await end(net_stream)

    async def _on_notifee_connected(self, conn: Any) -> None:
        """Ask the peer to identify itself on each new direct connection, because its addresses may differ.

        The library asks a peer only once, and would keep the addresses of its first connection.
        """
        if circuit(conn) is None:
            self._identified_peers.pop(conn.muxed_conn.peer_id, None)
        await super()._on_notifee_connected(conn)

    def _has_cached_protocols(self, peer_id: Any) -> bool:
        near = direct(self._network.get_connections(peer_id))
        return peer_id in self._identified_peers if near else bool(super()._has_cached_protocols(peer_id))

    async def _identify_task_entry(self, peer_id: Any, reason: str) -> None:
        try:
            await super()._identify_task_entry(peer_id, reason)
        except Exception as error:
            # This is a system task of trio, so an exception would end the process. The peer stays
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
    """Start the stack: listen, and subscribe to the topics.

    Args:
        identity: our key.
        topics: our swarm's topic comes first.
        on_frame: called for each message that arrives.
        listen: our listen addresses.
        clock: returns seconds since the epoch.
        rate_limit: limits and bans of peers.
        host_bans: bans of hosts.
        score: our score of a peer.
        traffic: counts and limits bytes.
        prepare: sets stream handlers; called before the host listens.

    Raises:
        CannotListen: an address cannot be used.
        ExceptionGroup: a service of the library failed later.
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
                    f"cannot listen on all of {', '.join(map(str, listen))}. Change swarm.listen."
                )
            dht = Dht(host, pubsub.meter.charge)
            async with running(pubsub), running(router):
                await pubsub.wait_until_ready()
                for topic in topics:
                    await pubsub.subscribe(str(topic))
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
        # Also after a start that failed or was cancelled, because the library may already listen.
        await host.get_network().close_sockets()
        # These are system tasks of trio, which do not end by themselves.
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
    """Make a host.

    Args:
        identity: our key.
        traffic: counts and limits bytes.
        shut_out: whether a peer is banned.
        host_bans: bans of hosts.
        admits_stream: as in `Host`.
    """
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
    """Runs a service of the library. If a one-off task fails, the service goes on.

    If a daemon task fails, the service fails, and the engine restarts the whole stack.
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
                # The library could not handle one message or one peer.
                log.debug("%s failed: %r", name or async_fn, error)

        # Start the task directly in the nursery; the library's method would first go through all its tasks.
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
    """Run the DHT and restart it if it fails, without a restart of the whole stack.

    The swarm can work for a while without the DHT, which only finds peers.
    """
    while True:
        try:
            async with running(dht):
                await dht.manager.wait_finished()
        except Exception as error:
            # The library's DHT can fail in any way.
            log.warning("the DHT failed and restarts in a minute: %r", error)
        await trio.sleep(60)
