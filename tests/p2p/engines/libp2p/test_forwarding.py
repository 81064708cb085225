"""The queue of frames to a neighbour: connections take turns, the fullest one loses frames."""

from types import SimpleNamespace

import pytest
from libp2p.pubsub.pb import rpc_pb2

from p2p.admission.reputation import GRAYLIST_THRESHOLD
from p2p.engines.libp2p.metering import MESSAGES, message_limits
from p2p.engines.libp2p.pubsub import MAX_WANTED, Router
from p2p.engines.libp2p.rpcs import (
    JOINED_BYTES,
    MAX_BYTES,
    MAX_FRAMES,
    MAX_OWN_FRAMES,
    PACE_BURST,
    PACE_BURST_RPCS,
    PACE_PER_S,
    PACE_RPCS_PER_S,
    ForwardQueue,
    ingress,
)

ME = b"me"


def put(queue: ForwardQueue, group: str, connection: str, author: str, size: int = 100) -> None:
    ingress.set((group, connection))
    assert queue.push(rpc_pb2.RPC(publish=[rpc_pb2.Message(from_id=author.encode(), data=bytes(size))]))


def order(queue: ForwardQueue) -> list[str]:
    found = []
    while (rpc := queue.pop()) is not None:
        found += [message.from_id.decode() for message in rpc.publish] or ["control"]
    return found


def test_groups_connections_and_authors_are_served_in_turn() -> None:
    queue = ForwardQueue(ME)
    for _ in range(3):
        put(queue, "1.2", "x", "x1")
    put(queue, "1.2", "x", "x2")
    put(queue, "1.2", "y", "y1")
    put(queue, "3.4", "z", "z1")
    assert order(queue) == ["x1", "z1", "y1", "x2", "x1", "x1"] and len(queue) == 0


def test_a_crowd_displaces_only_its_own_frames() -> None:
    for size in (10, 30_000):
        queue = ForwardQueue(ME)
        put(queue, "honest", "h", "h1", 2000)
        for n in range(3000):
            put(queue, "crowd", f"c{n % 50}", f"author {n}", size)
        put(queue, "crowd", "neighbour of the crowd", "h2")
        found = order(queue)
        assert found[0] == "h1" and "h2" in found and len(found) <= MAX_FRAMES
        assert sum(size for name in found if name.startswith("author")) <= MAX_BYTES


def test_small_frames_of_many_groups_displace_no_larger_frame() -> None:
    """The frames exceed their limit, not the bytes, so a large frame counts as much as a small one."""
    queue = ForwardQueue(ME)
    put(queue, "honest", "h", "h1", 10_000)
    for n in range(3000):
        put(queue, f"group {n % 40}", f"c{n % 40}", f"author {n}", 10)
    found = order(queue)
    assert "h1" in found and len(found) <= MAX_FRAMES


def test_own_frames_and_control_messages_go_first_and_are_never_displaced() -> None:
    queue = ForwardQueue(ME)
    for n in range(MAX_OWN_FRAMES):
        put(queue, "", "", "me")
        put(queue, "1.2", "x", f"x{n}", 20_000)
    assert queue.push(
        rpc_pb2.RPC(control=rpc_pb2.ControlMessage(graft=[rpc_pb2.ControlGraft(topicID="t")])), priority=True
    )
    found = order(queue)
    assert (
        found[: MAX_OWN_FRAMES + 1] == ["me"] * MAX_OWN_FRAMES + ["control"]
        and len(found) > MAX_OWN_FRAMES + 10
    )


def test_waiting_frames_are_sent_in_batches_of_limited_size() -> None:
    queue = ForwardQueue(ME)
    for _ in range(100):
        put(queue, "1.2", "x", "x1", 1000)
    sizes = []
    while (rpc := queue.pop()) is not None:
        sizes.append(rpc.ByteSize())
    assert len(sizes) < 10 and max(sizes) < JOINED_BYTES + 2000


def test_the_sending_pace_stays_below_the_receivers_limit() -> None:
    queue, limit, now = ForwardQueue(b"me"), message_limits(), 0.0
    for n in range(100):
        now += queue.pace(20, 20_000, now)
        assert limit.pay("us", now, MESSAGES, 20), n
    assert now >= (2000 - PACE_BURST) / PACE_PER_S - 1


def test_frames_that_arrive_one_by_one_are_sent_in_few_rpcs() -> None:
    queue, now = ForwardQueue(b"me"), 0.0
    for _ in range(100):
        now += queue.pace(1, 100, now)
    assert now >= (100 - PACE_BURST_RPCS) / PACE_RPCS_PER_S - 1


def test_gossip_to_peers_outside_the_mesh_covers_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    router, told = Router({"other": 0.0, "shunned": GRAYLIST_THRESHOLD - 1}.__getitem__), MAX_WANTED
    router.pubsub = SimpleNamespace(peer_topics={"topic": {"other", "shunned"}})
    router.mesh = {"topic": set()}
    monkeypatch.setattr(Router, "group_of", lambda _self, _peer: None)
    for n in range(3 * told):
        message = rpc_pb2.Message(from_id=b"crowd" if n < 3 * told - 1 else b"honest", topicIDs=["topic"])
        message.seqno = n.to_bytes(8, "big")
        router.mcache.put(message)
        router._came_by[message.from_id + message.seqno] = (message.from_id, "connection", message.from_id)
    ((peer, by_topic),) = router.gossip_heartbeat().items()
    assert peer == "other" and len(by_topic["topic"]) == told
    assert any(name.startswith(b"honest") for name in by_topic["topic"])
