"""Sends the libp2p engine frames like those in 2026's advisories for other libp2p implementations.

GossipSub: a PRUNE whose back-off overflows a clock, or which names peers to dial. Yamux: window updates that
overflow, are empty, or belong to no stream. multistream-select: a line of any length.
"""

import struct
import time
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.pubsub.pb import rpc_pb2
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_ACK,
    FLAG_FIN,
    FLAG_RST,
    FLAG_SYN,
    TYPE_DATA,
    TYPE_GO_AWAY,
    TYPE_WINDOW_UPDATE,
    YAMUX_HEADER_FORMAT,
)
from libp2p.utils.varint import encode_uvarint, encode_varint_prefixed
from multiaddr import Multiaddr

from p2p.address import parse_bootstrap
from p2p.engines.libp2p.pubsub import MAX_BACK_OFF_S, MESHSUB
from tests.doubles import until
from tests.p2p.engines.libp2p.test_libp2p import stack_of, started
from tests.p2p.engines.libp2p.test_libp2p_muxer import opened
from tests.p2p.hostile import hostile_peer
from tests.p2p.real import SECONDS, TOPIC

TOPIC_FIELD, BACK_OFF_FIELD = b"\x0a", b"\x18"  # of ControlPrune
MINUS_ONE = b"\xff" * 9 + b"\x01"  # protobuf's encoding of -1


def prune(back_off: bytes) -> bytes:
    """Return an RPC with a PRUNE of the topic, whose back-off is this varint."""
    topic = str(TOPIC).encode()
    body = TOPIC_FIELD + encode_varint_prefixed(topic) + BACK_OFF_FIELD + back_off
    control = b"\x22" + encode_varint_prefixed(body)
    return b"\x1a" + encode_varint_prefixed(control)


@pytest.mark.net
@pytest.mark.parametrize(
    "back_off",
    [*map(encode_uvarint, (0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)), MINUS_ONE],
    ids=str,
)
async def test_a_back_off_of_any_size_is_bounded(back_off: bytes, nursery: trio.Nursery) -> None:
    assert rpc_pb2.RPC.FromString(prune(back_off)).control.prune[0].topicID == str(TOPIC)
    _, engine, address = await started(nursery, 1)
    router, topic = stack_of(engine).router, str(TOPIC)
    async with hostile_peer(address) as (stack, target):
        me = stack.host.get_id()
        await until(lambda: me in router.mesh[topic], SECONDS)
        stream = await stack.host.new_stream(target, list(MESHSUB))
        for _ in range(3):
            await stream.write(encode_varint_prefixed(prune(back_off)))
        await until(lambda: me in router.back_off.get(topic, {}), SECONDS)
        assert time.time() - 1 <= router.back_off[topic][me] <= time.time() + MAX_BACK_OFF_S
        await until(lambda: me not in router.mesh[topic], SECONDS)
        await trio.sleep(1.1)  # longer than a heartbeat
        assert engine.restarts == 0 and str(me) in engine.connected()


