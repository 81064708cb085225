"""Limits on the resources that one peer may use of the libp2p engine's DHT, with real hosts on loopback."""

import time
import tracemalloc
from collections import Counter
from functools import partial
from typing import Any

import base58
import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.identify_push.identify_push import push_identify_to_peer
from libp2p.identity.update import update_peerstore_from_identify
from libp2p.kad_dht.common import BUCKET_SIZE, PROTOCOL_ID
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.network.stream.exceptions import StreamEOF, StreamReset
from libp2p.peer.envelope import seal_record
from libp2p.peer.id import ID
from libp2p.peer.peer_record import PeerRecord
from libp2p.peer.peerinfo import PeerInfo
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr
from multiaddr.resolvers import DNSResolver

from p2p.engines.libp2p import connections, network, streams
from p2p.engines.libp2p import dht as bounds
from p2p.engines.libp2p.connections import Libp2pConnections
from p2p.engines.libp2p.dht import MAX_ADDRESSES, MAX_ID_BYTES, MAX_LENGTH, MAX_PROTOCOLS, bounded
from p2p.engines.libp2p.stack import Stack, make_host
from p2p.identity import Identity
from p2p.topic import Topic
from tests.doubles import until
from tests.p2p.engines.libp2p.test_libp2p import stack_of, started
from tests.p2p.hostile import hostile_peer
from tests.p2p.real import SECONDS, TOPIC

pytestmark = pytest.mark.net
KEY = b"\x12\x20" + bytes(32)
NO_ADDRESS = Multiaddr(b"\x36\x02\xff\xff")  # a DNS name that is not UTF-8


FIND = partial(Message, type=Message.MessageType.FIND_NODE, key=bytes(34))  # a valid question


def addresses(count: int) -> list[Multiaddr]:
    return [Multiaddr(f"/ip4/11.0.{n // 256}.{n % 256}/tcp/4001") for n in range(count)]


def signed(peer: ID, where: list[Multiaddr], number: int) -> bytes:
    """Return the hostile peer's signed record of its address."""
    key = create_new_key_pair(bytes([66]) * 32).private_key
    return bytes(seal_record(PeerRecord(peer, where, seq=number), key).marshal_envelope())


async def found(engine: Any, topic: Topic) -> list[Any]:
    """Return the peers that the DHT names for a topic."""
    return list(await engine._discovery.connections.providers(topic))


async def ask(stack: Stack, target: Any, message: Message) -> Message | None:
    """Ask a peer's DHT; return its answer, or None if it does not answer."""
    stream = await stack.host.new_stream(target, [PROTOCOL_ID])
    try:
        with trio.fail_after(SECONDS):
            await stream.write(encode_varint_prefixed(message.SerializeToString()))
            answer = Message()
            answer.ParseFromString(await read_varint_prefixed_bytes_limited(stream, 1 << 20))
            return answer
    except trio.TooSlowError:
        raise
    except Exception:
        return None


def answering(reply: Message) -> Any:
    """Return a handler that answers each question with `reply`, with the question's type and key."""

    async def answer(stream: Any) -> None:
        question = Message()
        question.ParseFromString(await read_varint_prefixed_bytes_limited(stream, 1 << 20))
        reply.type, reply.key = question.type, question.key
        await stream.write(encode_varint_prefixed(reply.SerializeToString()))

    return answer


async def test_values_of_other_nodes_are_not_stored(nursery: trio.Nursery) -> None:
    _, engine, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        message = Message(type=Message.MessageType.PUT_VALUE, key=b"any")
        message.record.key, message.record.value = b"any", b"x"
        assert await ask(stack, target, message) is None
        assert not stack_of(engine).dht.value_store.store


async def test_the_addresses_stored_for_a_peer_are_limited(nursery: trio.Nursery) -> None:
    """The limit holds for addresses that the peer signs and for addresses that other peers report."""
    _, engine, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        store, me = stack_of(engine).host.get_peerstore(), stack.host.get_id()
        await ask(stack, target, FIND(senderRecord=signed(me, addresses(150), 2**62)))
        assert len(store.addrs(me)) <= MAX_ADDRESSES and len(store.get_peer_record(me).record().addrs) == 150
        larger = FIND(senderRecord=signed(me, addresses(1000), 2**62 + 1))
        assert await ask(stack, target, larger) is None
        assert len(store.get_peer_record(me).record().addrs) == 150
        other = ID(KEY)
        for n in range(3):
            store.add_addrs(other, addresses(100)[n * 10 :], 100)
        assert store.addrs(other) == addresses(100)[20 : 20 + MAX_ADDRESSES]


