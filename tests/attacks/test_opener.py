"""Opener: one peer with a valid key opens streams or connections without end.

`pytest -s` prints the figures.

It writes yamux frames as fast as the victim reads them (`tests.attacks.opening`). The replies show the
victim's work: streams that it begins to serve, answers and ends. In some tests the clock of the victim's
engine stands still, so that no limit is refilled.
"""

import itertools
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
from libp2p.stream_muxer.yamux.yamux import FLAG_ACK, TYPE_WINDOW_UPDATE

from p2p.admission import inbound_slots
from p2p.admission.inbound_slots import ARRIVALS_PER_S, GROUP_FACTOR
from p2p.engines.libp2p import network
from p2p.engines.libp2p.metering import (
    COST_AT_ONCE,
    MAX_NEGOTIATION_LINES,
    PING_COST,
    REFUSED_STREAM_COST,
    RELAYED_FACTOR,
    STREAMS_AT_ONCE,
    Meter,
    message_limits,
)
from tests.attacks.harness import ENGINES, REDIALS, Attack, show
from tests.attacks.nodes import attacker, cpu, key_of, probe_swarm
from tests.attacks.opening import (
    CONNECTIONS,
    FRAMES,
    STREAMS,
    Count,
    connect,
    frame,
    open_connections,
    open_streams,
    opening,
    sealed,
)
from tests.doubles import TIMEOUT_S
from tests.p2p.real import heard, real_member

ANSWERS = 3  # answers to a stream that names one protocol: the greeting, the rejection, and the end
AHEAD = 20  # streams that the library already processes when their peer is cut off


@pytest.mark.net
async def test_a_peer_that_opens_streams_without_end_is_cut_off(nursery: trio.Nursery) -> None:
    now = time.time()
    victim, count, hostile = real_member("libp2p", 1, clock=lambda: now), Count(), key_of(1, 0)
    (address,) = await nursery.start(victim.run)
    honest = real_member("libp2p", 2, bootstrap=[address])
    await nursery.start(honest.run)
    async with trio.open_nursery() as flood:
        flood.start_soon(open_streams, address, hostile, "unknown", count, 1000)
        flood.start_soon(heard, honest, victim)
    assert 0 < count.answered <= STREAMS_AT_ONCE
    assert count.ended <= STREAMS_AT_ONCE + COST_AT_ONCE / REFUSED_STREAM_COST + AHEAD
    first = count.answered
    await open_streams(address, hostile, "unknown", count, 10)
    assert count.answered == first  # the hostile peer is banned
    await heard(honest, victim)
    assert [peer.id for peer in victim.peers()] == [honest.identity.peer_id]


@pytest.mark.net
@pytest.mark.parametrize(
    "kind, answers",
    [("names", 5 * (MAX_NEGOTIATION_LINES + 1)), ("pings", COST_AT_ONCE / PING_COST + 5 * ANSWERS)],
)
async def test_the_number_of_answers_on_a_stream_is_bounded(
    kind: str, answers: float, nursery: trio.Nursery
) -> None:
    """Five streams carry 500 requests each. A negotiation has a bounded length; pings are charged for."""
    now = time.time()
    victim, count = real_member("libp2p", 1, clock=lambda: now), Count()
    (address,) = await nursery.start(victim.run)
    await open_streams(address, key_of(1, 0), kind, count, 5)
    assert 0 < count.answers <= answers


