"""Kills random processes of a running swarm with SIGKILL, and measures the recovery.

    python -m benchmarks.node.churn [--kills 20] [--nodes 3] [--seed 0] [--json]

The nodes save every 5 s here instead of every minute, so that kills come soon and long after a checkpoint.
rounds_lost counts the finished rounds that a kill lost (each takes at least half a second); they are run
again. A kill may lose only the rounds since the last complete checkpoint.

Prints a line for each kill and a table; with --json the last line is one JSON object.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import astuple

from swarmd.daemon.local_api import control
from swarmd.errors import SwarmdError
from swarmd.lab.parent_watch import LabFailed
from swarmd.state.status import PeerList, Status
from swarmd.trainer.checkpoint import saved_in
from testbed.local_swarm import LocalNode, checkpoints, local_swarm

# Seconds, instead of the default minute: kills, a few seconds apart, have to come soon and long after a save.
CHECKPOINT = 5.0
LOOK = 0.1  # seconds between two checks
PATIENCE = 240.0  # longest wait for a condition, in seconds


@dataclass(frozen=True)
class Kill:
    """One killed process, and the swarm's recovery. Both `seconds` are None if the daemon was not killed."""

    node: str
    process: str  # "daemon", "trainer" or "verifier"
    round_before: int  # last round in metrics.jsonl before the kill
    round_saved: int  # round of the newest checkpoint at the kill
    round_resumed: int | None  # None for a verifier, whose loss costs no round
    up_seconds: float | None  # from the restart until the node answers
    receiving_seconds: float | None  # from then until it admits another node's frame
    same_peer: bool
    damaged: int  # checkpoints that could not be read
    others_advanced: bool  # every other node finished a round between the kill and the recovery

    @property
    def rounds_lost(self) -> int:
        return 0 if self.round_resumed is None else self.round_before - self.round_resumed


def churn(
    folder: Path,
    kills: int,
    seed: int = 0,
    nodes: int = 3,
    pace: float = 0.5,
    save: float = CHECKPOINT,
    talk: Callable[[str], None] = print,
) -> list[Kill]:
    """Start a swarm on the tiny model; kill a process `kills` times, and wait for each recovery."""
    rng = random.Random(seed)
    done = []
    with local_swarm(folder, nodes, ["--model", "tiny", "--pace", str(pace)], checkpoints(save)) as swarm:
        for node in swarm:
            node.start()
        for node in swarm:
            _until(lambda node=node: _saved(node) > 0, f"{node.name} to make a checkpoint", swarm)  # type: ignore[misc]
        for number in range(kills):
            kill = _kill_one(swarm, rng)
            done.append(kill)
            talk(f"{number + 1}/{kills} {kill}")
    return done


def _kill_one(swarm: Sequence[LocalNode], rng: random.Random) -> Kill:
    node = rng.choice(list(swarm))
    process = rng.choice(["daemon", "trainer", "verifier"])
    status = _known(node, swarm)
    pid = {
        "daemon": status.pid,
        "trainer": status.trainer.pid,
        "verifier": status.trainer.verifier_pid,
    }[process]
    time.sleep(rng.random())  # any moment of a round: generating, scoring, training, saving
    others = {other.name: _round(other) for other in swarm if other is not node}
    log_before = node.log.stat().st_size
    before = _round(node)
    with contextlib.suppress(ProcessLookupError):
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    saved = _saved(node)
    up = receiving = None
    if process == "daemon":
        up, receiving = _rejoin(node, swarm)
    # Until the trainer resumes, metrics.jsonl may hold a round that ended after `before` was read.
    if process != "verifier":
        _until(
            lambda: _resumed(node, log_before) is not None, f"{node.name} to go on from a checkpoint", swarm
        )
    _until(
        lambda: _round(node) > before, f"{node.name} to finish a round after the loss of its {process}", swarm
    )
    for other in swarm:
        if other is not node:
            _until(lambda other=other: _round(other) > others[other.name], f"{other.name} to go on", swarm)  # type: ignore[misc]
    after = _known(node, swarm)
    return Kill(
        node=node.name,
        process=process,
        round_before=before,
        round_saved=saved,
        round_resumed=_resumed(node, log_before),
        up_seconds=up,
        receiving_seconds=receiving,
        same_peer=after.peer_id == node.peer_id,
        damaged=_log_since(node, log_before).count(" is damaged"),
        others_advanced=all(_round(other) > others[other.name] for other in swarm if other is not node),
    )