async def test_a_peer_is_found_although_another_peer_has_an_older_record_of_it(
    nursery: trio.Nursery,
) -> None:
    """js-libp2p signs a new record for each peer that asks."""
    keys, (newer, older) = create_new_key_pair(bytes([67]) * 32), addresses(2)
    _, engine, address = await started(nursery, 1)
    named = ID.from_pubkey(keys.public_key)
    records = [
        seal_record(PeerRecord(named, [at], seq=seq), keys.private_key)
        for at, seq in ((newer, 2), (older, 1))
    ]
    async with hostile_peer(address) as (stack, _):
        store = stack_of(engine).host.get_peerstore()
        assert store.consume_peer_record(records[0], 100)
        provider = Message.Peer(id=named.to_bytes(), signedRecord=records[1].marshal_envelope())
        provider.addrs.append(older.to_bytes())

        async def answer(stream: Any) -> None:
            await read_varint_prefixed_bytes_limited(stream, 1 << 20)
            said = Message(type=Message.MessageType.GET_PROVIDERS, key=KEY, providerPeers=[provider])
            await stream.write(encode_varint_prefixed(said.SerializeToString()))

        stack.host.set_stream_handler(PROTOCOL_ID, answer)
        lookup = ProviderStore(host=stack_of(engine).host, peer_routing=stack_of(engine).dht.peer_routing)
        await stack_of(engine).dht.add_peer(stack.host.get_id())
        with trio.fail_after(SECONDS):
            assert named in [info.peer_id for info in await lookup.find_providers(KEY)]
        assert store.get_peer_record(named).record().addrs == [newer]


async def unused(stream: Any) -> None: ...


async def test_the_protocols_stored_for_a_peer_are_limited(nursery: trio.Nursery) -> None:
    _, engine, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        store, me = stack_of(engine).host.get_peerstore(), stack.host.get_id()
        for name in [f"/{n}" for n in range(1000)]:
            stack.host.set_stream_handler(TProtocol(name), unused)
        assert await push_identify_to_peer(stack.host, target)
        await until(lambda: "/0" in store.get_protocols(me), SECONDS)
        assert len(store.get_protocols(me)) <= MAX_PROTOCOLS
        store.add_protocols(ID(KEY), ["/long" * MAX_LENGTH, "/short"])
        assert store.get_protocols(ID(KEY)) == ["/short"]


async def test_bytes_that_are_not_an_address_are_not_stored(nursery: trio.Nursery) -> None:
    """Otherwise the next list of members would convert them to text, which once ended the engine."""
    (good,) = addresses(1)
    _, engine, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        store, me = stack_of(engine).host.get_peerstore(), stack.host.get_id()
        record = signed(me, [NO_ADDRESS, good], 2**62)
        assert await ask(stack, target, FIND(senderRecord=record)) is not None
        assert store.addrs(me) == [good]
    long = Multiaddr("/tcp/1" * MAX_LENGTH)
    assert bounded([NO_ADDRESS, Multiaddr(b""), long, good]) == [good]


async def test_a_long_address_in_an_identify_message_is_not_stored() -> None:
    store, (good,) = make_host(Identity(bytes(32))).get_peerstore(), addresses(1)
    tracemalloc.start()
    for n in range(20):
        told = Identify(listen_addrs=[b"\x04" + bytes([n]) * 100_000, good.to_bytes()])
        await update_peerstore_from_identify(store, ID(KEY), told)
    del told
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000 and store.addrs(ID(KEY)) == [good]


