"""Fair shares of a line between a crowd and other nodes: uploads, both rates, the strangers' monthly part."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from p2p.admission.inbound_slots import GROUP_FACTOR
from p2p.engines.traffic import STRANGERS, UPLOAD_BURST_S, UPLOAD_PER_S, Line, Traffic, line_of_host
from p2p.rate_limit import MAX_PIECE

MIB = 1024 * 1024
UP = 200_000.0
BLOB = 256 * 1024
NODE = line_of_host("8.8.8.8", "node")
CROWDS = {
    "one machine": [line_of_host("1.1.1.1", n) for n in range(20)],
    "one /64": [line_of_host(f"2001:db8:1:1::{n + 1:x}", n) for n in range(20)],
    "one /16": [line_of_host(f"1.1.1.{n + 1}", n) for n in range(80)],
    "one /32 of IPv6": [line_of_host(f"2001:db8:{n:x}::1", n) for n in range(80)],
    "one relay": [Line("1.1", "/p2p/relay/p2p-circuit", n) for n in range(80)],
}
ONE_MACHINE = ("one machine", "one /64", "one relay")


@asynccontextmanager
async def crowd(traffic: Traffic, lines: Iterable[Line], how: str, size: int) -> Any:
    """Let each line transfer `size` bytes again and again; yield the bytes so far."""
    moved = [0]

    async def move(line: Line) -> None:
        while True:
            if how == "upload":
                await traffic.upload(size, line)
            await (traffic.read(size, line) if how == "read" else traffic.send(size, line))
            moved[0] += size

    async with trio.open_nursery() as nursery:
        for line in lines:
            for _ in range(2):
                nursery.start_soon(move, line)
        yield moved
        nursery.cancel_scope.cancel()


async def seconds(waiting: Any) -> float:
    begun = trio.current_time()
    await waiting
    return trio.current_time() - begun


@pytest.mark.parametrize("name", CROWDS)
async def test_each_machine_gets_its_upload_share_despite_a_crowd(name: str, autojump_clock: Any) -> None:
    traffic, lines = Traffic(), CROWDS[name]
    # Without the limit `up` a transfer takes no time, so let each key ask once a millisecond.
    traffic.sending.wait = lambda size, by=(): trio.sleep(0.001)  # type: ignore[method-assign]
    most = UPLOAD_PER_S * (1 if name in ONE_MACHINE else GROUP_FACTOR) * (UPLOAD_BURST_S + 20)
    async with crowd(traffic, lines, "upload", 16_384) as moved:
        await trio.sleep(20)
        assert 0.8 * most <= moved[0] <= most + MAX_PIECE
        # A node of another group does not wait, and a node at the crowd's address gets its turn.
        assert await seconds(traffic.upload(BLOB, NODE)) == 0
        neighbour = lines[0]._replace(connection="another")
        turn = MAX_PIECE / UPLOAD_PER_S * (len(lines) + 2)
        assert await seconds(traffic.upload(4096, neighbour)) <= turn


async def test_uploads_leave_half_of_a_limited_line(autojump_clock: Any) -> None:
    traffic = Traffic(up=UP)
    async with crowd(traffic, CROWDS["one machine"], "upload", BLOB):
        await trio.sleep(UPLOAD_BURST_S + 5)
        waits = []
        for _ in range(5):
            await traffic.upload(16_384, NODE)
            waits.append(await seconds(traffic.send(16_384, NODE)))
            await trio.sleep(1)
        assert max(waits) == 0


@pytest.mark.parametrize("name", CROWDS)
@pytest.mark.parametrize("how", ["send", "read"])
async def test_a_crowd_on_a_limited_line_delays_another_node_by_a_piece(
    how: str, name: str, autojump_clock: Any
) -> None:
    traffic = Traffic(up=UP, down=UP)
    async with crowd(traffic, CROWDS[name], how, 65_536) as moved:
        await trio.sleep(20)
        assert moved[0] + 65_536 * 2 * len(CROWDS[name]) >= 20 * UP and moved[0] <= 22 * UP
        node = traffic.read(4096, NODE) if how == "read" else traffic.send(4096, NODE)
        assert await seconds(node) <= 2 * MAX_PIECE / UP
        if how == "send":
            assert await seconds(traffic.send(4096, CROWDS[name][0], own=True)) <= 2 * MAX_PIECE / UP


async def test_own_frames_reach_other_nodes_despite_a_crowd_of_listeners(autojump_clock: Any) -> None:
    """The crowd's copies of the last frame still wait when the next frame is sent."""
    traffic, delays = Traffic(up=UP), list[float]()

    async def copy(line: Line) -> None:
        waited = await seconds(traffic.send(4096, line, own=True))
        if line is NODE:
            delays.append(waited)

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            for line in (*CROWDS["one /16"], NODE):
                nursery.start_soon(copy, line)
            await trio.sleep(0.5)
        assert max(delays) <= 2 * MAX_PIECE / UP and len(delays) == 20
        nursery.cancel_scope.cancel()


async def test_strangers_use_at_most_their_part_of_the_monthly_limit(autojump_clock: Any) -> None:
    month, traffic = 20e9, Traffic()
    traffic.limit(None, None, month)
    strangers = [line._replace(stranger=True) for line in CROWDS["one /16"]]
    day = month * STRANGERS / 31
    ways: Iterator[str] = itertools.cycle(["send", "read"])
    async with trio.open_nursery() as nursery:

        async def move(line: Line, how: str) -> None:
            nonlocal moved
            while True:
                await getattr(traffic, how)(MIB, line)
                moved += MIB

        moved = 0
        for line in strangers:
            nursery.start_soon(move, line, next(ways))
        await trio.sleep(3600)
        assert day <= moved + len(strangers) * MIB and moved <= day * (1 + 1 / 24) + MIB
        # A peer that was dialled does not wait for strangers; a stranger of another group waits for its turn.
        assert await seconds(traffic.send(MIB, NODE)) == 0
        newcomer = NODE._replace(stranger=True)
        assert await seconds(traffic.read(2048, newcomer)) <= 3 * MAX_PIECE / (day / 86_400)
        nursery.cancel_scope.cancel()
