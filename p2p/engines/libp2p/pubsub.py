"""py-libp2p's GossipSub, with our admission of messages, our scores and rate limits."""

import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.exceptions import ValidationError
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb.rpc_pb2 import ControlIWant
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.score import ScoreParams
from libp2p.pubsub.utils import safe_bytes_from_hex

from p2p.admission.fair_queue import Turns, in_turn
from p2p.admission.reputation import GRAYLIST_THRESHOLD
from p2p.engines.libp2p.metering import BROKEN, ENTRY_COST, MESSAGES, READ_COST, Meter, cost
from p2p.engines.libp2p.network import circuit, direct, remote
from p2p.engines.libp2p.rpcs import (
    MAX_BYTES,
    MAX_RPC_BYTES,
    CheckQueue,
    Ingress,
    Queues,
    RpcStream,
    ingress,
)
from p2p.engines.libp2p.streams import own_frame
from p2p.latest import Latest
from p2p.netgroup import share_group_of_host
from p2p.rate_limit import RateLimit
from p2p.topic import Topic
from p2p.types import PeerId, Score, Verdict

# Called with a message's data, the peer that handed it over, and its topics.
OnFrame = Callable[[bytes, PeerId | None, Sequence[str]], Verdict]
MESHSUB = (TProtocol("/meshsub/1.1.0"), TProtocol("/meshsub/1.0.0"))
# Seconds between two runs of `Router.tidy`.
TIDY_S = 10.0
# GossipSub's D, D_low, D_high and D_out. In a small swarm all members are in each other's mesh, up to D_high,
# so each frame arrives as many times.
DEGREE, DEGREE_LOW, DEGREE_HIGH, DEGREE_OUT = 4, 3, 6, 2
# Peers outside the mesh that get gossip (IHAVE); a quarter of them if that is more (D_lazy).
GOSSIP_PEERS = 6
# Longest back-off that we accept from a peer that prunes us.
MAX_BACK_OFF_S = 600
# Length of a message's sequence number in all libraries.
NUMBER_BYTES = 8
# Maximum number of messages that we request from a peer in one RPC (IWANT). Most of our messages have 2 KiB.
MAX_WANTED = 128
# Maximum number of a neighbour's IWANTs that wait for our upload.
MAX_ASKING = 4
# Longest id of a message: its author's id and its sequence number.
MAX_MESSAGE_ID_BYTES = 64

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Passage:
    passed: bool  # whether the message was not rejected