async def test_a_full_peer_store_keeps_the_nodes_key_and_accepts_a_peer_without_addresses() -> None:
    host = make_host(Identity(bytes(32)))
    store, key = host.get_peerstore(), host.get_private_key()
    store.max_peers = 3
    for n in range(5):
        store.add_addrs(ID(bytes([n]) * 34), addresses(1), 3600)
    store.add_addrs(ID(KEY), [], 3600)
    assert host.get_private_key() == key and len(store.peer_data_map) <= store.max_peers + 1


async def test_a_full_peer_store_drops_the_oldest_peers_that_are_not_connected() -> None:
    """Once, records of other peers displaced the records of connected relays, so no relay was known."""
    host = make_host(Identity(bytes(32)))
    store, network = host.get_peerstore(), host.get_network()
    store.max_peers = 4
    peers = [ID(bytes([n]) * 34) for n in range(9)]
    network.connections[peers[0]] = [None]
    for peer in peers:
        store.add_protocols(peer, ["a"])
        store.add_addrs(peer, addresses(1), 3600)
    assert [*store.peer_data_map] == [host.get_id(), peers[0], *peers[-2:]]


async def test_an_address_of_a_stored_peer_displaces_no_other_peer() -> None:
    store = make_host(Identity(bytes(32))).get_peerstore()
    store.max_peers = 4
    peers = [ID(bytes([n])) for n in range(5)]
    for peer in peers[:3]:
        store.add_protocols(peer, ["a"])
    for n in range(9):
        store.add_addrs(peers[3 + (n > 5)], addresses(n), 100)
    kept = {*store.peer_data_map} & {*peers}
    assert len(kept) == store.max_peers - 1 and peers[4] in kept


async def test_the_number_of_provider_records_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The records of the keys that were announced last are kept."""
    monkeypatch.setattr(bounds, "MAX_KEYS", 3)
    providers = bounds.BoundedProviders(host=make_host(Identity(bytes(32))))
    for n in (1, 2, 3, 1, 4):
        providers.add_provider(bytes([n]), PeerInfo(ID(KEY), addresses(100)))
    assert [*providers.providers] == [b"\x03", b"\x01", b"\x04"]
    assert providers.get_providers(b"\x01")[0].addrs == addresses(MAX_ADDRESSES)


async def test_providers_of_a_large_swarm_take_turns_and_repeats_do_not_change_them() -> None:
    """Otherwise 300 members would dial only the first 20, whose places are full, for 80 s each."""
    providers = bounds.BoundedProviders(host=make_host(Identity(bytes(32))))
    peers = [ID(bytes([n])) for n in range(BUCKET_SIZE + 2)]
    for peer in (*peers[:-2], peers[0], peers[-2], peers[-2], peers[-1]):
        providers.add_provider(KEY, PeerInfo(peer, addresses(1)))
    assert [info.peer_id for info in providers.get_providers(KEY)] == peers[2:]


class Came:
    """A store of providers whose announcements come from groups that the test chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self._groups = bounds.BoundedProviders(host=make_host(Identity(bytes(32)))), {}
        monkeypatch.setattr(self.store, "_group_of", self._groups.get)

    def announce(self, key: bytes, group: str, number: int) -> None:
        peer = ID(f"{group} {number}".encode())
        self._groups[peer] = group
        self.store.add_provider(key, PeerInfo(peer, addresses(1)))

    def of(self, key: bytes) -> Counter[str]:
        """Count the records that each group has under a key."""
        return Counter(self._groups[info.peer_id] for info in self.store.get_providers(key))


