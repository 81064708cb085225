"""Two nodes with one key detect each other through a member that both are connected to."""

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
    """Leave a card as a member does: ask once more if the answer is new."""
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
    clock.now += KEPT_S  # the first has ended
    leave(second, cards, clock)
    assert second.earlier_twin(clock.now) is None


def test_a_twin_is_known_while_both_run_and_forgotten_after() -> None:
    clock = Clock()
    # Started at once: one of them is silent
    cards, first, second = TwinCards(clock), session(1, NOW), session(2, NOW)
    for looks in range(60):
        look(clock, cards, first, second)
        if looks:
            a, b = first.earlier_twin(clock.now), second.earlier_twin(clock.now)
            assert sorted((a, b)) == [False, True]
    clock.now += KEPT_S + FRESH_S
    leave(first, cards, clock)
    assert first.earlier_twin(clock.now) is None


def test_a_restart_is_no_twin_and_no_kept_card_makes_one() -> None:
    clock = Clock()
    cards, before = TwinCards(clock), session(1, NOW - 1000)
    leave(before, cards, clock)
    clock.now += 5
    after = session(2, clock.now)
    for _ in range(5):
        look(clock, cards, after)
        assert after.earlier_twin(clock.now) is None  # the earlier life's card echoes nothing of this one


def test_an_old_proof_proves_nothing_later() -> None:
    clock = Clock()
    cards, first, second = TwinCards(clock), session(1, NOW), session(2, NOW)
    for _ in range(3):
        look(clock, cards, first, second)
    kept = second.question(clock.now)[1:]
    assert first.earlier_twin(clock.now) is not None
    for _ in range(2):
        clock.now += RENEW_S
        first.question(clock.now)  # makes a further card
    first.answered(kept, clock.now)
    assert first.earlier_twin(clock.now) is None


def test_nobody_without_the_key_makes_a_twin() -> None:
    ours, liar = session(1, NOW), session(2, NOW, Identity(b"l" * 32))
    liar.answered(ours.question(NOW)[1:], NOW)  # not even signed by his key, but he knows our nonce
    liar._echo = ours._nonces[0]
    assert not ours.answered(liar.question(NOW)[1:], NOW) and ours.earlier_twin(NOW) is None
    for _ in range(3):  # nor does a peer that shows us our own cards
        assert not ours.answered(ours.question(NOW)[1:], NOW) and ours.earlier_twin(NOW) is None


def test_two_nodes_with_one_key_leave_their_cards_with_the_same_members() -> None:
    members = [PeerId(f"member {n}") for n in range(3 * MAX_ASKED)]
    chosen = session(1, NOW).whom(members)
    assert chosen == session(2, NOW).whom(members[::-1]) and len(chosen) == MAX_ASKED


@given(st.binary(max_size=300))
def test_any_bytes_parse_as_a_card_or_none(message: bytes) -> None:
    assert (card := decoded(message)) is None or card.version == 1
    assert TwinCards(Clock())(KEY.peer_id, b"\x06" + message) == b""


def test_cards_are_kept_for_a_while_and_bounded() -> None:
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


async def test_the_later_twin_leaves_the_swarm_and_returns_within_a_minute_of_the_first_ones_end(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    hub_key = Identity(b"h" * 32)

    def clock() -> float:
        return NOW + trio.current_time()

    swarm = MemorySwarm()
    hub, ours = (memory_member(swarm, key, clock) for key in (hub_key, KEY))
    earlier, alive = session(1, NOW - 100), trio.CancelScope()

    async def live() -> None:
        """The other node, as far as the hub can see."""
        with alive:
            while True:
                earlier.answered(hub.answer(KEY.peer_id, earlier.question(clock())), clock())
                await trio.sleep(TWINS_EVERY_S)

    nursery.start_soon(live)
    await nursery.start(ours.run)
    await trio.sleep(3 * TWINS_EVERY_S)
    assert ours.peers() and KEY.peer_id not in swarm.members() and ours.earlier_twin() is True
    ours.publish("rollouts", b"unheard")
    await trio.sleep(300)  # it looked some times
    assert (
        KEY.peer_id not in swarm.members()
        and ours.earlier_twin() is not None
        and earlier.earlier_twin(clock()) is not None
    )
    alive.cancel()
    await trio.sleep(60)
    assert KEY.peer_id in swarm.members() and ours.earlier_twin() is None
    ours.publish("rollouts", b"heard")
    assert [envelope.body for envelope in hub.received()] == [b"heard"]


class _Slow(MemoryEngine):
    """Is connected 3 s after it began, as over the internet or on a busy machine."""

    starts, connected_at = 0, math.inf

    async def run(self, task_status: Started = trio.TASK_STATUS_IGNORED) -> None:
        self.starts, self.connected_at = self.starts + 1, trio.current_time() + 3
        try:
            await super().run(task_status)
        finally:
            self.connected_at = math.inf

    def connected(self) -> Collection[PeerId]:
        return super().connected() if trio.current_time() >= self.connected_at else ()


async def test_a_return_is_not_cut_off_before_anybody_could_be_asked(
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
    assert ours.earlier_twin() is None and KEY.peer_id in swarm.members() and engines[0].starts == 2
