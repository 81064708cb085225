"""Crowder: many connections send valid frames of fresh keys, within all limits, to the middle node of a line,
so that it no longer forwards frames of the nodes at the ends.

A and C are connected to B alone, so frames of A reach C only if B forwards them, and vice versa. The nodes
are real processes on loopback (`testbed.probe`); the attacker is `tests.attacks.deafening` with correct
clocks. Only libp2p is tested, because p2pd forwards frames before swarmd checks them.
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed.probe_process import ProbeProcess
from tests.attacks.harness import Attack, show
from tests.attacks.nodes import attacker, cpu
from tests.attacks.test_flooder import lost
from tests.doubles import TIMEOUT_S
from tests.processes import wait_until

FOREVER = 3600.0  # seconds


@dataclass
class Crowded:
    honest: int  # frames that A and C sent to each other
    missed: float  # share of these frames that did not arrive
    middle: int  # frames that B sent to A and C
    middle_missed: float
    written: int  # frames that the attacker sent
    passed_on: int  # frames of the attacker that A or C received
    cpu: float  # share of a core that B used


def attack(
    folder: Path,
    connections: int = 5,
    rate: float = 400.0,
    seconds: float = 30.0,
    every: float = 0.5,
    machines: bool = False,
) -> Crowded:
    with ExitStack() as stack:
        b = stack.enter_context(ProbeProcess(folder / "b"))
        a, c = (stack.enter_context(ProbeProcess(folder / name, bootstrap=b.addresses[:1])) for name in "ac")
        for one, other in ((a, c), (c, a)):
            one.order(shut_out=other.peer_id, seconds=FOREVER)
        for end in (a, c):
            end.wait(lambda end=end: end.peers() == [b.peer_id], TIMEOUT_S)
        for one, other in ((a, c), (c, a)):  # first, so that both have a place in B's mesh
            wait_until(lambda one=one, other=other: heard(one, other), TIMEOUT_S, every=0.5)
        options = {"skew": 0, "rate": rate, "connections": connections, "seconds": seconds + 2 * TIMEOUT_S}
        hostile = attacker(stack, folder, "deafening", b.addresses[:1], machines=machines, **options)
        hostile.wait_for("written", 2, TIMEOUT_S)
        before, since = cpu(b), hostile.last("written")
        count = int(seconds / every)
        before_it = {probe: len(probe.said("sent")) for probe in (a, b, c)}
        for probe in (a, b, c):
            probe.order(publish=600, count=count, every=every)
        for probe in (a, b, c):
            probe.wait_for("sent", before_it[probe] + count, seconds + TIMEOUT_S)
        spent, until = cpu(b) - before, hostile.last("written")
        lost([a, b, c], count=count)  # wait for frames on their way
        missing = sum(lost_from(one, [other], count) for one, other in ((a, c), (c, a)))
        middle_missing = lost_from(b, [a, c], count)
        ours = {probe.peer_id for probe in (a, b, c)}
        seen = {
            (said["author"], said["got"])
            for probe in (a, c)
            for said in probe.said("got")
            if said["author"] not in ours
        }
        assert since is not None and until is not None
        result = Crowded(
            2 * count,
            missing / (2 * count),
            2 * count,
            middle_missing / (2 * count),
            until["written"] - since["written"],
            len(seen),
            spent / seconds,
        )
    apart = " on separate machines" if machines else ""
    show(f"crowder, {connections} connections{apart}, {rate:g}/s", result)
    return result


def heard(one: ProbeProcess, other: ProbeProcess) -> bool:
    """Send a frame; return whether the other node has heard any frame of this node."""
    one.order(publish=600)
    return any(said["author"] == one.peer_id for said in other.said("got"))


def lost_from(sender: ProbeProcess, receivers: list[ProbeProcess], count: int) -> int:
    """Count the missing receptions of a node's last frames, over all receivers."""
    sent = [said["sent"] for said in sender.said("sent")][-count:]
    got = [
        {said["got"] for said in probe.said("got") if said["author"] == sender.peer_id} for probe in receivers
    ]
    return sum(number not in heard for number in sent for heard in got)


@pytest.mark.net
@pytest.mark.parametrize(
    "connections, machines",
    [
        (5, False),
        pytest.param(
            8,
            True,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8"),
        ),
    ],
)
def test_honest_frames_are_forwarded_despite_crowded_connections(
    tmp_path: Path, connections: int, machines: bool
) -> None:
    """B's mesh has six places; the attacker's connections are of one network group or of many."""
    result = attack(tmp_path, connections, rate=100.0, seconds=6.0, machines=machines)
    assert result.written > 300 and result.passed_on > 200  # most are the attacker's
    assert result.missed <= 0.05 and result.middle_missed == 0


ATTACK = Attack(
    attack,
    {"missed": 0.05, "middle_missed": 0.0},
    about={
        "rate": "frames a second over all connections together",
        "every": "seconds between two honest frames of a node",
        "machines": "each connection comes from a different address, so a different network group",
    },
)