@pytest.mark.parametrize("first", ["the attacker", "the members"])
async def test_a_group_that_announces_many_keys_has_one_place_among_many_groups(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Otherwise it would fill the list, and newcomers that ask this node would find no other provider."""
    came, members = Came(monkeypatch), [f"member {n}" for n in range(BUCKET_SIZE)]
    for turn in range(3):
        for n in range(100):
            if first == "the attacker" or turn:
                came.announce(KEY, "attacker", 100 * turn + n)
            if n % 5 == 0:
                came.announce(KEY, members[n // 5], 0)
    found = came.of(KEY)
    assert found["attacker"] <= 1 and sum(found.values()) == BUCKET_SIZE == len(found)
    for n in range(BUCKET_SIZE):  # in a small swarm, all members stay
        came.announce(KEY + b"2", members[n % 5], n % 5)
        came.announce(KEY + b"2", "attacker", n)
    assert came.of(KEY + b"2") == Counter(dict.fromkeys(members[:5], 1), attacker=BUCKET_SIZE - 5)
    for n in range(3):  # a group that announces later, such as nodes behind one router, gets its share
        came.announce(KEY + b"2", "late", n)
    assert came.of(KEY + b"2")["late"] == 3


async def test_a_peer_that_announces_many_swarms_does_not_displace_this_swarm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "MAX_KEYS", 8)
    came = Came(monkeypatch)
    came.announce(KEY, "member", 0)
    came.announce(KEY, "attacker", 0)
    for n in range(100):
        came.announce(bytes([n]), "attacker", n)
        came.announce(bytes([n]), "its friend", n)
    assert came.of(KEY) == {"member": 1, "attacker": 1} and len(came.store.providers) == 8


async def test_an_announcement_counts_for_the_machine_that_sent_it(nursery: trio.Nursery) -> None:
    _, engine, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        me = Message.Peer(id=stack.host.get_id().to_bytes(), addrs=[addresses(1)[0].to_bytes()])
        await ask(stack, target, Message(type=Message.MessageType.ADD_PROVIDER, key=KEY, providerPeers=[me]))
        store = stack_of(engine).dht.provider_store.providers
        await until(lambda: KEY in store)
        assert [record.group for record in store[KEY].values()] == ["local 127.0.0.1"]


LONG = b"\x00\xa0\x1f" + bytes(4000)  # a long peer id: one of 190 KB once kept a node busy for a minute
LIAR = Message.Peer(id=LONG, addrs=[addresses(1)[0].to_bytes()])


@pytest.fixture
def made_text(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record each peer id that is converted to text, which takes quadratic time."""
    made, encode = [0], base58.b58encode

    def noted(data: bytes) -> bytes:
        made.append(len(data))
        return encode(data)

    monkeypatch.setattr(base58, "b58encode", noted)
    return made


@pytest.mark.parametrize(
    "message",
    [
        Message(type=Message.MessageType.ADD_PROVIDER, key=KEY, providerPeers=[LIAR]),
        Message(type=Message.MessageType.FIND_NODE, key=LONG),
        Message(type=Message.MessageType.GET_PROVIDERS, key=LONG),
    ],
    ids=["provider", "node", "key"],
)
async def test_long_ids_in_a_question_are_not_converted_to_text(
    message: Message, made_text: list[int], nursery: trio.Nursery
) -> None:
    _, _, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        await ask(stack, target, message)
        assert max(made_text) <= MAX_ID_BYTES


async def test_long_ids_in_an_answer_are_not_converted_to_text(
    made_text: list[int], nursery: trio.Nursery
) -> None:
    reply = Message(providerPeers=[LIAR], closerPeers=[LIAR])
    member, engine, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, _):
        stack.host.set_stream_handler(PROTOCOL_ID, answering(reply))
        assert await found(engine, member.topic) == [] and reply.key  # the hostile peer was asked
        assert max(made_text) <= MAX_ID_BYTES


@pytest.mark.parametrize(
    ("theirs", "where"),
    [
        ("11.0.0.1", "/ip4/127.0.0.1/tcp/{}"),
        ("127.0.0.1", "/ip4/127.0.0.1/tcp/{}"),
        ("11.0.0.1", "/ip4/127.0.0.1/tcp/{}/tls"),
        ("11.0.0.1", "/dns4/victim.example/tcp/{}"),
    ],
    ids=["far", "near", "far, with more behind it", "far, by name"],
)
async def test_local_addresses_in_a_distant_peers_answer_are_not_dialled(
    theirs: str, where: str, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """Otherwise any peer could make a node connect to programs on its machine or local network."""
    monkeypatch.setattr(network, "remote_host", lambda _: theirs)
    dialled = trio.Event()

    async def listening(stream: trio.SocketStream) -> None:
        dialled.set()

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, listening, [listener])
    port = listener.socket.getsockname()[1]

    async def resolve(*_: Any) -> list[Multiaddr]:
        return [Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")]

    monkeypatch.setattr(DNSResolver, "resolve", resolve)
    named = Message.Peer(
        id=ID.from_pubkey(create_new_key_pair(bytes([68]) * 32).public_key).to_bytes(),
        addrs=[Multiaddr(where.format(port)).to_bytes()],
    )
    member, engine, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, _):
        stack.host.set_stream_handler(PROTOCOL_ID, answering(Message(closerPeers=[named])))
        await found(engine, member.topic)
    assert dialled.is_set() == (theirs == "127.0.0.1")