class TopicPubsub(Pubsub):  # type: ignore[misc]
    """Pubsub that charges each connected peer for all messages that it sends us, valid or not."""

    def __init__(
        self,
        *args: Any,
        on_frame: OnFrame,
        clock: Callable[[], float],
        topics: Sequence[Topic],
        rate_limit: RateLimit,
        **options: Any,
    ) -> None:
        super().__init__(
            *args,
            max_inbound_rpc_size=MAX_RPC_BYTES,
            max_subscriptions_per_peer=16,
            seen_ttl=120,  # seconds, as in p2pd; the inbox refuses later repetitions
            **options,
        )
        self.allowed_topics = frozenset(map(str, topics))
        self.counter = int(clock() * 1e9)
        self.rate_limit = rate_limit
        self._on_frame = on_frame
        self._clock = clock
        self._passage = _Passage(True)
        self.meter = Meter(rate_limit, clock, self._cut_off)
        self._reading: Any = None  # the peer whose RPC is being handled
        self.check_queue = CheckQueue()
        self._inbound: dict[Any, Any] = {}  # peer -> its newest stream to us
        self.peer_queues = Queues(self.my_id.to_bytes())

    def notify_subscriptions(self, publish_message: Any) -> None:
        """Do nothing: the validator has delivered the message, and nothing reads the library's channel."""

    async def push_msg(self, msg_forwarder: Any, msg: Any) -> None:
        if msg_forwarder == self.my_id:
            await super().push_msg(msg_forwarder, msg)
            return
        by = self.router.group_of(msg_forwarder), msg_forwarder
        if not await self.check_queue.enter(by, msg.ByteSize()) or self.rate_limit.banned(
            str(msg_forwarder), self._clock()
        ):
            return
        # The library does not await before the validation, so `_passage` belongs to this message when
        # `validate_msg` sets it.
        passage = self._passage = _Passage(passed=self._is_msg_seen(msg))
        try:
            await super().push_msg(msg_forwarder, msg)
        finally:
            if not passage.passed:
                self.meter.charge(msg_forwarder, what=BROKEN)

    async def continuously_read_stream(self, stream: Any) -> None:
        await super().continuously_read_stream(
            RpcStream(stream, self._on_read, self._cut_off, self.check_queue.drained)
        )

    async def write_msg(self, stream: Any, rpc_msg: Any) -> bool:
        queue = self.peer_queues.get(stream.muxed_conn.peer_id)
        if rpc_msg.publish and not own_frame.get() and queue is not None:
            pace = queue._queue.pace
            await trio.sleep(pace(len(rpc_msg.publish), rpc_msg.ByteSize(), trio.current_time()))
        return bool(await super().write_msg(stream, rpc_msg))

    def _on_read(self, peer: Any) -> None:
        self._reading = peer
        self.meter.charge(peer, READ_COST)

    def _is_subscribed_to_msg(self, msg: Any) -> bool:
        """Charge for a message, new or not, and refuse it if it has several topics or a long number.

        The library calls this for each message of an RPC before it starts a task for the message. For a
        message with several topics, it would validate once for each topic and store each topic for each
        receiver. A message's sequence number is part of its id, which is stored in four places.
        """
        return (
            self.meter.charge(self._reading, what=MESSAGES)
            and len(msg.topicIDs) == 1
            and len(msg.seqno) <= NUMBER_BYTES
            and super()._is_subscribed_to_msg(msg)
            and not self._is_msg_seen(msg)
        )

    def handle_subscription(self, origin_id: Any, sub_message: Any) -> None:
        if self.meter.charge(origin_id, ENTRY_COST):
            super().handle_subscription(origin_id, sub_message)

    def _cut_off(self, peer: Any, why: str) -> None:
        log.warning("cut off %s: %s", peer, why)
        self.manager.run_task(self.host.disconnect, peer)

    # A peer may reconnect before we see that its old connection is dead, and then has two connections for a
    # while. The library has two faults then:
    # - It goes on writing to the stream on the dead connection, where no write fails. The peer gets nothing.
    # - When one stream ends, it forgets the peer's subscriptions, though they came on the other stream.
    # So in the methods below a stream is dead when its connection is dead, and a subscription lasts as long
    # as the newest stream from the peer.

    async def handle_dead_peer_queue(self) -> None:
        async with self.dead_peer_receive_channel:
            self.event_handle_dead_peer_queue_started.set()
            async for peer in self.dead_peer_receive_channel:
                stream = self.peers.get(peer)
                if stream is None or all(
                    connection.muxed_conn is not stream.muxed_conn
                    for connection in self.host.get_network().get_connections(peer)
                ):
                    # This registers the peer again if it has another connection.
                    self._handle_dead_peer(peer)

    async def _handle_new_peer(self, peer_id: Any) -> None:
        """Handle a new peer, unless it is connected through a relay: gossip does not use relays.

        If a direct connection follows later, the library calls this again.
        """
        if direct(self.host.get_network().get_connections(peer_id)):
            await super()._handle_new_peer(peer_id)

    async def stream_handler(self, stream: Any) -> None:
        peer = stream.muxed_conn.peer_id
        if circuit(stream) is not None:
            await stream.reset()
            return
        before, self._inbound[peer] = self._inbound.get(peer), stream
        if before is not None:
            # Only the newest stream counts, as in go-libp2p: the old stream's connection may be dead.
            await before.reset()
        try:
            await super().stream_handler(stream)
            # If the peer closed its side, the library would leave our side open while the connection lasts.
            await stream.close()
        finally:
            if self._inbound.get(peer) is stream:
                del self._inbound[peer]
                self._forget_all_subscriptions(peer)

    def _forget_all_subscriptions(self, peer_id: Any) -> None:
        if peer_id not in self._inbound:
            super()._forget_all_subscriptions(peer_id)

    async def validate_msg(self, msg_forwarder: Any, msg: Any) -> None:
        """Deliver a message to `on_frame` instead of the library's validators. Raises ValidationError."""
        verdict = Verdict.ACCEPT
        if msg.from_id != self.my_id.to_bytes():
            verdict = self._on_frame(msg.data, PeerId(str(msg_forwarder)), msg.topicIDs)
        self._passage.passed = verdict is not Verdict.REJECT
        if verdict is not Verdict.ACCEPT:
            raise ValidationError(verdict.value)


