"""The libp2p engine skips unneeded work of its library, and keeps all that it needs."""

import time
from contextlib import AsyncExitStack, nullcontext
from io import StringIO
from typing import Any

import multiaddr
import pytest
import trio
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.network import swarm
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo, info_from_p2p_addr
from libp2p.pubsub.pb import rpc_pb2
from libp2p.stream_muxer.yamux.yamux import FLAG_ACK, TYPE_PING
from libp2p.utils import address_validation
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes

from p2p.engines.libp2p import connections, pubsub
from p2p.engines.libp2p.pubsub import MAX_BACK_OFF_S, MAX_MESSAGE_ID_BYTES, MESHSUB
from p2p.engines.libp2p.stack import make_host
from p2p.envelope import seal
from p2p.identity import Identity
from p2p.types import PeerRequest, Unanswered
from tests.doubles import until
from tests.p2p.engines.libp2p.test_libp2p import stack_of, started
from tests.p2p.hostile import hostile_peer
from tests.p2p.real import SECONDS, TOPIC, heard

pytestmark = pytest.mark.net


async def test_silent_peers_are_pinged_and_disconnected_without_an_answer(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(connections, "PING_AFTER_S", 0.4)
    a, _, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, victim):
        (theirs,) = (connection.muxed_conn for connection in stack.host.get_network().get_connections(victim))
        write, answers, alive = theirs.secured_conn.write, 0, True

        async def written(frames: bytes) -> None:
            nonlocal answers
            answers += frames[1] == TYPE_PING and frames[3] == FLAG_ACK
            if alive:
                await write(frames)

        theirs.secured_conn.write = written
        await until(lambda: answers >= 3)
        assert [peer.id for peer in a.peers()] == [str(stack.host.get_id())]
        await theirs.ping()
        before, until_then, held_up = answers, trio.current_time() + 4 * connections.PING_AFTER_S, 0
        while (now := trio.current_time()) < until_then:
            await theirs.ping()  # a peer that keeps sending
            await trio.sleep(0.05)
            # On a busy machine these pings are delayed, so the peer looks silent.
            held_up += trio.current_time() - now > connections.PING_AFTER_S / 2
        assert answers <= before + 1 + held_up  # the victim may have sent one ping before
        monkeypatch.setattr(connections, "PING_TIMEOUT_S", 1.0)
        alive = False
        await until(lambda: not a.peers())


