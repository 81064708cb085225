"""Flooder: one peer with a valid key sends 10,000 messages a second to each node of a real swarm.

`pytest -s` prints the figures.

Nodes are processes (`testbed.probe`) that publish to one another; the attacker is a separate process
(`tests.attacks.flooding`) that writes prepared bytes into their GossipSub streams, and dials again as soon as
a node hangs up. The cost of the flood is the CPU seconds of a node and its p2pd, minus the CPU seconds in an
equally long time without the flood. A round's time is not used, because it cannot be measured within 5 % on a
busy machine, and because the flood can take from a round at most its share of a core.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from p2p.engines.libp2p.metering import (
    ENTRY_COST,
    MESSAGE_ID_COST,
    MESSAGES,
    READ_COST,
    Meter,
    message_limits,
)
from testbed.probe_process import ProbeProcess
from tests.attacks.flooding import KINDS
from tests.attacks.harness import ENGINES, REDIALS, Attack, show
from tests.attacks.nodes import attacker, cpu, probe_swarm
from tests.doubles import TIMEOUT_S

RATE = 10_000  # messages a second, to each node
HONEST_EVERY = 0.5  # seconds between two frames of a node
HONEST_BYTES = 600
NEVER = -1.0


@dataclass
class Result:
    """Figures of the attack. Costs are measured at the node with the highest cost.

    Messages count if the attacker could write them.
    """

    cut_off: float  # seconds from the first message until the last victim hung up; NEVER if none did
    never: int  # victims that never hung up
    written_first: int  # messages to all victims until they hung up
    dials_again: int
    let_in_again: int  # number of these dials that the victim accepted
    written_again: int
    cost: float  # share of a core, over the seconds of the attack
    cost_of_a_key: float  # CPU seconds of a node for each accepted new key; 0 if there was none
    honest_sent: int
    honest_lost: int
    restarts: int


def lost(probes: Sequence[ProbeProcess], seconds: float = 8.0, count: int = 0) -> tuple[int, int]:
    """Return the frames of honest nodes times their receivers, and how many of these are missing.

    Wait until no more have arrived for `seconds`. count: only the last `count` frames of each node.
    """

    def look() -> tuple[int, int]:
        sent = [(probe.peer_id, said["sent"]) for probe in probes for said in probe.said("sent")[-count:]]
        got = [{(said["author"], said["got"]) for said in probe.said("got")} for probe in probes]
        due = [(frame, n) for frame in sent for n, probe in enumerate(probes) if frame[0] != probe.peer_id]
        return len(due), sum(frame not in got[n] for frame, n in due)

    due, missing = look()
    until = time.monotonic() + seconds
    while missing and time.monotonic() < until:
        time.sleep(0.2)
        before, (due, missing) = missing, look()
        if missing < before:
            until = time.monotonic() + seconds
    return due, missing


def attack(
    folder: Path,
    engine: str = "libp2p",
    kind: str = "frames",
    redial: str = "same",
    nodes: int = 3,
    calm: float = 60.0,
    seconds: float = 60.0,
    rate: float = RATE,
    batch: int = 100,
) -> Result:
    with ExitStack() as stack:
        probes = probe_swarm(stack, folder, engine, nodes)
        honest = int((calm + seconds) / HONEST_EVERY)
        for probe in probes:
            probe.order(publish=HONEST_BYTES, count=honest, every=HONEST_EVERY)
        before = [cpu(probe) for probe in probes]
        time.sleep(calm)
        usual = [
            (cpu(probe) - was) / calm if calm else 0.0 for probe, was in zip(probes, before, strict=True)
        ]
        victims = [probe.addresses[0] for probe in probes]
        how: dict[str, str | float] = {"kind": kind, "redial": redial, "seconds": seconds, "rate": rate}
        hostile = attacker(stack, folder, "flooding", victims, **how, batch=batch)
        hostile.wait_for("ready", 1, TIMEOUT_S)
        before, since = [cpu(probe) for probe in probes], time.monotonic()
        hostile.wait_for("done", 1, seconds + 2 * TIMEOUT_S)
        took = time.monotonic() - since
        costs = [
            cpu(probe) - was - took * share for probe, was, share in zip(probes, before, usual, strict=True)
        ]
        for probe in probes:
            probe.wait_for("sent", honest, TIMEOUT_S)
        due, missing_ones = lost(probes)
        dials = [
            [said for said in hostile.said("dialled") if said["dialled"] == victim] for victim in victims
        ]
        first, again = [of[0] for of in dials], [dial for of in dials for dial in of[1:]]
        came = [dial for dial in again if not dial["refused"]]
        cut = [dial["seconds"] for dial in first]
        keys = sum(not dial["refused"] for of in dials for dial in of) / nodes
        result = Result(
            round(max((second for second in cut if second is not None), default=NEVER), 2),
            cut.count(None),
            sum(dial["messages"] for dial in first),
            len(again),
            len(came),
            sum(dial["messages"] for dial in came),
            round(max(costs) / took, 4),
            round(max(costs) / keys, 4) if redial == "fresh" and keys else 0.0,
            due,
            missing_ones,
            sum((probe.last("restarts") or {"restarts": 0})["restarts"] for probe in probes),
        )
    show(f"flooder, {engine}, {kind}, {rate:,.0f}/s to each of {nodes}, redials {redial}", result)
    return result


@pytest.mark.net
@pytest.mark.parametrize(
    "kind, nodes, seconds, batch",
    [("frames", 3, 5.0, 700), ("elsewhere", 2, 3.0, 100), ("control", 2, 3.0, 100)],
)
def test_a_flooder_is_cut_off_and_honest_frames_still_arrive(
    kind: str, nodes: int, seconds: float, batch: int, tmp_path: Path
) -> None:
    """A large first RPC exceeds the frames that a peer may send at once.

    Otherwise a busy machine could keep the flood's rate below the limit.
    """
    result = attack(tmp_path, kind=kind, nodes=nodes, calm=0.0, seconds=seconds, batch=batch)
    assert result.never == 0  # within 2 s on an idle machine
    assert result.written_first < nodes * RATE * 2 and result.let_in_again == 0
    assert result.honest_lost <= result.honest_sent // 30 and result.restarts == 0


@pytest.mark.parametrize("amount", [READ_COST, ENTRY_COST, 100 * MESSAGE_ID_COST])
def test_reads_entries_and_message_ids_count_toward_a_peers_limit(amount: float) -> None:
    now, cut = [0.0], list[str]()
    meter = Meter(message_limits(), lambda: now[0], lambda peer, why: cut.append(peer))
    for n in range(20_000):  # the attacker sends RATE a second, a busy peer a hundredth of that
        now[0] = n / RATE
        assert n % 100 or meter.charge("busy", amount)
        if not meter.charge("flood", amount):
            break
    assert cut == ["flood"] and now[0] < 2.0
    assert not meter.charge("flood", what=MESSAGES) and meter.charge("busy", what=MESSAGES)


@pytest.mark.net
@pytest.mark.p2pd
@pytest.mark.parametrize("kind", ["frames", "forged"])  # p2pd does not report forged messages
def test_with_p2pd_a_flooder_is_cut_off_each_time_it_returns(kind: str, tmp_path: Path) -> None:
    result = attack(tmp_path, "hivemind", kind, calm=0.0, seconds=5.0)
    assert result.never == 0
    assert result.written_again < RATE * 5  # p2pd accepts the attacker each time it dials again
    assert result.honest_lost <= result.honest_sent // 10 and result.restarts == 0


ATTACK = Attack(
    attack,
    {"never": 0, "cut_off": 2.0, "let_in_again": 0, "cost": 0.05, "honest_lost": 0},
    choices={"engine": ENGINES, "kind": list(KINDS), "redial": REDIALS},
    about={
        "kind": "; ".join(f"{kind}: {what}" for kind, what in KINDS.items()),
        "redial": "whether the attacker dials again, with the same key or new keys",
        "calm": "seconds before the flood",
        "seconds": "seconds of the flood, after the first hang-up",
        "rate": "messages a second to each node",
        "batch": "messages in one RPC",
    },
)