class Router(GossipSub):  # type: ignore[misc]
    """GossipSub with our scores of peers.

    score: our score of a peer: 0 if it is clean, below 0 if it misbehaved.
    """

    def __init__(self, score: Score) -> None:
        self._score = score
        self._asking: Counter[Any] = Counter()  # by neighbour: IWANTs that wait for our upload
        # Id of a recent message -> network group, connection, author.
        self._came_by: Latest[bytes, tuple[Hashable, ...]] = Latest(8192)
        super().__init__(
            protocols=MESHSUB,
            degree=DEGREE,
            degree_low=DEGREE_LOW,
            degree_high=DEGREE_HIGH,
            heartbeat_interval=1,  # seconds
            # Gossip tells of each message once. Nearly all messages arrive through the mesh, and telling of
            # each three times cost a sixth of all bytes.
            gossip_window=1,
            gossip_history=6,
            do_px=False,  # a pruning peer could make us dial anything
            prune_back_off=10,
            max_idontwant_messages=1000,
            # Adaptive gossip slows the heartbeat of an unhealthy swarm, and it considers every small swarm
            # unhealthy.
            adaptive_gossip_enabled=False,
            spam_protection_enabled=False,  # `RateLimit` and the inbox protect against spam instead
            eclipse_protection_enabled=False,  # it wants three addresses in the mesh; one LAN may have fewer
            # The library keeps whole messages this long for each connected peer outside this swarm.
            pending_messages_ttl=3.0,
            # Only our score counts. A peer that the inbox ignores is kept out of the mesh and gets no gossip.
            score_params=ScoreParams(
                app_specific_score_fn=lambda peer: score(PeerId(str(peer))),
                p6_appl_slack_weight=1.0,
                graylist_threshold=GRAYLIST_THRESHOLD,
            ),
        )

    def _check_graft_flood_protection(self, peer_id: Any, topic: str) -> bool:  # noqa: ARG002
        """Allow every GRAFT after the back-off; `metering` charges for GRAFTs.

        The library's check lasts a fraction of a second longer than the back-off that it tells the peer, and
        starts again at each attempt. So a peer that came a little too early was never admitted again.
        """
        return True

    def _get_peers_to_send(
        self, topic_ids: Any, msg_forwarder: Any, origin: Any, msg_id: bytes | None = None
    ) -> Sequence[Any]:
        """Send our own messages to every peer of the topic that is not graylisted, not only to the mesh.

        This is GossipSub 1.1's flood publishing: even if attackers fill our mesh, all neighbours get our
        messages.
        """
        peers = set(super()._get_peers_to_send(topic_ids, msg_forwarder, origin, msg_id))
        if origin == self.pubsub.my_id:
            peers.update(
                peer
                for topic in topic_ids
                for peer in self.pubsub.peer_topics.get(topic, ())
                if peer != origin and self._score(PeerId(str(peer))) > GRAYLIST_THRESHOLD
            )
        return list(peers)

    def _select_grafting_candidates(self, candidates: Any, topic: str, current_mesh_size: int) -> Any:
        """Graft only as many peers as the mesh has free places; the library would prune the rest at once."""
        found = super()._select_grafting_candidates(candidates, topic, current_mesh_size)
        return found[: max(0, DEGREE_HIGH - current_mesh_size)]

    def _select_peers_for_pruning(self, topic: str, num_to_prune: int) -> list[Any]:
        """Choose the peers to prune: keep DEGREE_OUT that we dialled, then the earliest.

        One network group keeps at most half of the mesh, unless there are not enough other peers. So a crowd
        that comes later gets no place. The library would prune peers at random, because all clean peers have
        the same score.
        """
        network, mesh = self.pubsub.host.get_network(), self.mesh[topic]
        here = [
            peer
            for peer in self.pubsub.peers  # in the order in which they came
            if peer in mesh and self._score(PeerId(str(peer))) > GRAYLIST_THRESHOLD
        ]
        dialled = [
            peer
            for peer in here
            if any(found.direction.name == "OUTBOUND" for found in network.get_connections(peer))
        ]
        kept: dict[Any, Hashable] = {}  # peer -> group
        for most in (DEGREE // 2, DEGREE):
            for peer in (*dialled[:DEGREE_OUT], *here):
                group = self.group_of(peer)
                if (
                    peer not in kept
                    and len(kept) < len(mesh) - num_to_prune
                    and Counter(kept.values())[group] < most
                ):
                    kept[peer] = group
        return [peer for peer in mesh if peer not in kept]

    def gossip_heartbeat(self) -> dict[Any, dict[str, list[bytes]]]:
        """Tell peers outside the mesh of new messages (IHAVE), network groups in turn.

        At most MAX_WANTED messages are named, each ingress in turn, so that these peers are served as fairly
        as peers in the mesh. Peers that were just pruned are included: the library leaves them out during
        their back-off, and they would get nothing in that time.
        """
        gossip: dict[Any, dict[str, list[bytes]]] = defaultdict(dict)
        for topic, mesh in self.mesh.items():
            others = [
                peer
                for peer in self.pubsub.peer_topics.get(topic, set()) - mesh
                if self._score(PeerId(str(peer))) > GRAYLIST_THRESHOLD
            ]
            new = Turns()
            for msg_id in self.mcache.window(topic):
                new.put(self._came_by.get(msg_id, ("", "", b"")), msg_id, 1)
            if told := [new.pop()[0] for _ in range(min(MAX_WANTED, new.frames))]:
                turns = in_turn(random.sample(others, len(others)), self.group_of)
                for peer in turns[: max(GOSSIP_PEERS, len(others) // 4)]:
                    gossip[peer][topic] = told
        return gossip

    def group_of(self, peer: Any) -> Hashable:
        """Return the network group of a connected peer, None if unknown."""
        near = self.pubsub.host.get_network().get_connections(peer)
        return share_group_of_host(remote(near[0])[0]) if near else None

    async def handle_rpc(self, rpc: Any, sender_peer_id: Any) -> None:
        if self.pubsub.meter.charge(sender_peer_id, cost(rpc.control)):
            await super().handle_rpc(rpc, sender_peer_id)

    async def handle_graft(self, graft_msg: Any, sender_peer_id: Any) -> None:
        """Handle a GRAFT of our topics only; the library would keep scores for any topic that is named."""
        if graft_msg.topicID in self.mesh:
            await super().handle_graft(graft_msg, sender_peer_id)

    async def handle_prune(self, prune_msg: Any, sender_peer_id: Any) -> None:
        """Handle a PRUNE of our topics only, with a bounded back-off and without the peers that it names.

        The library would keep any topic and any back-off, and dial the named peers even if `do_px` is off.
        """
        if prune_msg.topicID in self.mesh:
            prune_msg.ClearField("peers")
            prune_msg.backoff = min(prune_msg.backoff, MAX_BACK_OFF_S)
            await super().handle_prune(prune_msg, sender_peer_id)

    def send_rpc(self, peer_id: Any, rpc: Any, priority: bool = False) -> None:
        """Send an RPC without our signed addresses, which the library adds to each message.

        Peers know them from identify, and each receiver would check their signature for each copy.
        """
        rpc.ClearField("senderRecord")
        super().send_rpc(peer_id, rpc, priority)

    async def publish(self, msg_forwarder: Any, pubsub_msg: Any) -> None:
        by: Ingress = (self.group_of(msg_forwarder), msg_forwarder)
        self._came_by[self.pubsub.get_message_id(pubsub_msg)] = (*by, pubsub_msg.from_id)
        before = ingress.set(by)
        try:
            await super().publish(msg_forwarder, pubsub_msg)
        finally:
            ingress.reset(before)

    async def emit_iwant(self, msg_ids: Sequence[bytes], to_peer: Any) -> None:
        """Request messages by id (IWANT), but drop ids that are too long, and limit their number.

        Otherwise a peer that reads nothing could make us hold 20 MB of requests.
        """
        wanted = [msg_id for msg_id in msg_ids if len(msg_id) <= MAX_MESSAGE_ID_BYTES]
        await super().emit_iwant(wanted[:MAX_WANTED], to_peer)

    async def handle_iwant(self, iwant_msg: Any, sender_peer_id: Any) -> None:
        """Send requested messages: at most as many as fit the neighbour's queue, and within its upload limit.

        The library would copy a message each time that the request names it, and only then drop copies that
        do not fit the queue.
        """
        wanted, size = list[bytes](), 0
        for name in iwant_msg.messageIDs[:MAX_WANTED]:
            if (found := self.mcache.get(safe_bytes_from_hex(name))) is not None:
                size += found.ByteSize()
                wanted += [name] if size <= MAX_BYTES else []
        near = self.pubsub.host.get_network().get_connections(sender_peer_id)
        if wanted and near and self._asking[sender_peer_id] < MAX_ASKING:
            self._asking[sender_peer_id] += 1
            self.pubsub.manager.run_task(self._give, wanted, min(size, MAX_BYTES), near[0].muxed_conn)

    async def _give(self, wanted: Sequence[bytes], size: int, to: Any) -> None:
        """Send requested messages when the neighbour's upload turn comes, without delaying reads from it."""
        try:
            await to.traffic.upload(size, to.line)
            await super().handle_iwant(ControlIWant(messageIDs=wanted), to.peer_id)
        finally:
            self._asking -= Counter({to.peer_id: 1})

    async def tidy(self) -> None:
        """Trim the router's records every TIDY_S, until cancelled.

        Without adaptive gossip, two of the library's records only grow, and a third keeps a thousand whole
        messages. The library also never forgets a peer that refuses our stream, or that leaves while messages
        wait for it; such a peer even stays in the mesh.
        """
        while True:
            await trio.sleep(TIDY_S)
            network, now = self.pubsub.host.get_network(), time.time()  # the library's clock
            known = {*self.dont_send_message_ids, *self.scorer.behavior_penalty} - self.pubsub.peers.keys()
            for peer in [peer for peer in known if not network.get_connections(peer)]:
                self.remove_peer(peer)
            for topic, held in self.back_off.items():
                self.back_off[topic] = {peer: until for peer, until in held.items() if until > now}
            self.recent_message_deliveries.clear()
            self.equivocation_detection.clear()  # not needed: the inbox refuses repeated sequence numbers