async def test_streams_without_a_question_do_not_block_peers_that_ask(nursery: trio.Nursery) -> None:
    _, _, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target), hostile_peer(address, 67) as (other, _):
        silent = [await stack.host.new_stream(target, [PROTOCOL_ID]) for _ in range(20)]
        assert await ask(other, target, FIND()) is not None
        assert len(silent) == 20


async def test_a_stream_is_served_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(bounds, "STREAM_S", 0.1)
    _, _, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        stream = await stack.host.new_stream(target, [PROTOCOL_ID])
        with trio.fail_after(SECONDS), pytest.raises((StreamEOF, StreamReset)):
            await stream.read(1)


async def test_a_cancelled_lookup_leaves_no_stream_open(nursery: trio.Nursery) -> None:
    """A connection allows 256 streams, and the other side may end none of them."""
    _, engine, address = await started(nursery, 1)
    ended = trio.Event()
    async with hostile_peer(address) as (silent, _):

        async def say_nothing(stream: Any) -> None:
            await stream.read(1)  # the question has arrived
            scope.cancel()
            silent.host.set_stream_handler(PROTOCOL_ID, unused)
            try:
                while await stream.read(1 << 16):
                    pass
            finally:
                ended.set()

        connections = Libp2pConnections(stack_of(engine), [TOPIC], time.time, lambda *_: None)
        silent.host.set_stream_handler(PROTOCOL_ID, say_nothing)
        with trio.CancelScope() as scope:
            await connections.providers(TOPIC)
        assert scope.cancelled_caught
        with trio.fail_after(SECONDS):
            await ended.wait()


async def test_a_peer_whose_address_does_not_answer_is_given_up_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(streams, "CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(trio, "open_tcp_stream", lambda *_: trio.sleep_forever())
    _, engine, _ = await started(nursery, 1)
    table = stack_of(engine).dht.routing_table
    gone = ID.from_pubkey(create_new_key_pair(bytes([68]) * 32).public_key)
    stack_of(engine).host.get_peerstore().add_addrs(gone, addresses(1), 1000)
    assert await table.add_peer(PeerInfo(gone, addresses(1)))
    await found(engine, TOPIC)
    assert not table.peer_in_table(gone)


async def test_a_lookup_that_takes_too_long_returns_the_peers_found_so_far(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(connections, "DHT_TIMEOUT_S", 1.0)
    _, engine, address = await started(nursery, 1)
    there = ID.from_pubkey(create_new_key_pair(bytes([68]) * 32).public_key)
    named = Message(providerPeers=[Message.Peer(id=there.to_bytes(), addrs=[addresses(1)[0].to_bytes()])])

    async def hang_up(stream: Any) -> None:
        silent.host.set_stream_handler(PROTOCOL_ID, lambda _: trio.sleep_forever())
        await stream.reset()

    async with hostile_peer(address) as (stack, _), hostile_peer(address, 67) as (silent, _):
        stack.host.set_stream_handler(PROTOCOL_ID, answering(named))
        # The second question asks for providers.
        silent.host.set_stream_handler(PROTOCOL_ID, hang_up)
        assert str(there) in {record.peer for record in await found(engine, TOPIC)}


async def test_a_peer_that_asks_too_many_questions_is_cut_off(nursery: trio.Nursery) -> None:
    _, _, address = await started(nursery, 1)
    async with hostile_peer(address) as (stack, target):
        stream = await stack.host.new_stream(target, [PROTOCOL_ID])
        ping = Message(type=Message.MessageType.PING).SerializeToString()
        for _ in range(1000):
            try:
                await stream.write(encode_varint_prefixed(ping))
            except Exception:
                break
        await until(lambda: not stack.host.get_network().get_connections(target), SECONDS)
