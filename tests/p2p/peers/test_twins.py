"""Two nodes with the same key ("twins") detect each other through a member connected to both."""

import math
import random
from collections.abc import Collection
from itertools import count

import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from p2p.engines.memory import MemoryEngine, MemorySwarm
from p2p.identity import Identity
from p2p.member import AWAY_S, TWINS_EVERY_S
from p2p.peers.twins import (
    FRESH_S,
    KEPT_S,
    MAX_ASKED,
    MAX_PEERS,
    NOTHING,
    RENEW_S,
    TwinCards,
    TwinSession,
    decoded,
)
from p2p.types import Handlers, PeerId, Started
from tests.doubles import NOW, Clock, memory_member

KEY = Identity(b"k" * 32)


def session(n: int, started: float, key: Identity = KEY) -> TwinSession:
    return TwinSession(key, started, random.Random(n).randbytes)


def leave(of: TwinSession, cards: TwinCards, clock: Clock) -> None:
    """Leave a card with a member as a node does; ask once more if the answer is new."""
    for _ in range(2):
        shown = cards(KEY.peer_id, of.question(clock.now))
        if shown == NOTHING:
            of.shown_nothing()
        if not of.answered(shown, clock.now):
            return


def look(clock: Clock, cards: TwinCards, *sessions: TwinSession) -> None:
    clock.now += 10
    for one in sessions:
        leave(one, cards, clock)


def test_twins_are_found_in_two_rounds_and_the_later_one_must_leave() -> None:
    clock = Clock()
    cards, first, second = TwinCards(clock), session(1, NOW), session(2, NOW + 100)
    for _ in range(2):
        look(clock, cards, first, second)
    assert first.earlier_twin(clock.now) is False
    assert second.earlier_twin(clock.now) is True
    clock.now += KEPT_S  # the first node has ended
    leave(second, cards, clock)
    assert second.earlier_twin(clock.now) is None


def test_a_twin_is_known_while_both_nodes_run_and_forgotten_afterwards() -> None:
    clock = Clock()
    # Both started at the same time; one of them is silent.
    cards, first, second = TwinCards(clock), session(1, NOW), session(2, NOW)
    for looks in range(60):
        look(clock, cards, first, second)
        if looks:
            a, b = first.earlier_twin(clock.now), second.earlier_twin(clock.now)
            assert sorted((a, b)) == [False, True]
    clock.now += KEPT_S + FRESH_S
    leave(first, cards, clock)
    assert first.earlier_twin(clock.now) is None


def test_a_restarted_node_and_its_old_cards_are_not_a_twin() -> None:
    clock = Clock()
    cards, before = TwinCards(clock), session(1, NOW - 1000)
    leave(before, cards, clock)
    clock.now += 5
    after = session(2, clock.now)
    for _ in range(5):
        look(clock, cards, after)
        assert after.earlier_twin(clock.now) is None  # the card of the earlier run has no nonce of this run


def test_an_old_proof_is_not_accepted_later() -> None:
    clock = Clock()
    cards, first, second = TwinCards(clock), session(1, NOW), session(2, NOW)
    for _ in range(3):
        look(clock, cards, first, second)
    kept = second.question(clock.now)[1:]
    assert first.earlier_twin(clock.now) is not None
    for _ in range(2):
        clock.now += RENEW_S
        first.question(clock.now)  # creates another card
    first.answered(kept, clock.now)
    assert first.earlier_twin(clock.now) is None


def test_a_peer_without_the_key_cannot_appear_as_a_twin() -> None:
    ours, liar = session(1, NOW), session(2, NOW, Identity(b"l" * 32))
    liar.answered(ours.question(NOW)[1:], NOW)  # the liar does not have the key, but knows the node's nonce
    liar._echo = ours._nonces[0]
    assert not ours.answered(liar.question(NOW)[1:], NOW) and ours.earlier_twin(NOW) is None
    for _ in range(3):  # nor can a peer that returns the node's own cards
        assert not ours.answered(ours.question(NOW)[1:], NOW) and ours.earlier_twin(NOW) is None


