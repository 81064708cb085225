"""Members of a swarm cut into shards, over the memory engine: who hears whom, and who says how large it is."""

import itertools
import random
from collections.abc import Iterator, Sequence
from statistics import median

import pytest
import trio
from trio.testing import MockClock

from p2p.engines.memory import MemorySwarm
from p2p.errors import StateUnwritable
from p2p.identity import Identity
from p2p.member import Member
from p2p.sharding import LOOK_EVERY
from p2p.shards import COMPANY, HELLO, HELLO_EVERY, PATIENCE, Hello, Shards
from p2p.topic import Topic
from p2p.types import PeerId, Reason

TOPIC = Topic("main", "0123456789abcdef")
NOW = 1_700_000_000.0
AUTHORS = 3.0  # that a shard should have
SPEAKS = 30.0  # seconds between two sets of one node


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def member(swarm: MemorySwarm, n: int, clock: Clock) -> Member:
    identity = Identity.from_seed(n.to_bytes(32, "big"))
    return Member(
        identity,
        TOPIC,
        lambda handlers: swarm.join(identity.peer_id, handlers),
        sequence=itertools.count(),
        clock=clock,
        shards=Shards(random.Random(n), clock(), authors=AUTHORS),
    )


def live(members: Sequence[Member], clock: Clock, seconds: float) -> list[int]:
    """How many sets each heard in the last round of everybody."""
    heard = [0] * len(members)
    for step in range(int(seconds / LOOK_EVERY)):
        clock.now += LOOK_EVERY
        for m in members:
            m.sharding.look()
        speaks = step % int(SPEAKS / LOOK_EVERY) == 0
        heard = [0] * len(members) if speaks else heard
        for m in members if speaks else ():
            m.publish("offer", random.randbytes(8))
        for n, m in enumerate(members):
            heard[n] += len(m.received())
    return heard


def test_a_large_swarm_is_cut_until_each_hears_a_few_and_all_agree_on_its_size() -> None:
    swarm, clock = MemorySwarm(), Clock()
    members = [member(swarm, n, clock) for n in range(1, 21)]
    assert min(live(members[:1], clock, 60)) == 0
    heard = live(members, clock, 1500)
    sizes = [m.sharding.size() or 0 for m in members]
    assert 12 <= median(sizes) <= 32
    assert max(heard) < len(members) - 1  # nobody hears everybody any more
    assert 4 * AUTHORS >= sum(heard) / len(heard) >= 2


def test_a_small_swarm_is_one_shard() -> None:
    swarm, clock = MemorySwarm(), Clock()
    members = [member(swarm, n, clock) for n in range(1, 7)]
    assert live(members, clock, 1800) == [5] * 6


def test_it_says_where_it_is_and_when_it_last_heard_a_member() -> None:
    swarm, clock = MemorySwarm(), Clock()
    a, b = member(swarm, 1, clock), member(swarm, 2, clock)
    assert (a.sharding.home, a.sharding.shards, a.sharding.heard_at) == (0, 1, None)
    clock.now += 7
    b.publish("offer", b"body")
    assert a.sharding.heard_at == NOW + 7 and b.sharding.heard_at is None


def test_a_hello_is_for_nobody_but_the_count() -> None:
    swarm, clock = MemorySwarm(), Clock()
    a, b = member(swarm, 1, clock), member(swarm, 2, clock)
    a.engine.publish(a._seal(HELLO, b"nonsense", 0))
    assert not b.received() and not b.rejected
    live([a, b], clock, 100 * HELLO_EVERY)
    assert b.sharding.size() == 2


def test_a_newcomer_to_a_large_swarm_keeps_its_frames_until_it_knows_where_to_go() -> None:
    swarm, clock = MemorySwarm(), Clock()
    members = [member(swarm, n, clock) for n in range(1, 21)]
    live(members, clock, 1500)
    late = member(swarm, 99, clock)
    late.sharding.look()
    late.publish("offer", b"first")
    assert not any(m.received() for m in members)
    before = len(members)
    heard = 0
    for _ in range(40):
        live([*members, late], clock, LOOK_EVERY)
        heard = sum(e.author == late.identity.peer_id for m in members for e in m.received())
        if late.sharding._home:
            break
    assert late.sharding._home not in (None, 0) and heard < before


@pytest.mark.trio
async def test_a_newcomer_asks_who_is_there(autojump_clock: MockClock) -> None:
    swarm, clock = MemorySwarm(), Clock()
    there, late = member(swarm, 1, clock), member(swarm, 99, clock)
    assert there.sharding._shards is not None
    there.sharding._shards.told(PeerId("somebody"), Hello(1000, 333), clock())
    there.sharding.look()
    with trio.fail_after(3 * LOOK_EVERY):
        async with trio.open_nursery() as nursery:
            await nursery.start(late.run)
            while late.sharding.size() != 1000:
                await trio.sleep(LOOK_EVERY)
            nursery.cancel_scope.cancel()


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


def test_a_full_disk_says_nothing_of_the_size_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    swarm, clock = MemorySwarm(), Clock()
    a, b = member(swarm, 1, clock), member(swarm, 2, clock)
    live([a, b], clock, 600)

    a._sequence = Full()
    for _ in range(200):
        clock.now += LOOK_EVERY
        b.publish("offer", random.randbytes(8))
        a.sharding.look()
    assert "the disk is full" in caplog.text


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