async def test_a_peers_new_address_is_recorded_at_once(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """The node does not wait until the peer's previous entry is due for renewal."""
    monkeypatch.setattr(connections, "NOTED_S", 1000.0)
    a, a_engine, address = await started(nursery, 1)
    b, _, _ = await started(nursery, 2, address)
    await until(a.peers)
    peer, there = ID.from_string(b.identity.peer_id), "/ip4/127.0.0.1/tcp/4321"
    await until(lambda: b.identity.peer_id in a_engine._book.known)
    assert there not in a_engine._book.known[b.identity.peer_id].addresses
    stack_of(a_engine).host.get_peerstore().add_addrs(peer, [multiaddr.Multiaddr(there)], 1000)
    await heard(b, a)
    await until(lambda: there in a_engine._book.known[b.identity.peer_id].addresses)


@pytest.mark.parametrize("near", [True, False])
async def test_a_peer_found_in_the_dht_is_dialled_for_a_question(
    near: bool, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """The peer is not in the address book, like most peers of a large swarm."""
    a, a_engine, address = await started(nursery, 1)
    b, _, there = await started(nursery, 2)
    await started(nursery, 3, address)
    await until(a.peers)
    if not near:
        monkeypatch.setattr(connections, "remote_host", lambda _: "11.0.0.1")
    info = info_from_p2p_addr(multiaddr.Multiaddr(there))
    stack_of(a_engine).host.get_peerstore().add_addrs(info.peer_id, info.addrs, 1000)
    card = PeerRequest.TWINS.message()
    with trio.fail_after(SECONDS), nullcontext() if near else pytest.raises(Unanswered):
        assert await a_engine.request(b.identity.peer_id, card, 10) == b""


@pytest.mark.parametrize("hangs_up", [True, False])
async def test_a_peer_that_returns_from_another_address_is_identified_again(hangs_up: bool) -> None:
    """The old connection may still be open, for example if a laptop moved to another network."""
    host, identity = make_host(Identity(bytes([1]) * 32)), Identity(bytes([2]) * 32)
    there, store = ID.from_string(identity.peer_id), host.get_peerstore()
    wanted = [multiaddr.Multiaddr("/ip4/127.0.0.1/tcp/0")]
    async with host.run(listen_addrs=wanted), AsyncExitStack() as stack:
        for _ in range(2):
            other = make_host(identity)
            await stack.enter_async_context(other.run(listen_addrs=wanted))
            await other.connect(PeerInfo(host.get_id(), host.get_transport_addrs()))
            (where,) = other.get_addrs()
            await until(lambda now=where: store.has_peer(there) and now in store.addrs(there))
            if hangs_up:
                await other.get_network().close_sockets()
                await until(lambda: not host.get_network().get_connections(there))


def test_a_node_that_starts_before_its_network_can_dial_over_ipv6_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for line, there in (("", False), ("20010db8000000000000000000000001 02 40 00 80 eth0", True)):
        monkeypatch.setattr(
            address_validation, "open", lambda *_, now=line, **__: StringIO(now), raising=False
        )
        assert swarm.has_public_ipv6() is there


async def test_messages_about_other_topics_use_no_memory(nursery: trio.Nursery) -> None:
    a, a_engine, address = await started(nursery, 1)
    router, ours = stack_of(a_engine).router, str(TOPIC)
    async with hostile_peer(address) as (stack, target):
        rpc, others, they = rpc_pb2.RPC(), [*map(str, range(100))], stack.host.get_id()
        for topic in (*others, ours):
            rpc.control.graft.add(topicID=topic)
            rpc.control.prune.add(topicID=topic, backoff=2**63)
        stack.router.send_rpc(target, rpc)
        await until(lambda: ours in router.back_off)
        assert (
            set(router.back_off) == {ours}
            and max(router.back_off[ours].values()) <= time.time() + MAX_BACK_OFF_S
        )
        for n, topics in enumerate(([ours, *others], [ours])):
            frame = seal(Identity(bytes([66]) * 32), TOPIC.swarm_id, n, time.time(), "rollouts", b"x")
            await stack.pubsub.publish(topics, frame)
        await until(a.received)
        assert (
            {ours} == set(router.time_since_last_publish) == set(router.scorer.first_message_deliveries[they])
        )


async def test_a_message_with_a_too_long_sequence_number_is_ignored(nursery: trio.Nursery) -> None:
    a, _, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, _):
        numbers = iter([b"more than eight", bytes(8)])
        stack.pubsub._next_seqno = lambda: next(numbers)
        for n, body in enumerate((b"long", b"fine")):
            frame = seal(Identity(bytes([66]) * 32), TOPIC.swarm_id, n, time.time(), "rollouts", body)
            await stack.pubsub.publish(str(TOPIC), frame)
        received: list[bytes] = []
        await until(lambda: received.extend(one.body for one in a.received()) or received)
        assert received == [b"fine"]


async def test_no_message_with_a_too_long_id_is_requested(nursery: trio.Nursery) -> None:
    _, engine, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        wanted = list[bytes]()

        async def note(iwant: Any, _sender: Any) -> None:
            wanted.extend(iwant.messageIDs)

        stack.router.handle_iwant = note
        await until(lambda: stack.host.get_id() in stack_of(engine).pubsub.peer_queues)
        fine = b"\xff" * MAX_MESSAGE_ID_BYTES  # bytes that are not hexadecimal digits
        await stack.router.emit_ihave(str(TOPIC), [fine + b"x", fine], target)
        await until(lambda: wanted)
        assert wanted == [fine]


async def test_a_peer_that_left_without_reading_gossip_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(pubsub, "TIDY_S", 0.1)
    _, engine, address = await started(nursery, 1)
    router, ours = stack_of(engine).router, str(TOPIC)
    target = info_from_p2p_addr(multiaddr.Multiaddr(address))
    host = make_host(Identity(bytes([66]) * 32))
    they, rpc = host.get_id(), rpc_pb2.RPC()
    rpc.control.graft.add(topicID=ours)
    rpc.control.idontwant.add(messageIDs=[b"x"])
    async with host.run(listen_addrs=[]):
        await host.connect(target)
        stream = await host.new_stream(target.peer_id, MESHSUB)
        await stream.write(encode_varint_prefixed(rpc.SerializeToString()))
        await until(lambda: they in router.mesh[ours] and they in router.dont_send_message_ids)
        router.back_off[ours] = {they: int(time.time())}  # the back-off ends now
        await host.get_network().close_sockets()
    held = router.dont_send_message_ids, router.scorer.behavior_penalty
    await until(lambda: not any(they in one for one in (router.mesh[ours], router.back_off[ours], *held)))


async def test_a_gossip_stream_that_the_peer_ends_is_ended(nursery: trio.Nursery) -> None:
    _, _, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        stream = await stack.host.new_stream(target, MESHSUB)
        await stream.close()
        with trio.fail_after(SECONDS), pytest.raises(StreamEOF):
            await stream.read(1)


async def test_data_on_streams_that_the_node_has_ended_is_not_buffered(nursery: trio.Nursery) -> None:
    """The node does not read these streams, and the peer never ends them; up to 16 MiB could be buffered."""
    _, engine, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        for _ in range(8):
            stream = await stack.host.new_stream(target, [IDENTIFY])
            with pytest.raises(StreamEOF):
                while True:
                    await stream.read(1 << 16)
            await stream.muxed_stream.write(bytes(100_000))
        last = await stack.host.new_stream(target, [IDENTIFY])
        assert await last.read(1)  # all earlier bytes have arrived
        (ours,) = stack_of(engine).host.get_network().get_connections(stack.host.get_id())
        assert not any(ours.muxed_conn.stream_buffers.values())


async def test_messages_carry_no_addresses_and_pruned_peers_may_return(nursery: trio.Nursery) -> None:
    a, a_engine, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        said: list[Any] = []

        async def handler(stream: Any) -> None:
            while True:
                said.append(rpc_pb2.RPC.FromString(await read_varint_prefixed_bytes(stream)))

        await stack.host.disconnect(target)
        for protocol in MESHSUB:
            stack.host.set_stream_handler(protocol, handler)
        router, me, topic = stack_of(a_engine).router, stack.host.get_id(), str(TOPIC)
        await until(lambda: not a.peers())
        stack.host.get_network().unblock_peer(target)
        await stack.host.connect(info_from_p2p_addr(multiaddr.Multiaddr(address)))
        await until(a.peers)
        await until(lambda: a.publish("rollouts", b"x") or any(rpc.publish for rpc in said))  # type: ignore[func-returns-value]
        assert not any(rpc.HasField("senderRecord") for rpc in said if rpc.publish)
        router.mesh[topic].discard(me)
        router.graft_flood_tracking[me][topic] = time.time()  # as after a PRUNE whose back-off has ended
        router.back_off.clear()
        await router.handle_graft(rpc_pb2.ControlGraft(topicID=topic), me)
        assert me in router.mesh[topic]
