"""The contract of every p2p engine: one suite, run on each engine and on mixed swarms."""

import contextlib
import errno
import itertools
import random
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from ipaddress import IPv6Address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import trio
from libp2p.network.exceptions import SwarmException

from p2p.address import own_ports, parse_bootstrap, parse_listen
from p2p.admission.host_bans import BANNED_AT_ONCE
from p2p.engines import BUILT_IN, GROUP, engine, network_engine, offered
from p2p.engines.memory import MemorySwarm
from p2p.errors import AddressMissing, BadAddress, CannotListen, EngineMissing, OperatorError
from p2p.identity import Identity
from p2p.peers.listen import SOMEWHERE, dialable, has_route, held_ports, outward_first
from p2p.topic import Topic
from p2p.types import (
    MAX_QUESTION_BYTES,
    Handlers,
    P2pEngine,
    PeerId,
    PeerRequest,
    Reason,
    Unanswered,
    Verdict,
)
from tests.doubles import ListeningMember, until
from tests.engines.p2pd import p2pd_missing
from tests.p2p.hostile import hostile_peer
from tests.p2p.real import SECONDS, TOPIC, heard, real_engine


class MemoryNet:
    knows_directions = True

    def __init__(self) -> None:
        self.swarms: dict[Topic, MemorySwarm] = {}

    def build(
        self, identity: Identity, topic: Topic, bootstrap: Sequence[str]
    ) -> Callable[[Handlers], P2pEngine]:
        return lambda handlers: self.swarms.setdefault(topic, MemorySwarm()).join(identity.peer_id, handlers)


class RealNet:
    """Members on loopback that run `engines` in turn, so that neighbours of a mixed swarm differ."""

    def __init__(self, *engines: str) -> None:
        self._engines = itertools.cycle(engines)
        self.knows_directions = "hivemind" not in engines

    def build(
        self, identity: Identity, topic: Topic, bootstrap: Sequence[str] = (), **options: Any
    ) -> Callable[[Handlers], P2pEngine]:
        return partial(
            real_engine, next(self._engines), identity.seed[0], topic=topic, bootstrap=bootstrap, **options
        )


def nets(*names: str) -> list[Any]:
    def marks(name: str) -> list[Any]:
        return [pytest.mark.net] * (name != "memory") + [pytest.mark.p2pd] * ("hivemind" in name)

    return [pytest.param(name, marks=marks(name), id=name) for name in names]


def make(name: str) -> Any:
    return MemoryNet() if name == "memory" else RealNet(*name.split("+"))


# Installed engines of other packages are tested, too.
REAL = tuple(dict.fromkeys(("libp2p", "hivemind", *offered())))