@pytest.mark.net
async def test_peers_named_in_a_prune_are_not_dialled(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The named peer may have signed its address or not."""
    _, engine, address = await started(nursery, 1)
    network = stack_of(engine).host.get_network()
    async with hostile_peer(address) as (stack, target):
        dialled = list[Any]()

        async def dial(peer: Any) -> Any:
            dialled.append(peer)
            raise OSError("nobody is there")

        monkeypatch.setattr(network, "dial_peer", dial)
        rpc = rpc_pb2.RPC()
        there = ID.from_pubkey(create_new_key_pair(bytes([70]) * 32).public_key)
        stack_of(engine).host.get_peerstore().add_addrs(there, [Multiaddr("/ip4/11.5.5.5/tcp/4001")], 1000)
        one = rpc.control.prune.add(topicID=str(TOPIC), backoff=1)
        one.peers.add(peerID=there.to_bytes())
        one.peers.add(peerID=b"no id", signedPeerRecord=b"no record")
        stack.router.send_rpc(target, rpc)
        router = stack_of(engine).router
        await until(lambda: stack.host.get_id() in router.back_off.get(str(TOPIC), {}), SECONDS)
        await trio.sleep(0.2)
        assert not dialled and engine.restarts == 0


def frame(kind: int, flags: int, stream: int, length: int, data: bytes = b"") -> bytes:
    return struct.pack(YAMUX_HEADER_FORMAT, 0, kind, flags, stream, length) + data


MOST = 2**32 - 1
UPDATES = {
    "overflow": [frame(TYPE_WINDOW_UPDATE, 0, 1, MOST)] * 3,
    "overflow as it opens": [
        frame(TYPE_WINDOW_UPDATE, FLAG_SYN, 3, MOST),
        frame(TYPE_WINDOW_UPDATE, 0, 3, MOST),
    ],
    "overflow with ACK": [frame(TYPE_WINDOW_UPDATE, FLAG_ACK, 1, MOST)] * 3,
    "nothing": [frame(TYPE_WINDOW_UPDATE, 0, 1, 0)] * 1000,
    "no stream": [frame(TYPE_WINDOW_UPDATE, flags, 99, MOST) for flags in (0, FLAG_ACK, FLAG_FIN, FLAG_RST)],
    "data of no stream": [frame(TYPE_DATA, 0, 99, 5, b"hello")],
    "stream 0": [frame(TYPE_WINDOW_UPDATE, 0, 0, MOST), frame(TYPE_DATA, 0, 0, 0)],
}


@pytest.mark.parametrize("case", UPDATES)
async def test_invalid_window_updates_do_not_break_a_connection(case: str, nursery: trio.Nursery) -> None:
    """Bytes sent afterwards arrive unchanged."""
    muxer, theirs = await opened(nursery, *trio.testing.memory_stream_pair())
    await theirs.send_all(frame(TYPE_DATA, FLAG_SYN, 1, 5, b"hello"))
    with trio.fail_after(SECONDS):
        stream = await muxer.accept_stream()
        for one in UPDATES[case]:
            await theirs.send_all(one)
        await trio.testing.wait_all_tasks_blocked()
        assert await stream.read(5) == b"hello"
        await stream.write(b"answer" * 1000)
        came = b""
        while came.count(b"answer") < 1000:
            came += bytes(await theirs.receive_some(1 << 16))
    assert not muxer.event_closed.is_set() and len(muxer.streams) <= 2 and len(muxer.stream_buffers) <= 2


@pytest.mark.parametrize("code", [0, 1, 2, MOST])
async def test_after_go_away_the_connection_ends(code: int, nursery: trio.Nursery) -> None:
    muxer, theirs = await opened(nursery, *trio.testing.memory_stream_pair())
    await theirs.send_all(frame(TYPE_GO_AWAY, 0, 0, code))
    with trio.fail_after(SECONDS):
        await muxer.event_closed.wait()


@pytest.mark.net
@pytest.mark.parametrize("length", [1025, 1 << 20, 2**31, 2**63])
@pytest.mark.parametrize("where", ["before noise", "on a stream"])
async def test_a_too_long_negotiation_line_ends_the_connection_or_stream(
    where: str, length: int, nursery: trio.Nursery
) -> None:
    """The connection or stream ends at once, whether the rest of the line arrives or not."""
    _, engine, address = await started(nursery, 1)
    _, endpoint = parse_bootstrap(address)
    with trio.fail_after(SECONDS):
        if where == "before noise":
            async with await trio.open_tcp_stream(endpoint.host, endpoint.port) as raw:
                await raw.send_all(encode_varint_prefixed(b"/multistream/1.0.0\n") + encode_uvarint(length))
                await raw.send_all(b"x" * 100)
                try:
                    while await raw.receive_some(1 << 16):
                        pass
                except trio.BrokenResourceError:
                    pass
        else:
            async with hostile_peer(address) as (stack, target):
                stream = await stack.host.get_network().new_stream(
                    info_from_p2p_addr(Multiaddr(address)).peer_id
                )
                await stream.write(encode_varint_prefixed(b"/multistream/1.0.0\n") + encode_uvarint(length))
                with pytest.raises(Exception, match=r".*"):
                    while await stream.read(1 << 16):
                        pass
                    raise EOFError(target)
    assert engine.restarts == 0
