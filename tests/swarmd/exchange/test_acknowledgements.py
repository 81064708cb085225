"""Authors are told how many of their rollouts other nodes trained on.

The figures are only shown to people: they are capped and bounded, and no decision uses them.
"""

from hypothesis import given
from hypothesis import strategies as st

from p2p.engines.memory import MemorySwarm
from p2p.member import Member
from p2p.types import PeerId, PeerRequest
from swarmd.exchange.acknowledgements import (
    AT_ONCE,
    HEARD,
    MAX_PEERS,
    AcknowledgementCounter,
    Acknowledger,
    encode,
)
from swarmd.state.status import SharedRollouts
from tests.doubles import Clock, identity, memory_member

ANNE, BEN = identity(1).peer_id, identity(2).peer_id


def author(swarm: MemorySwarm, number: int, shared: int) -> tuple[Member, AcknowledgementCounter]:
    member, gave = memory_member(swarm, number, Clock()), AcknowledgementCounter(lambda: shared)
    member.answers[PeerRequest.USED] = gave
    return member, gave


async def test_an_author_is_told_how_many_rollouts_were_used_and_by_how_many_nodes() -> None:
    swarm = MemorySwarm()
    anne, gave = author(swarm, 1, shared=10)
    users = [memory_member(swarm, number, Clock()) for number in (2, 3, 4)]
    told = [Acknowledger(user.engine.request, user.engine.connected, Clock()) for user in users]
    for acknowledger, uses in zip(told, (3, 1, 0), strict=True):
        acknowledger.used([anne.identity.peer_id] * uses)
        await acknowledger.tell()
        await acknowledger.tell()  # there is nothing new to tell
    assert gave.figures() == SharedRollouts(10, 4, 2)
    told[2].used([anne.identity.peer_id])
    await told[2].tell()
    assert gave.figures() == SharedRollouts(10, 5, 3)


async def test_counts_wait_until_the_author_is_connected_and_no_author_is_dialled() -> None:
    asked: list[PeerId] = []
    connected: list[PeerId] = []

    async def ask(peer: PeerId, _question: bytes, _limit: int) -> bytes:
        asked.append(peer)
        return HEARD

    acknowledger = Acknowledger(ask, lambda: connected, Clock())
    many = [identity(number).peer_id for number in range(MAX_PEERS + 10)]
    acknowledger.used([*many, *many[-3:]])
    await acknowledger.tell()
    assert not asked
    connected += many
    await acknowledger.tell()
    assert len(asked) == AT_ONCE and set(asked) >= set(many[-3:])  # authors with the most used rollouts first
    for _ in range(MAX_PEERS):
        await acknowledger.tell()
    assert sorted(asked) == sorted(many[10:])  # the authors used first were forgotten


async def test_each_use_is_reported_once_even_during_a_report_or_after_a_restart() -> None:
    clock, gave = Clock(), AcknowledgementCounter(lambda: 10)

    async def ask(peer: PeerId, question: bytes, _limit: int) -> bytes:
        if not gave.figures().used:
            acknowledger.used([ANNE])
        return gave(peer, question)

    acknowledger = Acknowledger(ask, lambda: [ANNE], clock)
    acknowledger.used([ANNE, ANNE])
    for used in (2, 3, 3):
        await acknowledger.tell()
        assert gave.figures().used == used
    clock.now += 1
    again = Acknowledger(ask, lambda: [ANNE], clock)
    again.used([ANNE])
    await again.tell()
    assert gave.figures().used == 4


async def test_an_author_may_be_forgotten_during_its_report() -> None:
    few, many = [
        [identity(number).peer_id for number in numbers] for numbers in (range(2), range(2, MAX_PEERS + 2))
    ]
    asked: list[PeerId] = []

    async def ask(peer: PeerId, question: bytes, limit: int) -> bytes:
        asked.append(peer)
        acknowledger.used(many)
        return HEARD

    acknowledger = Acknowledger(ask, lambda: few, Clock())
    acknowledger.used(few)
    await acknowledger.tell()
    assert sorted(asked) == sorted(few)


async def test_a_peer_of_an_older_version_is_not_asked_again_or_blamed() -> None:
    swarm, clock = MemorySwarm(), Clock()
    old, us = memory_member(swarm, 1, clock), memory_member(swarm, 2, clock)
    acknowledger = Acknowledger(us.engine.request, us.engine.connected, clock)
    acknowledger.used([old.identity.peer_id])
    await acknowledger.tell()
    assert old.score(us.identity.peer_id) == 0.0 and not old.rejected


def test_a_peers_count_is_limited_by_the_shared_number_and_counts_messages_once() -> None:
    shared = [0]
    gave = AcknowledgementCounter(lambda: shared[0])
    assert gave(ANNE, encode(1, 5)) == HEARD and gave.figures().by == 0  # nothing was shared yet
    shared[0] = 7
    for _ in range(2):
        gave(ANNE, encode(2, 5))
    assert gave.figures().used == 5
    gave(ANNE, encode(3, 10**15))
    assert gave(BEN, encode(3, 0)) == HEARD
    assert gave.figures() == SharedRollouts(7, 7, 1)
    for number in range(MAX_PEERS + 50):  # a crowd of invented peers
        gave(PeerId(str(number)), encode(1, 1))
    assert gave.figures() == SharedRollouts(7, MAX_PEERS, MAX_PEERS)


@given(
    st.binary(max_size=64)
    | st.sampled_from([encode(1, 2), encode(2**53 - 1, 0)]).flatmap(lambda m: st.just(m + b"\0"))
)
def test_an_invalid_message_gets_an_empty_answer(message: bytes) -> None:
    gave = AcknowledgementCounter(lambda: 5)
    assert gave(ANNE, PeerRequest.USED.message(message)) in (b"", HEARD)
    assert gave.figures().used <= 5


def test_a_later_version_gets_an_empty_answer() -> None:
    gave = AcknowledgementCounter(lambda: 5)
    assert gave(ANNE, bytes([7, 0x93, 1, 4, 2])) == HEARD and gave.figures().used == 2
    for other in (bytes([7, 0x93, 2, 5, 2]), bytes([7, 0x93, 1, 5, 0xFF])):  # or a negative count
        assert gave(ANNE, other) == b"" and gave.figures().used == 2
