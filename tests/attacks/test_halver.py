"""Halver: opens many GossipSub streams and sends on each an RPC without its last byte, so that the receiver
has to keep the unfinished RPC.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.attacks.harness import Attack, show
from tests.attacks.nodes import attacker, cpu, probe_swarm
from tests.attacks.test_flooder import lost
from tests.doubles import TIMEOUT_S

EVERY = 0.5  # seconds between two honest frames


@dataclass
class Result:
    halves: int  # RPCs begun
    cuts: int  # connections that the victim ended
    cut_off: float  # longest time from a connection's last RPC until it ended, in seconds
    mib: float  # largest growth of the victim's memory
    cpu: float  # share of a core that the victim used
    honest: int  # honest frames times their receivers
    honest_lost: int


def attack(
    folder: Path,
    connections: int = 6,
    streams: int = 64,
    size: int = 300_000,
    seconds: float = 60.0,
    cuts: int = 60,
) -> Result:
    with ExitStack() as stack:
        victim, _ = probes = probe_swarm(stack, folder, "libp2p", 2)
        before, used, begun = victim.resident(), cpu(victim), time.monotonic()
        options = {"connections": connections, "streams": streams, "size": size, "seconds": seconds}
        hostile = attacker(stack, folder, "halving", victim.addresses[:1], **options)
        most, sent = before, 0
        while not hostile.said("done") and len(hostile.said("cut")) < cuts:
            most = max(most, victim.resident())
            now = time.monotonic() - begun
            assert now < seconds + TIMEOUT_S, hostile.errors()
            if now > sent * EVERY:
                sent += 1
                for probe in probes:
                    probe.order(publish=600)
            time.sleep(0.1)
        took, spent = time.monotonic() - begun, cpu(victim) - used
        for probe in probes:
            probe.wait_for("sent", sent, TIMEOUT_S)
        due, missing = lost(probes)
        lived = [said["cut"] for said in hostile.said("cut")]
        halves = sum(said["halves"] for said in hostile.said("halves"))
        result = Result(
            halves, len(lived), max(lived, default=seconds), most - before, spent / took, due, missing
        )
    show(
        f"halver, {connections} connections, {streams} streams of {size:,} bytes each, {seconds:g} s", result
    )
    return result


@pytest.mark.net
def test_unfinished_rpcs_use_bounded_memory_and_are_ended(tmp_path: Path) -> None:
    result = attack(tmp_path, connections=3, seconds=TIMEOUT_S, cuts=3)
    assert result.halves >= 192 and result.cuts >= 3  # they announce 58 MB
    assert result.cut_off < 15.0 and result.mib < 16.0 and result.honest_lost == 0


ATTACK = Attack(
    attack, {"cut_off": 15.0, "mib": 16.0, "honest_lost": 0},
    about={"streams": "of each connection", "size": "announced on each, in bytes", "cuts": "that end it"},
)  # fmt: skip