def _known(node: LocalNode, swarm: Sequence[LocalNode]) -> Status:
    """Return the node's status once it has all pids. The verifier's pid is reported with a round."""
    found: Status | None = None

    def known() -> bool:
        nonlocal found
        found = node.status()
        return found is not None and None not in astuple(found.trainer) and found.round >= _round(node)

    _until(known, f"{node.name} to tell its processes", swarm)
    assert found is not None
    return found


def _rejoin(node: LocalNode, swarm: Sequence[LocalNode]) -> tuple[float, float]:
    assert node.process is not None
    node.process.wait()
    begun = time.monotonic()
    node.start()
    _until(lambda: node.status() is not None, f"{node.name} to be up again", swarm)
    up = time.monotonic()
    _until(lambda: _frames(node) > 0, f"{node.name} to receive again", swarm)
    return up - begun, time.monotonic() - up


def _round(node: LocalNode) -> int:
    lines = node.lines()
    return int(lines[-1].round) if lines else 0


def _log_since(node: LocalNode, start: int) -> str:
    """Return the node's log from byte `start` on."""
    return node.log.read_bytes()[start:].decode(errors="replace")


def _resumed(node: LocalNode, start: int) -> int | None:
    """Return the round from which the node resumed, by its log; None if it has not resumed yet."""
    found = re.findall(r"resumed after round (\d+)", _log_since(node, start))
    return int(found[-1]) if found else None


def _saved(node: LocalNode) -> int:
    """Return the round of the node's newest checkpoint; 0 if there is none."""
    saved = saved_in(node.folder / "checkpoints")
    return int(saved[-1].name.removeprefix("round-")) if saved else 0


def _frames(node: LocalNode) -> int:
    try:
        return sum(peer.frames for peer in control.call(node.folder, "peers", PeerList).peers)
    except SwarmdError:
        return 0


def _until(condition: Callable[[], bool], what: str, swarm: Sequence[LocalNode]) -> None:
    for _ in _looks():
        for node in swarm:
            node.check()
        if condition():
            return
    raise LabFailed(f"waited {PATIENCE:.0f} s for {what}; see {swarm[0].folder.parent}")


def _looks() -> Iterator[None]:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        yield
        time.sleep(LOOK)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kills = churn(
            Path(folder),
            arguments.kills,
            arguments.seed,
            arguments.nodes,
            talk=lambda text: print(text, file=sys.stderr, flush=True),
        )
    ups = [k.up_seconds for k in kills if k.up_seconds is not None]
    receiving = [k.receiving_seconds for k in kills if k.receiving_seconds is not None]
    figures = {
        "kills": len(kills),
        "of": {name: sum(k.process == name for k in kills) for name in ("daemon", "trainer", "verifier")},
        "unreadable_checkpoints": sum(k.damaged for k in kills),
        "rounds_lost_max": max(k.rounds_lost for k in kills),
        "same_peer": sum(k.same_peer for k in kills),
        "others_advanced": sum(k.others_advanced for k in kills),
        "up_seconds_median": statistics.median(ups) if ups else None,
        "receiving_seconds_median": statistics.median(receiving) if receiving else None,
        "receiving_seconds_max": max(receiving, default=None),
    }
    for name, value in figures.items():
        print(f"{name:28} {value}")
    if arguments.json:
        print(json.dumps({"schema": 1, "work": vars(arguments) | {"json": True}, **figures}))


if __name__ == "__main__":
    main()
