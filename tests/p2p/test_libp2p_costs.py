"""What the libp2p engine leaves out of its library's work to save time, and that nothing is lost by it."""

import time
from typing import Any

import multiaddr
import pytest
import trio
from libp2p.host.ping import ID as PING
from libp2p.host.ping import PING_LENGTH
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils.varint import read_varint_prefixed_bytes

from p2p.engines.libp2p import connections
from p2p.engines.libp2p.pubsub import MESHSUB
from swarmd.testing import until
from tests.p2p.hostile import hostile_peer
from tests.p2p.real import TOPIC, heard
from tests.p2p.test_libp2p import stack_of, started

pytestmark = pytest.mark.net


async def test_who_is_silent_is_pinged_and_who_does_not_answer_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(connections, "PING_AFTER", 0.4)
    monkeypatch.setattr(connections, "PING_TIMEOUT", 1.0)
    a, a_engine, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, _):
        pings, alive = 0, True

        async def handler(stream: Any) -> None:
            nonlocal pings
            pings += 1
            if not alive:
                await trio.sleep_forever()
            await stream.write(await stream.read(PING_LENGTH))

        stack.host.set_stream_handler(PING, handler)
        me = str(stack.host.get_id())
        await until(lambda: pings >= 3)
        assert [peer.id for peer in a.peers()] == [me]
        before, until_then = pings, trio.current_time() + 4 * connections.PING_AFTER
        while trio.current_time() < until_then:
            stack_of(a_engine).pubsub.heard_at[stack.host.get_id()] = trio.current_time()  # as one who goes on speaking
            await trio.sleep(0.05)
        assert pings <= before + 1  # one may have been under way
        stack_of(a_engine).pubsub.heard_at[stack.host.get_id()], alive = trio.current_time(), False
        await until(lambda: not a.peers())


async def test_whatever_comes_of_a_peer_shows_that_it_is_alive_and_where_it_is_now_is_noted_at_once(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """And not only when it is time to note again what it said before."""
    monkeypatch.setattr(connections, "NOTED_FOR", 1000.0)
    a, a_engine, address = await started(nursery, 1)
    b, _, _ = await started(nursery, 2, address)
    await until(a.peers)
    peer, there = ID.from_string(b.identity.peer_id), "/ip4/127.0.0.1/tcp/4321"
    await until(lambda: b.identity.peer_id in a_engine._book)
    assert there not in a_engine._book[b.identity.peer_id].addresses
    before = trio.current_time()  # no ping is due for a while
    stack_of(a_engine).host.get_peerstore().add_addrs(peer, [multiaddr.Multiaddr(there)], 1000)
    await heard(b, a)
    assert stack_of(a_engine).pubsub.heard_at[peer] >= before
    await until(lambda: there in a_engine._book[b.identity.peer_id].addresses)


async def test_messages_carry_no_addresses_and_who_was_pruned_is_let_in_again(nursery: trio.Nursery) -> None:
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
        router.graft_flood_tracking[me][topic] = time.time()  # as after a PRUNE, whose back-off is over
        router.back_off.clear()
        await router.handle_graft(rpc_pb2.ControlGraft(topicID=topic), me)
        assert me in router.mesh[topic]
