"""Measures a node's costs besides training: time, CPU and disk writes.

The node is one `swarmd join` with its daemon, verifier and libp2p engine on loopback, without peers, at full
speed.

    python -m benchmarks.node.overhead [--model tiny] [--local 8] [--external 0] [--rounds 60]
        [--seconds 0] [--set WORDS] [--json]

A round's wall time runs from one line of metrics.jsonl to the next. Overhead is the round's wall time without
generate, score and train: share, collect, checkpoint (the time that a save blocks the round) and the gap
outside all stages. A save in the background may also slow the stages; the round's wall time includes that.
CPU seconds per round are measured for each whole process (Linux only). "MB/s written" counts the MB (10^6
bytes) that each process wrote to disk, with checkpoints, metrics and logs (Linux only). A node saves a
checkpoint each minute: to include some, measure for at least --seconds 120. --set passes more arguments to
`swarmd join`. The first rounds do not count.
"""

import argparse
import itertools
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmd.lab.parent_watch import LabFailed
from swarmd.types import RoundLine
from testbed.local_swarm import LocalNode, local_swarm

SETTLING = 5  # rounds
LOOK = 0.5  # seconds between two looks at metrics.jsonl
WORK = ("generate", "score", "train")
REST = ("share", "collect", "checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.node.overhead", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--local", type=int, default=8)
    parser.add_argument("--external", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.0, help="shortest time to measure, in seconds")
    parser.add_argument("--set", default="", metavar="WORDS", help="more arguments for `swarmd join`")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    words = [
        "--model",
        arguments.model,
        "--device",
        "cpu",
        "--local",
        str(arguments.local),
        "--external",
        str(arguments.external),
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        local_swarm(Path(folder), 1, [*words, *shlex.split(arguments.set)]) as (node,),
    ):
        node.start()
        begun = _after(node, SETTLING)
        done = _after(node, SETTLING + arguments.rounds, begun.at + arguments.seconds)
        lines = node.lines()[SETTLING - 1 :][: done.round - SETTLING + 2]
    seconds = split(lines)
    rounds, took = done.round - begun.round, done.at - begun.at
    cpu = {name: (done.cpu[name] - begun.cpu[name]) / rounds for name in done.cpu.keys() & begun.cpu.keys()}
    written = {
        name: (done.written[name] - begun.written[name]) / took / 1e6
        for name in done.written.keys() & begun.written.keys()
    }
    out = sys.stderr if arguments.json else sys.stdout
    wall = statistics.median(seconds["round"])
    print(f"{'median of ' + str(len(lines) - 1) + ' rounds':20} {'seconds':>8} {'share':>7}", file=out)
    for name, values in seconds.items():
        share = statistics.median(shares(values, seconds["round"]))
        print(f"{name:20} {statistics.median(values):8.4f} {share:7.1%}", file=out)
    for name, value in sorted(cpu.items()):
        print(f"{'CPU, ' + name:20} {value:8.4f}", file=out)
    for name, value in sorted(written.items()):
        print(f"{'MB/s written, ' + name:22} {value:6.4f}", file=out)
    if written:
        print(f"{'MB/s written, all':22} {sum(written.values()):6.4f}   over {took:.0f} s", file=out)
    if arguments.json:
        share = statistics.median(shares(seconds["overhead"], seconds["round"]))
        figures = {
            "ours": share,
            "round_seconds": wall,
            "seconds": {name: statistics.median(v) for name, v in seconds.items()},
            "cpu": cpu,
        }
        figures |= {"written_mb_s": written, "measured_seconds": took}
        print(json.dumps({"schema": 1, "work": vars(arguments), **figures}))


def split(lines: Sequence[RoundLine]) -> dict[str, list[float]]:
    """Return the seconds of each part of every round except the first; "overhead" excludes WORK."""
    found: dict[str, list[float]] = {name: [] for name in ("round", *WORK, *REST, "gap", "overhead")}
    for before, line in itertools.pairwise(lines):
        wall, stages = line.time - before.time, line.seconds
        for name in (*WORK, *REST):
            found[name].append(stages[name])
        work = sum(stages[name] for name in WORK)
        found["round"].append(wall)
        found["gap"].append(wall - work - sum(stages[name] for name in REST))
        found["overhead"].append(wall - work)
    return found


def shares(values: Sequence[float], of: Sequence[float]) -> list[float]:
    return [value / whole for value, whole in zip(values, of, strict=True)]


@dataclass(frozen=True)
class _Reading:
    """Resources that the processes have used so far."""

    round: int
    at: float  # seconds
    cpu: Mapping[str, float]  # seconds
    written: Mapping[str, int]  # bytes


def _after(node: LocalNode, rounds: int, until: float = 0.0) -> _Reading:
    """Wait for this many rounds and for the time `until`; then read the resources used."""
    while len(node.lines()) < rounds or time.monotonic() < until:
        node.check()
        time.sleep(LOOK)
    status = node.status()
    if status is None:
        raise LabFailed(f"{node.name} does not answer; see {node.log}")
    pids = {
        "daemon": status.pid,
        "trainer": status.trainer.pid,
        "verifier": status.trainer.verifier_pid,
    }
    return _Reading(
        status.round,
        time.monotonic(),
        {name: cpu for name, pid in pids.items() if pid and (cpu := _cpu_seconds(pid)) is not None},
        {name: written for name, pid in pids.items() if pid and (written := _written(pid)) is not None},
    )


def _cpu_seconds(pid: int) -> float | None:
    """Return user and system time of a process and of the children it has waited for.

    None if the system does not report these times (proc(5)).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _written(pid: int) -> int | None:
    """Return the bytes that a process has written to disk; None if the system does not report that."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.partition(":")[2]) for line in lines if line.startswith("write_bytes:")), None)


if __name__ == "__main__":
    main()