@pytest.mark.net
@pytest.mark.parametrize("size, reads", [(1200, 100), (1, 1200)])
async def test_frames_are_read_no_faster_than_a_machines_rate(
    size: int, reads: int, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """Two connections carry useless frames: either 100 frames or a single byte in each Noise message.

    A burst may use the rate of one second at once.
    """
    monkeypatch.setattr(network, "READS_PER_S", rate := 1000)
    victim, begun, times = real_member("libp2p", 1), trio.current_time(), rate // reads + 1
    (address,) = await nursery.start(victim.run)

    async def send(key: int) -> None:
        secured, heard = await connect(address, key_of(1, key)), b""
        for _ in range(times):
            frames = sealed(secured, frame(TYPE_WINDOW_UPDATE, 0, 1) * 100, size)
            await secured.conn.read_writer.read_write_closer.write(frames)
        await secured.write(opening("silent", 1))
        while frame(TYPE_WINDOW_UPDATE, FLAG_ACK, 1) not in heard:
            heard += await secured.read()
        await secured.close()

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as sending:
            sending.start_soon(send, 0)
            sending.start_soon(send, 1)
    # The victim may still have one batch of reads to do for each connection.
    assert trio.current_time() - begun > (2 * times * reads - rate) / rate


def test_new_keys_behind_one_relay_share_a_limit() -> None:
    meter = Meter(message_limits(), lambda: 0.0, lambda peer, why: None)
    admitted = sum(meter.charge_stream(f"peer {n // 100}", "relay") for n in range(10_000))
    assert (
        admitted == RELAYED_FACTOR * STREAMS_AT_ONCE
        and meter.charge_stream("peer", "another relay")
        and meter.charge_stream("direct", "")
    )


@pytest.mark.net
@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")
async def test_a_machine_that_connects_without_end_gets_no_handshakes(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """One machine and many machines of one network group are limited. A greeting would begin a handshake."""
    monkeypatch.setattr(inbound_slots, "ARRIVALS_AT_ONCE", at_once := 20)
    victim, begun, keys = real_member("libp2p", 1), trio.current_time(), itertools.repeat(key_of(1, 0))
    (address,) = await nursery.start(victim.run)
    honest = real_member("libp2p", 2, bootstrap=[address])
    await nursery.start(honest.run)
    counts = [Count() for _ in range(8)]
    for n, count in enumerate(counts):
        await open_connections(address, keys, "hello", count, 2 * at_once, f"127.0.0.{n + 1}")
        assert count.opened or n > GROUP_FACTOR - 2  # the group's first machines are let in
        assert count.opened <= at_once + ARRIVALS_PER_S * (trio.current_time() - begun)
    assert sum(count.opened for count in counts) <= GROUP_FACTOR * (
        at_once + ARRIVALS_PER_S * (trio.current_time() - begun)
    )
    await heard(honest, victim)


@dataclass
class Result:
    opened: int  # opened streams, or accepted connections
    answered: int
    dials: int
    refused: int
    cost: float  # share of a core that the victim used for the attack
    each_us: float  # microseconds of a core for each opened stream and each dial


def attack(
    folder: Path,
    engine: str = "libp2p",
    kind: str = "unknown",
    redial: str = "same",
    calm: float = 10.0,
    seconds: float = 60.0,
) -> Result:
    with ExitStack() as stack:
        victim, _ = probe_swarm(stack, folder, engine, 2)
        before = cpu(victim)
        time.sleep(calm)
        usual = (cpu(victim) - before) / calm
        options = {"kind": kind, "redial": redial, "seconds": seconds}
        hostile = attacker(stack, folder, "opening", victim.addresses[:1], **options)
        hostile.wait_for("ready", 1, TIMEOUT_S)
        before, since = cpu(victim), time.monotonic()
        hostile.wait_for("spent", 1, seconds + TIMEOUT_S)
        took, said = time.monotonic() - since, hostile.said("spent")[0]
        cost = (cpu(victim) - before) / took - usual
        each_us = cost * took * 1e6 / (said["opened"] + said["dials"])
        counts = (said[name] for name in ("opened", "answered", "dials", "refused"))
        result = Result(*counts, round(cost, 4), round(each_us))
    show(f"opener, {engine}, {kind}, redials {redial}", result)
    return result


ATTACK = Attack(
    attack,
    # The cost itself depends on how fast the attacker's machine dials.
    {"each_us": 250},
    choices={"engine": ENGINES, "kind": [*STREAMS, *CONNECTIONS, *FRAMES], "redial": REDIALS},
    about={
        "kind": "the action on each stream; connect, hello: connections with or without a handshake",
        "redial": "whether the attacker dials again, with the same key or new keys",
        "calm": "seconds before the attack",
        "seconds": "seconds of the attack",
    },
)