def test_two_nodes_with_one_key_leave_their_cards_with_the_same_members() -> None:
    members = [PeerId(f"member {n}") for n in range(3 * MAX_ASKED)]
    chosen = session(1, NOW).whom(members)
    assert chosen == session(2, NOW).whom(members[::-1]) and len(chosen) == MAX_ASKED


@given(st.binary(max_size=300))
def test_any_bytes_parse_as_a_card_or_as_none(message: bytes) -> None:
    assert (card := decoded(message)) is None or card.version == 1
    assert TwinCards(Clock())(KEY.peer_id, b"\x06" + message) == b""


def test_cards_are_kept_for_a_limited_time_and_in_limited_number() -> None:
    clock = Clock()
    cards = TwinCards(clock)
    for n in count():
        cards(PeerId(f"crowd {n}"), session(1, NOW).question(NOW))
        if n > MAX_PEERS:
            break
    assert len(cards._left) == MAX_PEERS
    for n in range(10):
        cards(KEY.peer_id, session(n, NOW).question(NOW))
    assert len(cards._left[KEY.peer_id]) == 2
    clock.now += KEPT_S
    assert cards(KEY.peer_id, session(99, NOW).question(NOW)) == NOTHING


async def test_the_later_twin_leaves_and_returns_soon_after_the_first_has_ended(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    hub_key = Identity(b"h" * 32)

    def clock() -> float:
        return NOW + trio.current_time()

    swarm = MemorySwarm()
    hub, ours = (memory_member(swarm, key, clock) for key in (hub_key, KEY))
    earlier, alive = session(1, NOW - 100), trio.CancelScope()

    async def live() -> None:
        """Act as the other node, as the hub sees it."""
        with alive:
            while True:
                earlier.answered(hub.answer(KEY.peer_id, earlier.question(clock())), clock())
                await trio.sleep(TWINS_EVERY_S)

    nursery.start_soon(live)
    await nursery.start(ours.run)
    await trio.sleep(3 * TWINS_EVERY_S)
    assert ours.peers() and KEY.peer_id not in swarm.members and ours.earlier_twin() is True
    ours.publish("rollouts", b"unheard")
    await trio.sleep(300)  # enough time for several checks
    assert (
        KEY.peer_id not in swarm.members
        and ours.earlier_twin() is not None
        and earlier.earlier_twin(clock()) is not None
    )
    alive.cancel()
    await trio.sleep(60)
    assert KEY.peer_id in swarm.members and ours.earlier_twin() is None
    ours.publish("rollouts", b"heard")
    assert [envelope.body for envelope in hub.received()] == [b"heard"]


class _Slow(MemoryEngine):
    """An engine that is connected 3 s after its start, as over the internet or on a busy machine."""

    starts, connected_at = 0, math.inf

    async def run(self, task_status: Started = trio.TASK_STATUS_IGNORED) -> None:
        self.starts, self.connected_at = self.starts + 1, trio.current_time() + 3
        try:
            await super().run(task_status)
        finally:
            self.connected_at = math.inf

    def connected(self) -> Collection[PeerId]:
        return super().connected() if trio.current_time() >= self.connected_at else ()


async def test_a_returning_twin_has_time_to_ask_before_it_leaves_again(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    def clock() -> float:
        return NOW + trio.current_time()

    swarm, engines = MemorySwarm(), list[_Slow]()

    def slow(handlers: Handlers) -> _Slow:
        engines.append(_Slow(swarm, KEY.peer_id, handlers))
        return engines[0]

    hub = memory_member(swarm, Identity(b"h" * 32), clock)
    ours, earlier = memory_member(swarm, KEY, clock, engine=slow), session(1, NOW - 100)
    await nursery.start(ours.run)
    while not ours.earlier_twin():
        earlier.answered(hub.answer(KEY.peer_id, earlier.question(clock())), clock())
        await trio.sleep(TWINS_EVERY_S)
    await trio.sleep(AWAY_S + 3 + TWINS_EVERY_S)
    assert ours.earlier_twin() is None and KEY.peer_id in swarm.members and engines[0].starts == 2
