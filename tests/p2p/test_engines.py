"""What every engine promises. One suite, run on all of them."""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio

from p2p.engines import ENGINES, engine
from p2p.engines.common.network_engine import QUESTIONS_AT_ONCE
from p2p.engines.hivemind.p2pd import missing
from p2p.engines.memory import MemorySwarm
from p2p.errors import NoSuchEngine
from p2p.identity import Identity
from p2p.member import Member
from p2p.topic import Topic
from p2p.types import MAX_QUESTION, Engine, Handlers, PeerId, Reason, Unanswered, Verdict
from swarmd.testing import until

TOPIC = Topic("main", "0123456789abcdef")
pytestmark = pytest.mark.trio
SECONDS = 30.0  # patience; the machine may be busy


class MemoryNet:
    def __init__(self) -> None:
        self.swarms: dict[Topic, MemorySwarm] = {}

    def build(self, identity: Identity, topic: Topic, bootstrap: Sequence[str]) -> Callable[[Handlers], Engine]:
        return lambda handlers: self.swarms.setdefault(topic, MemorySwarm()).join(identity.peer_id, handlers)


class RealNet:
    """Members over loopback; `engines` in turn, so that with two names neighbours run different ones."""

    def __init__(self, *engines: str) -> None:
        self._engines = itertools.cycle(engines)

    def build(self, identity: Identity, topic: Topic, bootstrap: Sequence[str]) -> Callable[[Handlers], Engine]:
        name = next(self._engines)
        return lambda handlers: engine(name)(
            identity,
            topic,
            handlers,
            listen=["/ip4/127.0.0.1/tcp/0"],
            bootstrap=bootstrap,
            addressbook=None,
            clock=time.time,
            rng=random.Random(identity.peer_id),
        )


NETS: dict[str, Callable[[], Any]] = {
    "memory": MemoryNet,
    "libp2p": lambda: RealNet("libp2p"),
    "hivemind": lambda: RealNet("hivemind"),
    "libp2p+hivemind": lambda: RealNet("libp2p", "hivemind"),
    "hivemind+libp2p": lambda: RealNet("hivemind", "libp2p"),
}
NEEDS_P2PD = pytest.mark.skipif(missing() is not None, reason=missing() or "")


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.net] * (name != "memory") + [NEEDS_P2PD] * ("hivemind" in name)


@pytest.fixture(params=[pytest.param(name, marks=marks(name)) for name in NETS])
def net(request: pytest.FixtureRequest) -> Any:
    return NETS[request.param]()


def member(net: Any, n: int, bootstrap: Sequence[str] = (), topic: Topic = TOPIC) -> Member:
    identity = Identity.from_seed(bytes([n]) * 32)
    numbers = itertools.count(int(time.time() * 1000))
    return Member(identity, topic, net.build(identity, topic, bootstrap), sequence=numbers, clock=time.time)


async def together(nursery: trio.Nursery, net: Any, count: int) -> list[Member]:
    first = member(net, 1)
    addresses = await nursery.start(first.run)
    members = [first, *(member(net, n, list(addresses)[:1]) for n in range(2, count + 1))]
    for other in members[1:]:
        await nursery.start(other.run)
    await until(lambda: all(m.peers() for m in members))
    return members


def collect(members: Sequence[Member], seen: list[list[bytes]]) -> list[list[bytes]]:
    for m, bodies in zip(members, seen, strict=True):
        bodies.extend(envelope.body for envelope in m.received())
    return seen


async def test_every_member_hears_every_other_once(net: Any) -> None:
    async with trio.open_nursery() as nursery:
        members = await together(nursery, net, 3)
        for n, m in enumerate(members):
            for k in range(3):
                m.publish("rollouts", bytes([n, k]) * 16_000)
        seen: list[list[bytes]] = [[] for _ in members]
        await until(lambda: all(len(bodies) >= 6 for bodies in collect(members, seen)))
        await trio.sleep(0.3)  # time for a second copy
        for n, bodies in enumerate(collect(members, seen)):
            assert sorted(body[:2] for body in bodies) == [bytes([m, k]) for m in range(3) if m != n for k in range(3)]
        nursery.cancel_scope.cancel()


