"""Members of a swarm and its shards, over the memory engine: who is counted, who is asked, and what waits."""

import random
from collections.abc import Collection, Iterator, Sequence

import trio
from trio.testing import MockClock

from p2p.engines.memory import MemorySwarm
from p2p.envelope import seal
from p2p.errors import StateUnwritable
from p2p.identity import Identity
from p2p.member import Member
from p2p.shards.sharding import LOOK_EVERY
from p2p.shards.shards import COMPANY, COUNTED, PATIENCE, Shards
from p2p.types import PeerId, PeerRequest, Reason
from swarmd.testing import NOW, TOPIC, Clock, memory_member

AUTHORS = 3.0  # that a shard should have
SPEAKS = 30.0  # seconds between two sets of one node


def member(swarm: MemorySwarm, n: int, clock: Clock, kinds: Collection[str] | None = None) -> Member:
    return memory_member(swarm, n, clock, shards=Shards(random.Random(n), clock(), authors=AUTHORS), kinds=kinds)


def live(members: Sequence[Member], clock: Clock, seconds: float) -> None:
    for step in range(int(seconds / LOOK_EVERY)):
        clock.now += LOOK_EVERY
        for m in members:
            m.sharding.look()
        for m in members if step % int(SPEAKS / LOOK_EVERY) == 0 else ():
            m.publish("offer", random.randbytes(8))
        for m in members:
            m.received()


def test_it_says_where_it_is_and_when_it_last_heard_a_member() -> None:
    swarm, clock = MemorySwarm(), Clock()
    a, b = member(swarm, 1, clock), member(swarm, 2, clock)
    a.sharding.look()
    assert (a.sharding.home, a.sharding.shards, a.sharding.heard_at) == (0, 1, None)
    clock.now += 7
    b.publish("offer", b"body")
    assert a.sharding.heard_at == NOW + 7 and b.sharding.heard_at is None


def test_who_is_neither_connected_nor_was_useful_is_not_heard() -> None:
    swarm, clock = MemorySwarm(), Clock()
    a, stranger = member(swarm, 1, clock), Identity.from_seed(b"s" * 32)
    a.sharding.look()
    for number in (1, 2):
        swarm.inject(seal(stranger, TOPIC.swarm_id, number, clock(), "offer", b"body"))
        assert len(a.received()) == 1  # it is a frame like others
        assert a.sharding.heard_at == (None if number == 1 else clock())
        a.vouch(stranger.peer_id, 1)


def test_frames_of_a_kind_that_nobody_knows_count_for_nothing() -> None:
    swarm, clock = MemorySwarm(), Clock()
    a, b = member(swarm, 1, clock, kinds=("offer",)), member(swarm, 2, clock)
    a.sharding.look()
    b.publish("presence", b"")
    assert a.sharding.heard_at is None and len(a.received()) == 1
    b.publish("offer", b"")
    assert a.sharding.heard_at == NOW


async def test_a_member_asks_those_that_it_is_connected_to(autojump_clock: MockClock) -> None:
    swarm, clock = MemorySwarm(), Clock()
    there, late = member(swarm, 1, clock), member(swarm, 99, clock)
    others = [member(swarm, n, clock) for n in range(2, 9)]
    live([there, *others, late], clock, COUNTED + SPEAKS)
    heard: list[PeerId] = []
    there.answers[PeerRequest.SWARM_SIZE] = lambda peer, _: heard.append(peer) or b""
    with trio.fail_after(1200):
        async with trio.open_nursery() as nursery:
            await nursery.start(late.run)
            while late.identity.peer_id not in heard:
                clock.now += LOOK_EVERY
                await trio.sleep(LOOK_EVERY)
            nursery.cancel_scope.cancel()
    assert others[0].sharding.answer(late.identity.peer_id, PeerRequest.SWARM_SIZE.message())  # who has counted says something


def test_a_frame_is_for_one_shard() -> None:
    """Or whoever is in two could make everybody hear what a few were to hear, by saying it again in shard 0."""
    swarm, clock = MemorySwarm(), Clock()
    a, b = member(swarm, 1, clock), member(swarm, 2, clock)
    b.engine.subscribe({5})
    frame = a._seal("offer", b"body", 5)
    a.engine.publish(frame, 0)
    assert not b.received() and b.rejected == {Reason.OTHER_SWARM: 1}
    a.engine.publish(frame, 5)
    assert [envelope.body for envelope in b.received()] == [b"body"]


class Full(Iterator[int]):
    def __next__(self) -> int:
        raise StateUnwritable("the disk is full")


def test_what_waits_for_a_place_waits_on_while_the_disk_is_full() -> None:
    swarm, clock = MemorySwarm(), Clock()
    others = [member(swarm, n, clock) for n in range(1, COMPANY + 1)]
    late = member(swarm, 99, clock)
    late.sharding.look()
    late.publish("offer", b"first")
    late._sequence, numbers = Full(), late._sequence
    clock.now += max(PATIENCE)
    late.sharding.look()
    assert late.sharding._home is not None and not any(m.received() for m in others)
    late._sequence = numbers
    late.sharding.look()
    assert [[envelope.body for envelope in m.received()] for m in others] == [[b"first"]] * len(others)
