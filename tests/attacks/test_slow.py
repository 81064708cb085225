"""Slow peer: it never answers questions, or answers one byte a second, and asks questions that never end.
`pytest -s` prints the figures.

Two honest nodes and the attacker are separate processes, all connected to each other. The attacker is the
first holder of each wanted blob, and the honest node is the second.
"""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testbed.probe_process import ProbeProcess
from tests.attacks.harness import ENGINES, Attack, show
from tests.attacks.nodes import cpu, probe_swarm

STREAMS = {"libp2p": 190, "hivemind": 1000}  # libp2p disconnects a peer with many more (`test_opener`)
BLOB = 4096  # bytes
PATIENCE = 60.0  # most seconds for a fetch


class World:
    def __init__(self, stack: ExitStack, folder: Path, engine: str) -> None:
        self.victim, self.honest = probe_swarm(stack, folder, engine, 2)
        where = [probe.addresses[0] for probe in (self.victim, self.honest)]
        self.hostile = stack.enter_context(
            ProbeProcess(folder / "hostile", module="tests.attacks.stalling", bootstrap=where)
        )
        self.him = self.hostile.peer_id
        for probe in (self.victim, self.honest):
            probe.wait(lambda probe=probe: self.him in probe.peers(), 2 * PATIENCE)  # type: ignore[misc]

    def fetch(self, by: ProbeProcess, of: ProbeProcess, *, first: Sequence[str] = ()) -> float:
        """Return the seconds until `by` has fetched a blob that `of` holds; PATIENCE if it failed."""
        held, fetched = len(of.said("held")), len(by.said("fetched"))
        of.order(hold=BLOB)
        of.wait_for("held", held + 1, 2 * PATIENCE)
        blob = of.said("held")[held]
        by.order(fetch=blob["held"], size=blob["size"], holders=[*first, of.peer_id], seconds=PATIENCE)
        by.wait_for("fetched", fetched + 1, PATIENCE + 60)
        found = by.said("fetched")[fetched]
        return float(found["seconds"]) if found["bytes"] else PATIENCE

    def fetches(self, count: int, *, first: Sequence[str] = ()) -> float:
        """Return the median seconds of `count` fetches."""
        return statistics.median(self.fetch(self.victim, self.honest, first=first) for _ in range(count))


def streams(world: World, count: int, how: str, seconds: float, fetches: int) -> dict[str, Any]:
    """Let the attacker open `count` streams to each node, while the nodes fetch from each other."""
    memory, used = world.victim.resident(), cpu(world.victim)
    done = len(world.hostile.said("opened"))
    world.hostile.order(open=count, how=how, seconds=seconds)
    asking = [world.fetch(world.victim, world.honest) for _ in range(fetches)]
    answering = [world.fetch(world.honest, world.victim) for _ in range(fetches)]
    more = world.victim.resident() - memory
    world.hostile.wait_for("opened", done + 1, seconds + 120)
    more = max(more, world.victim.resident() - memory)
    said = world.hostile.said("opened")[done]
    return {
        "asking": statistics.median(asking),
        "answering": statistics.median(answering),
        "longest": max(*asking, *answering),
        "mib": more,
        "cpu": cpu(world.victim) - used,
        "left_open": (said["opened"] - said["ended"]) / 2,
        "hung_up_on": said["lost"],
    }


def attack(folder: Path, engine: str = "libp2p", fetches: int = 9, seconds: float = 30.0) -> dict[str, Any]:
    with ExitStack() as stack:
        world = World(stack, folder, engine)
        found: dict[str, Any] = {"clean": world.fetches(fetches)}
        for manner in ("never", "dribble"):
            world.hostile.order(answer=manner)
            found[manner] = world.fetches(fetches if manner == "never" else 3, first=[world.him])
        for how in ("half", "question"):
            found |= {
                f"{how}_{what}": figure
                for what, figure in streams(world, STREAMS[engine], how, seconds, fetches).items()
            }
        found["restarts"] = sum(
            probe.said("restarts")[-1]["restarts"] for probe in (world.victim, world.honest)
        )
    show(f"slow, {engine}, {STREAMS[engine]} streams, seconds", found)
    return found


@pytest.mark.net
def test_a_slow_peer_delays_a_fetch_by_no_more_than_its_timeout(tmp_path: Path) -> None:
    found = attack(tmp_path, fetches=2, seconds=3.0)
    # A second on an idle machine.
    assert found["never"] < PATIENCE / 4 and found["dribble"] < PATIENCE / 4
    assert found["half_longest"] < PATIENCE and found["question_longest"] < PATIENCE  # no fetch failed
    assert found["half_mib"] < 32 and found["question_mib"] < 32 and found["restarts"] == 0


ATTACK = Attack(
    attack,
    {"never": 1.0, "dribble": 1.0, "half_longest": 1.0, "question_longest": 1.0},
    choices={"engine": ENGINES},
    about={
        "fetches": "number of fetches, of which the median counts",
        "seconds": "seconds that the attacker's streams stay open",
    },
)