async def test_peers_and_addresses(net: Any) -> None:
    async with trio.open_nursery() as nursery:
        a, b = await together(nursery, net, 2)
        assert [peer.id for peer in a.peers()] == [b.identity.peer_id] and [peer.id for peer in b.peers()] == [a.identity.peer_id]
        for m in (a, b):
            assert m.addresses() and all(address.endswith("/p2p/" + m.identity.peer_id) for address in m.addresses())
            assert m.engine.me == m.identity.peer_id and {peer.direction for peer in m.peers()} <= {"inbound", "outbound"}
        nursery.cancel_scope.cancel()


async def test_one_who_leaves_is_no_longer_a_peer(net: Any) -> None:
    async with trio.open_nursery() as nursery:
        first = member(net, 1)
        addresses = await nursery.start(first.run)
        second = member(net, 2, list(addresses)[:1])
        async with trio.open_nursery() as inner:
            await inner.start(second.run)
            await until(first.peers)
            inner.cancel_scope.cancel()
        await until(lambda: not first.peers())
        first.publish("rollouts", b"alone")  # nobody there: no error
        nursery.cancel_scope.cancel()


async def test_publishing_never_waits_and_never_fails(net: Any) -> None:
    lonely = member(net, 1)
    for n in range(200):  # before it runs
        lonely.publish("rollouts", b"%d" % n)
    async with trio.open_nursery() as nursery:
        await nursery.start(lonely.run)
        for n in range(200):
            lonely.publish("rollouts", b"%d" % n)
        nursery.cancel_scope.cancel()
    lonely.publish("rollouts", b"after")


async def test_another_digest_is_another_swarm(net: Any) -> None:
    async with trio.open_nursery() as nursery:
        a, b = await together(nursery, net, 2)
        stranger = member(net, 9, list(a.addresses())[:1], Topic("main", "fedcba9876543210"))
        await nursery.start(stranger.run)
        a.publish("rollouts", b"ours")
        stranger.publish("rollouts", b"theirs")
        await until(b.received)
        await trio.sleep(1.0)  # time for it to be connected, and for what should not come
        assert not a.received() and not stranger.received() and not b.received()
        assert stranger.identity.peer_id not in {peer.id for peer in a.peers()} and not stranger.peers()
        nursery.cancel_scope.cancel()


async def test_a_frame_of_another_version_or_swarm_gets_no_further(net: Any) -> None:
    async with trio.open_nursery() as nursery:
        a, b = await together(nursery, net, 2)
        sealed: list[bytes] = []
        real, a.engine.publish = a.engine.publish, lambda frame, shard=0: sealed.append(frame)  # type: ignore[method-assign]
        a.publish("rollouts", b"body")
        real(sealed[0].replace(b"swarmd\x01", b"swarmd\x02"))
        real(sealed[0][:20] + bytes(16) + sealed[0][36:])
        real(sealed[0][:-1] + bytes([sealed[0][-1] ^ 1]))
        await until(lambda: sum(b.rejected.values()) >= 3)
        assert set(b.rejected) == {Reason.WRONG_VERSION, Reason.MALFORMED, Reason.BAD_SIGNATURE} or Reason.OTHER_SWARM in b.rejected
        assert not b.received()
        real(sealed[0])
        await until(b.received)
        nursery.cancel_scope.cancel()


class Node:
    """An engine alone: what it hears, and answers of the length that is asked for."""

    def __init__(self, net: Any, n: int, bootstrap: Sequence[str] = ()) -> None:
        self.heard: list[bytes] = []
        self.shards: list[int] = []  # in which each came
        self.asked: list[tuple[PeerId, bytes]] = []
        identity = Identity.from_seed(bytes([n]) * 32)
        self.engine: Engine = net.build(identity, TOPIC, bootstrap)(Handlers(self._deliver, self._answer))
        self.me = self.engine.me

    def _deliver(self, frame: bytes, via: PeerId | None, shard: int) -> Verdict:
        self.heard.append(frame)
        self.shards.append(shard)
        return Verdict.ACCEPT

    def _answer(self, peer: PeerId, question: bytes) -> bytes:
        self.asked.append((peer, question))
        return content(int(question or b"0"))


