"""The bytes of real connections are counted, limited in rate, and stop at the monthly budget."""

import os
from typing import Any

import pytest
import trio
import trio.testing

from p2p.engines.memory import MemorySwarm
from p2p.engines.traffic import RateGate, Traffic
from p2p.types import Handlers, Started, Verdict
from tests.doubles import Clock, memory_member, until
from tests.p2p.real import SECONDS, heard, real_engine, real_member

ANSWER = os.urandom(50_000)
GIVES = Handlers(lambda frame, via: Verdict.ACCEPT, lambda peer, question: ANSWER)
REAL = [
    pytest.param("libp2p", marks=pytest.mark.net),
    pytest.param("hivemind", marks=[pytest.mark.net, pytest.mark.p2pd]),
]


async def test_a_rate_limit_holds_for_all_connections_together(autojump_clock: Any) -> None:
    traffic = Traffic(up=1000.0, down=None)
    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        for size in (10, 5000, 1, 989, 4000):
            nursery.start_soon(traffic.sending.wait, size)
            nursery.start_soon(traffic.reading.wait, 10**9)
    # The bytes of one second pass at once; the last piece, half as large, goes into debt.
    assert 8.5 <= trio.current_time() - begun <= 9.1


async def test_a_cancelled_waiter_does_not_block_other_waiters(autojump_clock: Any) -> None:
    traffic = Traffic(up=1000.0)
    with trio.move_on_after(5):
        await traffic.sending.wait(10**6)
    begun = trio.current_time()
    await traffic.sending.wait(100)
    assert trio.current_time() - begun < 1.5


async def test_a_rate_gate_is_shared_in_turn_despite_cancelled_claims(autojump_clock: Any) -> None:
    """Claims of one machine are added and cancelled, also the claim that is being served."""
    gate = RateGate(1000.0)

    async def come_and_go(n: int) -> None:
        while True:
            with trio.move_on_after(0.3 + n / 10):
                await gate.wait(10**6, ("1.1", "1.1.1.1", n))

    async with trio.open_nursery() as nursery:
        for n in range(8):
            nursery.start_soon(come_and_go, n)
        await trio.sleep(20)
        begun = trio.current_time()
        await gate.wait(10_000, ("8.8", "8.8.8.8", 1))
        assert trio.current_time() - begun <= 20 + 1
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("name", REAL)
async def test_the_bytes_between_two_nodes_are_counted(name: str, nursery: trio.Nursery) -> None:
    giving, taking = Traffic(), Traffic()
    giver = real_engine(name, 1, GIVES, traffic=giving)
    [address, *_] = await nursery.start(giver.run)
    taker = real_engine(name, 2, traffic=taking, bootstrap=[address])
    await nursery.start(taker.run)
    await until(lambda: giver.me in taker.connected(), SECONDS)
    with trio.fail_after(SECONDS):
        before = taking.down, giving.up
        for _ in range(20):
            assert await taker.request(giver.me, b"more", len(ANSWER)) == ANSWER
    payload = 20 * len(ANSWER)
    await until(lambda: taking.down - before[0] >= payload and giving.up - before[1] >= payload, SECONDS)
    for moved in (taking.down - before[0], giving.up - before[1]):
        assert payload <= moved <= 1.1 * payload
    assert taking.up < 0.1 * payload and giving.down < 0.1 * payload


@pytest.mark.net
@pytest.mark.parametrize("limits", [{"up": 200_000.0}, {"down": 200_000.0}])
async def test_libp2p_keeps_to_its_rate_limit_and_keeps_its_connection(
    limits: dict[str, float], nursery: trio.Nursery
) -> None:
    limited, free = Traffic(**limits), Traffic()
    giver = real_engine("libp2p", 1, GIVES, traffic=limited if "up" in limits else free)
    [address, *_] = await nursery.start(giver.run)
    taker = real_engine("libp2p", 2, traffic=limited if "down" in limits else free, bootstrap=[address])
    await nursery.start(taker.run)

    def connections() -> list[float]:
        """Return the start times of the connections, as both ends see them."""
        return [peer.connected_at for engine in (giver, taker) for peer in engine.peers()]

    first = await until(lambda: found if len(found := connections()) == 2 else None, SECONDS, every=0.001)
    begun = trio.current_time()
    with trio.fail_after(SECONDS):
        for _ in range(10):
            assert await taker.request(giver.me, b"more", len(ANSWER)) == ANSWER
    assert trio.current_time() - begun >= (10 * len(ANSWER) - 200_000) / 200_000
    assert connections() == first


@pytest.mark.parametrize("name", REAL)
async def test_a_member_leaves_when_its_bytes_are_used_up_and_returns_later(
    name: str, nursery: trio.Nursery
) -> None:
    traffic = Traffic()
    other = real_member(name, 1)
    [address, *_] = await nursery.start(other.run)
    member = real_member(name, 2, bootstrap=[address], traffic=traffic)
    await nursery.start(member.run)
    await heard(other, member)
    at = traffic.up + traffic.down
    traffic.stop_after(500_000, member.leave)

    def gone() -> bool:
        other.publish("rollouts", os.urandom(5000))
        return member.away and not member.peers()

    await until(gone, SECONDS, every=0.02)
    # p2pd's bytes are counted twice a second; other engines count each read.
    more = 2_000_000 if name == "hivemind" else 2**16
    assert 500_000 <= traffic.up + traffic.down - at <= 500_000 + more
    member.publish("rollouts", b"nobody hears it")
    await until(lambda: not other.peers(), SECONDS)
    left = traffic.up + traffic.down
    await trio.sleep(0.5)
    assert traffic.up + traffic.down == left
    member.come_back()
    await heard(other, member)


async def test_a_member_that_left_before_its_start_opens_no_connection(nursery: trio.Nursery) -> None:
    swarm, runs, listens = MemorySwarm(), list[str](), list[Any]()
    member = memory_member(swarm, 1, Clock())
    run = member.engine.run

    async def counted(task_status: Started) -> None:
        runs.append("run")
        await run(task_status)

    member.engine.run = counted  # type: ignore[method-assign]

    async def start() -> None:
        listens.append(await nursery.start(member.run))

    member.leave()
    nursery.start_soon(start)
    await trio.testing.wait_all_tasks_blocked()
    assert not runs and not listens and member.away
    member.come_back()
    await until(lambda: listens == [member.addresses()], SECONDS)
    assert len(runs) == 1 and not member.away
    member.leave()
    await trio.testing.wait_all_tasks_blocked()
    member.come_back()
    await until(lambda: len(runs) == 2, SECONDS)