@pytest.fixture(params=nets("memory", *REAL))
def net(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


@pytest.fixture(params=nets("memory", *REAL, "libp2p+hivemind"))
def any_net(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


@pytest.fixture(params=nets(*REAL))
def real(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


def member(
    net: Any, n: int, bootstrap: Sequence[str] = (), topic: Topic = TOPIC, **options: Any
) -> ListeningMember:
    identity = Identity(bytes([n]) * 32)
    numbers = itertools.count(int(time.time() * 1000))
    return ListeningMember(
        identity, topic, net.build(identity, topic, bootstrap, **options), sequence=numbers, clock=time.time
    )


async def started(
    nursery: trio.Nursery, net: Any, n: int, *bootstrap: str, **options: Any
) -> ListeningMember:
    found = member(net, n, bootstrap, **options)
    await nursery.start(found.run)
    return found


async def together(nursery: trio.Nursery, net: Any, count: int) -> list[ListeningMember]:
    first = await started(nursery, net, 1)
    members = [first, *[await started(nursery, net, n, first.addresses()[0]) for n in range(2, count + 1)]]
    await until(lambda: all(m.peers() for m in members))
    return members


# Members.


async def test_members_that_know_one_member_find_all_and_hear_each_frame_once(
    any_net: Any, nursery: trio.Nursery
) -> None:
    members = await together(nursery, any_net, 3)
    everybody = {m.identity.peer_id for m in members}
    await until(
        lambda: all({peer.id for peer in m.peers()} == everybody - {m.identity.peer_id} for m in members),
        2 * SECONDS,
    )
    for m in members:
        assert m.addresses() and all(
            address.endswith("/p2p/" + m.identity.peer_id) for address in m.addresses()
        )
        assert m.engine.me == m.identity.peer_id and {peer.direction for peer in m.peers()} <= {
            "inbound",
            "outbound",
        }
    way = {"inbound": "outbound", "outbound": "inbound"}

    def both_ends_agree() -> bool:
        ways = {(m.identity.peer_id, peer.id): peer.direction for m in members for peer in m.peers()}
        return all(way[here] == ways[there, us] for (us, there), here in ways.items())

    if any_net.knows_directions:  # p2pd does not report that its DHT dialled a peer
        await until(both_ends_agree, 2 * SECONDS)
    for n, m in enumerate(members):
        for k in range(3):
            m.publish("rollouts", bytes([n, k]) * 16_000)
    seen: list[list[bytes]] = [[] for _ in members]

    def collect(count: int) -> bool:
        for m, bodies in zip(members, seen, strict=True):
            bodies.extend(envelope.body for envelope in m.received())
        return all(len(bodies) >= count for bodies in seen)

    await until(lambda: collect(6))
    for n, m in enumerate(members):  # arrives after all duplicates of earlier frames
        m.publish("rollouts", bytes([n, 9]))
    await until(lambda: collect(8))
    for n, bodies in enumerate(seen):
        assert sorted(body[:2] for body in bodies) == [
            bytes([m, k]) for m in range(3) if m != n for k in (0, 1, 2, 9)
        ]


async def test_publishing_never_waits_and_a_member_that_leaves_is_no_longer_a_peer(net: Any) -> None:
    first = member(net, 1)

    def publish_much() -> None:
        for n in range(200):
            first.publish("rollouts", b"%d" % n)

    publish_much()  # before the engine is started
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(first.run)
        publish_much()  # without peers
        second = member(net, 2, list(addresses)[:1])
        async with trio.open_nursery() as inner:
            await inner.start(second.run)
            await until(first.peers)
            inner.cancel_scope.cancel()
        await until(lambda: not first.peers())
        first.publish("rollouts", b"alone again")
        nursery.cancel_scope.cancel()
    first.publish("rollouts", b"after")


async def test_members_with_another_digest_are_in_another_swarm(net: Any, nursery: trio.Nursery) -> None:
    a, b = await together(nursery, net, 2)
    stranger = await started(nursery, net, 9, a.addresses()[0], topic=Topic("main", "fedcba9876543210"))
    if isinstance(net, RealNet):
        await until(lambda: stranger.identity.peer_id in a.engine.connected())
    stranger.publish("rollouts", b"theirs")
    await heard(a, b)
    await heard(b, a)
    assert not stranger.received() and not {e.body for m in (a, b) for e in m.received()} & {b"theirs"}
    assert stranger.identity.peer_id not in {peer.id for peer in a.peers()} and not stranger.peers()


async def test_a_frame_of_another_version_or_swarm_is_not_forwarded(net: Any, nursery: trio.Nursery) -> None:
    a, b = await together(nursery, net, 2)
    sealed: list[bytes] = []
    real, a.engine.publish = a.engine.publish, lambda frame: sealed.append(frame)  # type: ignore[method-assign]
    a.publish("rollouts", b"body")
    real(sealed[0].replace(b"swarmd\x01", b"swarmd\x02"))
    real(sealed[0][:20] + bytes(16) + sealed[0][36:])
    real(sealed[0][:-1] + bytes([sealed[0][-1] ^ 1]))
    await until(lambda: sum(b.rejected.values()) >= 3)
    assert (
        set(b.rejected) == {Reason.WRONG_VERSION, Reason.MALFORMED, Reason.BAD_SIGNATURE}
        or Reason.OTHER_SWARM in b.rejected
    )
    assert not b.received()
    real(sealed[0])
    await until(b.received)


async def test_a_bootstrap_node_that_starts_late_is_found_by_name_and_remembered(
    real: Any, tmp_path: Path, nursery: trio.Nursery
) -> None:
    """Both engines try again and remember the node, in the same format of the address book."""
    book = tmp_path / "peers.json"
    # Hold the port, so that no other program takes it between the two listeners.
    with held_ports([parse_listen("/ip4/127.0.0.1/tcp/0")]) as (endpoint,):
        port = endpoint.port
        (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
        me = Identity(bytes([1]) * 32).peer_id
        lone = member(real, 2, [f"/dns4/localhost/tcp/{port}/p2p/{me}"], addressbook=book)
        async with trio.open_nursery() as inner:
            await inner.start(lone.run)
            with trio.fail_after(SECONDS):
                dial = await listener.accept()  # the listener's key differs from the one in the address
            # With this option, the port is free again at once.
            dial.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await dial.aclose()
            await listener.aclose()
            late = await started(nursery, real, 1, listen=[f"/ip4/127.0.0.1/tcp/{port}"])
            await until(lone.peers)
            assert not lone.rejected and [peer.direction for peer in lone.peers()] == ["outbound"]
            await heard(lone, late)
            await heard(late, lone)
            inner.cancel_scope.cancel()
    assert me in book.read_text()
    for name in ("libp2p", "hivemind") if p2pd_missing() is None else ("libp2p",):
        async with trio.open_nursery() as inner:
            again = await started(inner, RealNet(name), 3, addressbook=book)
            await until(again.peers)
            inner.cancel_scope.cancel()


async def test_a_peer_that_sends_junk_is_cut_off_and_other_peers_are_still_heard(
    real: Any, nursery: trio.Nursery
) -> None:
    """With hivemind a node forwards frames before it checks them, and its neighbour blames it for them.

    So the node must cut off the peer before it loses the neighbour.
    """
    a = await started(nursery, real, 1)
    b = await started(nursery, RealNet("libp2p"), 2, a.addresses()[0])
    await heard(b, a)
    async with hostile_peer(a.addresses()[0]) as (stack, target):
        began = trio.current_time()
        with trio.fail_after(SECONDS):
            for n in itertools.count():
                if target not in stack.pubsub.peers:
                    break
                await stack.pubsub.publish(str(TOPIC), b"no frame" + n.to_bytes(4, "big"))
                await trio.sleep(0.02)
        may_be_broken = 40 + trio.current_time() - began  # 30 in a burst, then one a second
    assert sum(a.rejected.values()) <= may_be_broken  # frames after the cut are not checked
    await until(lambda: {peer.id for peer in a.peers()} == {b.identity.peer_id})
    await heard(b, a)
    await heard(a, b)
    assert a.engine.restarts == b.engine.restarts == 0  # type: ignore[attr-defined]


def break_library(a: Any, service: str) -> None:
    async def fail() -> None:
        raise RuntimeError("the library broke")

    stack = a.engine._stack
    {"router": stack.router, "pubsub": stack.pubsub, "network": stack.host.get_network()}[
        service
    ].manager.run_daemon_task(fail)


def signal_p2pd(a: Any, number: int) -> None:
    (child,) = (process for process in psutil.Process().children() if "p2pd" in process.name())
    child.send_signal(number)


BREAKS = [("libp2p", break_library, service) for service in ("router", "pubsub", "network")] + [
    ("hivemind", signal_p2pd, number) for number in (signal.SIGKILL, signal.SIGSTOP)
]


@pytest.mark.parametrize(
    "real, breaks, how",
    [pytest.param(*case, marks=nets(case[0])[0].marks) for case in BREAKS],
    indirect=["real"],
)
async def test_an_engine_restarts_with_the_same_key_and_port(
    real: Any,
    breaks: Callable[[Any, Any], None],
    how: str | int,
    monkeypatch: pytest.MonkeyPatch,
    nursery: trio.Nursery,
) -> None:
    """The library may fail, or its process may be killed or hang. Peers find the restarted engine again."""
    a = await started(nursery, real, 1)
    addresses = a.addresses()
    b = await started(nursery, RealNet("libp2p"), 2, addresses[0])
    await heard(b, a)
    with monkeypatch.context() as impatient:
        if breaks is signal_p2pd:
            impatient.setattr("swarmd_engine_hivemind.p2pd.ANSWER_TIMEOUT_S", 3.0)
        breaks(a, how)
        await until(lambda: a.engine.restarts == 1)  # type: ignore[attr-defined]
    await until(a.addresses)
    assert a.addresses() == addresses
    port, here = int(addresses[0].split("/")[4]), psutil.Process()
    sockets = [found for process in (here, *here.children()) for found in process.net_connections()]
    assert sum(found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in sockets) == 1
    await heard(b, a)
    await heard(a, b)


@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")
async def test_a_machine_with_several_banned_peers_is_rejected(real: Any, nursery: trio.Nursery) -> None:
    """A new peer from there is disconnected although it is not banned: p2pd accepts every dial.

    Peers that are already connected stay.
    """
    a = await started(nursery, real, 1)
    (address,) = a.addresses()
    b = await started(nursery, RealNet("libp2p"), 2, address)
    await until(a.peers)

    async def hung_up_on(stack: Any, target: Any) -> None:
        before = set(stack.host.get_network().get_connections(target))
        # The engine's DHT may dial again.
        await until(lambda: not before & {*stack.host.get_network().get_connections(target)})

    for n in range(int(BANNED_AT_ONCE) + 1):
        # Members that come and go do not count.
        async with hostile_peer(address, 40 + n) as (stack, target):
            await stack.host.disconnect(target)
    for n in range(int(BANNED_AT_ONCE) + 1):
        async with hostile_peer(address, 60 + n) as (stack, target):
            a.engine.shut_out(PeerId(str(stack.host.get_id())), 60)
            await hung_up_on(stack, target)
    try:
        async with hostile_peer(address, 70, meet=False) as (stack, target):
            await hung_up_on(stack, target)
    except* SwarmException:
        pass  # libp2p closes the connection before the handshake
    _, endpoint = parse_bootstrap(address)
    async with await trio.open_tcp_stream(
        endpoint.host, endpoint.port, local_address="127.0.0.2"
    ) as elsewhere:
        await elsewhere.send_all(b"\x13/multistream/1.0.0\n")
        with trio.fail_after(SECONDS):
            assert await elsewhere.receive_some(1)  # a peer from another host is accepted
    await heard(b, a)
    assert [peer.id for peer in a.peers()] == [b.identity.peer_id] and a.engine.restarts == 0  # type: ignore[attr-defined]


async def test_a_nodes_port_stays_the_same_unless_it_is_taken(real: Any) -> None:
    """Invitations name the port, and a router forwards it, so it must not change."""
    (own, second, *_), found = own_ports(Identity(bytes([1]) * 32).peer_id), list[int]()
    for taken in (None, ("127.0.0.1", own), None):
        with socket.create_server(taken) if taken else contextlib.nullcontext():
            async with trio.open_nursery() as nursery:
                _, endpoint = parse_bootstrap((await nursery.start(member(real, 1).run))[0])
                found.append(endpoint.port)
                nursery.cancel_scope.cancel()
    assert found == [own, second, own]


# Mistakes of an operator.


async def test_a_port_in_use_and_a_foreign_address_give_a_message(real: Any) -> None:
    first = member(real, 1, listen=["/ip4/0.0.0.0/tcp/0"])
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(first.run)
        assert addresses[0].startswith("/ip4/127.0.0.1/tcp/") and not any(
            "0.0.0.0" in address for address in addresses
        )
        _, endpoint = parse_bootstrap(addresses[0])
        await (await trio.open_tcp_stream(endpoint.host, endpoint.port)).aclose()
        for listen, error, said in (
            (f"/ip4/127.0.0.1/tcp/{endpoint.port}", CannotListen, rf"port {endpoint.port} .*swarm.listen"),
            ("/ip4/203.0.113.7/tcp/0", AddressMissing, r"203\.0\.113\.7.*swarm.listen"),
        ):
            caught: BaseException | None = None
            try:
                await nursery.start(member(real, 2, listen=[listen]).run)
            except* OperatorError as found:
                (caught,) = found.exceptions
            assert isinstance(caught, error) and re.search(said, str(caught))
        nursery.cancel_scope.cancel()
    assert dialable(["/ip4/192.0.2.1/tcp/1"]) == ["/ip4/192.0.2.1/tcp/1"]


def test_addresses_of_container_bridges_are_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every container host has the same private addresses, so no other node can dial them."""
    here = parse_listen("/ip4/127.0.0.1/tcp/9")
    bridges = ["10.0.3.1", "127.0.0.0", "172.17.0.1"]
    assert outward_first([*bridges, "127.0.0.1"], [here]) == ["127.0.0.1", *bridges]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if probe.connect_ex((SOMEWHERE[0].host, 9)):
            pytest.skip("needs a route to the internet")
        own = ["0.0.0.9", probe.getsockname()[0], "127.0.0.1"]
    named = [SimpleNamespace(family=socket.AF_INET, address=address) for address in own]
    bridge = [SimpleNamespace(family=socket.AF_INET, address="172.17.0.1")]
    found = {"eth0": named, "br-lan": [], "docker0": bridge, "br-0123456789ab": bridge, "virbr0": bridge}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: found)
    assert dialable(["/ip4/0.0.0.0/tcp/9"]) == [f"/ip4/{host}/tcp/9" for host in reversed(own)]


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="only Linux marks temporary addresses")
def test_a_temporary_address_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Desktop systems use a new random IPv6 address for outgoing connections each day."""
    hosts = [f"2600::{n}" for n in "123"]
    lines = [
        f"{IPv6Address(host).packed.hex()} 02 40 00 {flags} eth0\n"
        for host, flags in zip(hosts, ("80", "01", "20"), strict=True)
    ]
    monkeypatch.setattr(Path, "read_text", lambda *_: "".join(lines))
    named = [SimpleNamespace(family=socket.AF_INET6, address=host) for host in hosts]
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth0": named})
    assert dialable(["/ip6/::/tcp/9"]) == ["/ip6/2600::1/tcp/9"]


@pytest.mark.skipif(not has_route(parse_listen("/ip6/::1/tcp/9")), reason="needs IPv6")
def test_the_same_port_is_used_for_ipv4_and_ipv6_if_both_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    four, six = map(parse_listen, ("/ip4/127.0.0.1/tcp/0", "/ip6/::/tcp/0"))
    with held_ports([four, six]) as held:
        assert [one.kind for one in held] == ["ip4", "ip6"] and held[0].port == held[1].port > 0
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = other.getsockname()[1]
            with held_ports([replace(six, port=taken), four]) as apart:
                assert apart[0].port == taken != apart[1].port > 0
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        busy = replace(six, port=other.getsockname()[1])
        with pytest.raises(CannotListen, match="another program is using"), held_ports([four, busy]):
            pass

    whole = socket.socket

    def without_ipv6(family: int = socket.AF_INET, *more: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return whole(family, *more)

    monkeypatch.setattr(socket, "socket", without_ipv6)
    with held_ports([four, six]) as held:
        assert [one.kind for one in held] == ["ip4"]
    for listen in ([six], [four, parse_listen("/ip6/::1/tcp/0")]):
        with pytest.raises(CannotListen, match="not supported"), held_ports(listen):
            pass


@pytest.mark.parametrize(
    "text",
    ["example.org:4001", "/ip4/127.0.0.1/tcp/4001", "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWnotapeer", ""],
)
async def test_a_malformed_address_gives_a_message(real: Any, text: str) -> None:
    with pytest.raises(BadAddress, match="Write it like /ip4/"):
        member(real, 1, [text])
    with pytest.raises(BadAddress, match="Write it like /ip4/"):
        member(real, 1, listen=[text + "x"])


# Engines without a member.


class Node:
    """An engine without a member. It records frames, and gives answers of the requested length."""

    def __init__(self, net: Any, n: int, bootstrap: Sequence[str] = (), **options: Any) -> None:
        self.heard: list[bytes] = []
        self.asked: list[tuple[PeerId, bytes]] = []
        identity = Identity(bytes([n]) * 32)
        self.engine: P2pEngine = net.build(identity, TOPIC, bootstrap, **options)(
            Handlers(self._deliver, self._answer)
        )
        self.me = self.engine.me

    def _deliver(self, frame: bytes, via: PeerId | None) -> Verdict:
        self.heard.append(frame)
        return Verdict.ACCEPT

    def _answer(self, peer: PeerId, question: bytes) -> bytes:
        if question[:1] == bytes([PeerRequest.DIAL_BACK]):
            # A question of the engine itself.
            return b""
        self.asked.append((peer, question))
        return content(int(question or b"0"))

    def knows(self, other: "Node") -> bool:
        return other.me in {peer.id for peer in self.engine.peers()}


def content(length: int) -> bytes:
    return random.Random(length).randbytes(length)


async def nodes_together(nursery: trio.Nursery, net: Any, count: int, **options: Any) -> list[Node]:
    first = Node(net, 1, **options)
    addresses = await nursery.start(first.engine.run)
    nodes = [first, *(Node(net, n, list(addresses)[:1], **options) for n in range(2, count + 1))]
    for node in nodes[1:]:
        await nursery.start(node.engine.run)
    await until(lambda: all(node.engine.peers() for node in nodes))
    return nodes


async def test_members_answer_questions(any_net: Any, nursery: trio.Nursery) -> None:
    a, b = await nodes_together(nursery, any_net, 2)
    for asker, asked in ((a, b), (b, a)):
        request = asker.engine.request
        with trio.fail_after(SECONDS):
            for length in (10, 0, 200_000):
                assert await request(asked.me, b"%d" % length, 200_000) == content(length)
            assert await request(asked.me, b"", 10) == b""
            assert asked.asked[0] == (asker.me, b"10") and asked.asked[-1] == (asker.me, b"")
            for refused in (
                (asked.me, b"11", 10),
                (asked.me, b"1" * (MAX_QUESTION_BYTES + 1), 10),
                (asker.me, b"1", 10),
            ):
                with pytest.raises(Unanswered):
                    await request(*refused)
            with pytest.raises(Unanswered):
                await request(Identity(bytes([99]) * 32).peer_id, b"1", 10)


async def test_many_questions_at_once_and_cancelled_questions_leave_nothing_behind(
    net: Any, nursery: trio.Nursery
) -> None:
    a, b = await nodes_together(nursery, net, 2)
    right = 0

    async def one(asker: Node, asked: Node, length: int, patience: float = SECONDS) -> None:
        nonlocal right
        with trio.move_on_after(patience):
            answer = await asker.engine.request(asked.me, b"%d" % length, length)
            right += answer == content(length)

    # Cancel at each moment of the exchange. Afterwards all places are free.
    for patience in (*(n / 1000 for n in range(10)), SECONDS):
        right = 0
        with trio.fail_after(SECONDS):
            async with trio.open_nursery() as asking:
                for n in range(25):
                    asking.start_soon(one, a, b, 20_000 + n, patience)
                    asking.start_soon(one, b, a, 20_000 + n, patience)
    assert right == 50
    assert getattr(a.engine, "restarts", 0) == getattr(b.engine, "restarts", 0) == 0
    assert a.knows(b) and len(a.engine.peers()) == 1


async def test_a_peer_that_asks_too_many_questions_is_banned(
    real: Any, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(network_engine, "QUESTIONS_PER_S", 1.0)
    monkeypatch.setattr(network_engine, "QUESTIONS_AT_ONCE", 100.0)
    a, b, c = await nodes_together(nursery, real, 3)
    with trio.fail_after(SECONDS), pytest.raises(Unanswered):
        while True:
            await b.engine.request(a.me, b"1", 1)
    assert len(a.asked) >= 100
    await until(lambda: not a.knows(b))
    with trio.fail_after(SECONDS):
        assert await c.engine.request(a.me, b"1", 1) == content(1)


async def test_questions_to_a_member_that_left_fail_until_it_returns(net: Any, nursery: trio.Nursery) -> None:
    """The stream of the previous question has ended, and this end does not know."""
    first = Node(net, 1)
    addresses = await nursery.start(first.engine.run)
    second = Node(net, 2, list(addresses)[:1])
    outcome: list[str] = []

    async def ask_on() -> None:
        try:
            while True:
                await first.engine.request(second.me, b"100000", 100_000)
        except Unanswered as error:
            outcome.append(str(error))

    with trio.fail_after(2 * SECONDS):
        if isinstance(net, RealNet):  # in memory, members can be asked before they run
            with pytest.raises(Unanswered):
                await second.engine.request(first.me, b"1", 10)
        async with trio.open_nursery() as inner:
            await inner.start(second.engine.run)
            await until(first.engine.peers)
            nursery.start_soon(ask_on)
            await until(lambda: len(second.asked) > 3)
            inner.cancel_scope.cancel()
        await until(lambda: outcome)
        await until(lambda: not first.knows(second))
        await nursery.start(second.engine.run)
        await until(lambda: first.knows(second))
        assert (
            await first.engine.request(second.me, b"1", 1)
            == await second.engine.request(first.me, b"1", 1)
            == content(1)
        )


async def said(sender: Node, receivers: Sequence[Node]) -> bytes:
    """Publish frames until all receivers have heard the same frame; return that frame."""
    sent: list[bytes] = []
    with trio.fail_after(SECONDS):
        for n in itertools.count():
            sent.append(b"%d:" % n + sender.me.encode() + random.randbytes(8))
            sender.engine.publish(sent[-1])
            for _ in range(10):
                for frame in sent:
                    if all(frame in receiver.heard for receiver in receivers):
                        return frame
                await trio.sleep(0.02)
    raise AssertionError


async def test_a_banned_peer_is_neither_heard_nor_asked_until_the_ban_ends(
    net: Any, nursery: trio.Nursery
) -> None:
    later = 0.0  # seconds by which the test has moved the clock
    # The memory engine has no clock.
    options = {"clock": lambda: time.time() + later} if isinstance(net, RealNet) else {}
    a, b, c = await nodes_together(nursery, net, 3, **options)
    await said(a, [b])
    await until(lambda: b.knows(c))  # before this, b and c may know each other only through `a`
    b.engine.shut_out(a.me, 3600.0)
    for asker, asked in ((a, b), (b, a)):
        with pytest.raises(Unanswered), trio.fail_after(SECONDS):
            await asker.engine.request(asked.me, b"1", 10)
    if isinstance(net, RealNet):
        await until(lambda: not b.knows(a))
        await until(lambda: not a.knows(b))
    await said(c, [b])  # other members are still heard
    if isinstance(net, RealNet):  # in memory, a ban never ends
        assert not b.knows(a)
        later = 3600.0
        await until(lambda: b.knows(a))
        await said(a, [b])


async def test_engines_are_loaded_by_name() -> None:
    assert set(BUILT_IN) == {"libp2p"} <= set(offered()) and engine("libp2p").__name__ == "Libp2pEngine"
    with pytest.raises(EngineMissing, match=r"carrier-pigeon.*libp2p.*swarm\.engine"):
        engine("carrier-pigeon")


@pytest.mark.parametrize(
    ("target", "module", "said"),
    [
        (
            "no_such_p2p_module:engine",
            "",
            r"'pigeon' cannot be loaded \(ModuleNotFoundError: .*Reinstall its package",
        ),
        ("empty_p2p_engine:engine", "empty_p2p_engine", r"'pigeon' cannot be loaded \(AttributeError: "),
    ],
)
async def test_an_engine_that_cannot_be_loaded_gives_the_reason(
    target: str, module: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "pigeon-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\npigeon = {target}\n")
    (tmp_path / f"{module or 'nothing'}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineMissing, match=said):
        engine("pigeon")