def content(length: int) -> bytes:
    return random.Random(length).randbytes(length)


async def nodes_together(nursery: trio.Nursery, net: Any, count: int) -> list[Node]:
    first = Node(net, 1)
    addresses = await nursery.start(first.engine.run)
    nodes = [first, *(Node(net, n, list(addresses)[:1]) for n in range(2, count + 1))]
    for node in nodes[1:]:
        await nursery.start(node.engine.run)
    await until(lambda: all(node.engine.peers() for node in nodes))
    return nodes


async def test_questions_are_answered(net: Any) -> None:
    async with trio.open_nursery() as nursery:
        a, b = await nodes_together(nursery, net, 2)
        for asker, asked in ((a, b), (b, a)):
            request = asker.engine.request
            with trio.fail_after(SECONDS):
                for length in (10, 0, 200_000):
                    assert await request(asked.me, b"%d" % length, 200_000) == content(length)
                assert await request(asked.me, b"", 10) == b""
                assert asked.asked[0] == (asker.me, b"10") and asked.asked[-1] == (asker.me, b"")
                for refused in ((asked.me, b"11", 10), (asked.me, b"1" * (MAX_QUESTION + 1), 10), (asker.me, b"1", 10)):
                    with pytest.raises(Unanswered):
                        await request(*refused)
                with pytest.raises(Unanswered):
                    await request(Identity.from_seed(bytes([99]) * 32).peer_id, b"1", 10)
        nursery.cancel_scope.cancel()


async def test_many_questions_at_once_and_those_given_up_leave_nothing_behind(net: Any) -> None:
    async with trio.open_nursery() as nursery:
        a, b = await nodes_together(nursery, net, 2)
        right = 0

        async def one(asker: Node, asked: Node, length: int, patience: float = SECONDS) -> None:
            nonlocal right
            with trio.move_on_after(patience):
                answer = await asker.engine.request(asked.me, b"%d" % length, length)
                right += answer == content(length)

        for patience in (*(n / 2000 for n in range(20)), SECONDS):  # at each moment of the exchange; and then all places are free
            right = 0
            with trio.fail_after(SECONDS):
                async with trio.open_nursery() as asking:
                    for n in range(25):
                        asking.start_soon(one, a, b, 20_000 + n, patience)
                        asking.start_soon(one, b, a, 20_000 + n, patience)
        assert right == 50
        assert getattr(a.engine, "restarts", 0) == getattr(b.engine, "restarts", 0) == 0
        assert [peer.id for peer in a.engine.peers()] == [b.me]
        nursery.cancel_scope.cancel()


async def test_who_never_stops_asking_is_shut_out(net: Any) -> None:
    if isinstance(net, MemoryNet):
        pytest.skip("nobody is hostile in memory")
    async with trio.open_nursery() as nursery:
        a, b, c = await nodes_together(nursery, net, 3)
        with trio.fail_after(SECONDS), pytest.raises(Unanswered):
            while True:
                await b.engine.request(a.me, b"1", 1)
        assert len(a.asked) >= QUESTIONS_AT_ONCE
        await until(lambda: b.me not in {peer.id for peer in a.engine.peers()})
        with trio.fail_after(SECONDS):
            assert await c.engine.request(a.me, b"1", 1) == content(1)
        nursery.cancel_scope.cancel()


async def test_who_was_away_is_asked_anew(net: Any) -> None:
    """The stream of the question before is no more, and nobody notices."""
    if isinstance(net, MemoryNet):
        pytest.skip("nobody ever leaves")
    async with trio.open_nursery() as nursery:
        a, b = await nodes_together(nursery, net, 2)
        c = Node(net, 3, list(a.engine.addresses())[:1])
        for _ in range(2):
            async with trio.open_nursery() as inner:
                await inner.start(c.engine.run)
                await until(lambda: c.me in {peer.id for peer in a.engine.peers()})
                with trio.fail_after(SECONDS):
                    assert await a.engine.request(c.me, b"1", 1) == await b.engine.request(a.me, b"1", 1) == content(1)
                inner.cancel_scope.cancel()
            await until(lambda: c.me not in {peer.id for peer in a.engine.peers()})
        nursery.cancel_scope.cancel()


async def test_who_leaves_is_asked_in_vain(net: Any) -> None:
    async with trio.open_nursery() as nursery:
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

        with trio.fail_after(SECONDS):
            if not isinstance(net, MemoryNet):  # whose members are there before they run
                with pytest.raises(Unanswered):
                    await second.engine.request(first.me, b"1", 10)
            async with trio.open_nursery() as inner:
                await inner.start(second.engine.run)
                await until(first.engine.peers)
                nursery.start_soon(ask_on)
                await until(lambda: len(second.asked) > 3)
                inner.cancel_scope.cancel()
            await until(lambda: outcome)
        nursery.cancel_scope.cancel()


async def test_a_shard_is_heard_by_those_in_it(net: Any) -> None:
    async with trio.open_nursery() as nursery:
        a, b, c = await nodes_together(nursery, net, 3)
        a.engine.publish(b"nobody is there", 9)  # and nothing waits for it
        a.engine.subscribe({5})
        b.engine.subscribe([5])
        await said(a, 5, [b])
        await said(b, 5, [a])
        await said(a, 0, [b, c])
        assert not any(frame.startswith(b"5:") for frame in c.heard)
        b.engine.subscribe({7, 0})
        c.engine.subscribe({5, 7})
        await said(c, 7, [b])
        await said(c, 5, [a])
        with trio.fail_after(SECONDS):
            while await said(c, 5, [a]) in b.heard:  # until it has left
                pass
        b.engine.subscribe(())
        await said(b, 0, [a, c])
        for node in (a, b, c):
            assert [int(frame.partition(b":")[0]) for frame in node.heard] == node.shards
        with pytest.raises(ValueError, match="outside"):
            a.engine.subscribe({2**16})
        nursery.cancel_scope.cancel()


async def said(sender: Node, shard: int, receivers: Sequence[Node]) -> bytes:
    """Published until all of them have heard one and the same frame; that frame."""
    sent: list[bytes] = []
    with trio.fail_after(SECONDS):
        for n in itertools.count():
            sent.append(b"%d:%d:" % (shard, n) + sender.me.encode() + random.randbytes(8))
            sender.engine.publish(sent[-1], shard)
            for _ in range(10):
                for frame in sent:
                    if all(frame in receiver.heard for receiver in receivers):
                        return frame
                await trio.sleep(0.02)
    raise AssertionError


async def test_who_is_shut_out_is_neither_heard_nor_asked(net: Any) -> None:
    async with trio.open_nursery() as nursery:
        a, b, c = await nodes_together(nursery, net, 3)
        await said(a, 0, [b])
        await until(lambda: c.me in {peer.id for peer in b.engine.peers()})  # so far they may know each other through `a` alone
        b.engine.shut_out(a.me, 60.0)
        for asker, asked in ((a, b), (b, a)):
            with pytest.raises(Unanswered), trio.fail_after(SECONDS):
                await asker.engine.request(asked.me, b"1", 10)
        if not isinstance(net, MemoryNet):
            await until(lambda: a.me not in {peer.id for peer in b.engine.peers()})
            await until(lambda: b.me not in {peer.id for peer in a.engine.peers()})
        await said(c, 0, [b])  # the others still are
        nursery.cancel_scope.cancel()


async def test_engines_are_loaded_by_name() -> None:
    assert set(ENGINES) == {"memory", "libp2p", "hivemind"} and engine("memory").__name__ == "MemoryEngine"
    with pytest.raises(NoSuchEngine, match=r"carrier-pigeon.*libp2p, hivemind, memory"):
        engine("carrier-pigeon")
