"""Measures the time from `swarmd join` to the end of round 1, without peers, with a warm file cache.

    python -m benchmarks.node.start [--runs 5] [--model tiny] [--set WORDS] [--json]
    # From `swarmd join swarm:…` to the first rollout that one node received from the other
    python -m benchmarks.node.start --invited

Each run has a new state folder. Wall seconds are meaningful on a quiet machine only, so the load is printed
with them. CPU seconds (user and system) are of the daemon and all its child processes, to the end of the
node; with them two versions can be compared even under load. The time of round 1 alone is from its line of
metrics. The first run warms the file cache, and is left out of the median. --set passes more arguments to
`swarmd join`.

With --invited one node runs and prints its invitation, and each run is a new node that has only this
invitation. A run's time ends with the round in which the new node first trained on a rollout of the inviting
node; CPU seconds are to the new node's end.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

PROGRAM = (sys.executable, "-m", "swarmd", "join", "--rounds", "1", "--device", "cpu", "--json")


@dataclass(frozen=True)
class Start:
    first_round: float  # wall seconds from the command to the line of round 1
    all: float  # wall seconds to the end of the node
    cpu: float  # CPU seconds of all its processes
    round: float  # wall seconds of the round alone
    load: float  # one-minute load average at the start


def start(words: list[str]) -> Start:
    """Run one node, from an empty state folder to its end after one round."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "said").open("w+") as said:
        load, before, begun = os.getloadavg()[0], _children(), time.monotonic()
        command = [
            *PROGRAM,
            "--state-dir",
            str(Path(folder) / "state"),
            "--listen",
            "/ip4/127.0.0.1/tcp/0",
            *words,
        ]
        node = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said)
        assert node.stdout is not None
        line = node.stdout.readline()
        first = time.monotonic() - begun
        node.communicate()
        ended = time.monotonic() - begun
        if node.returncode or not line:
            said.seek(0)
            sys.exit(f"the node ended with {node.returncode} and without a round:\n{said.read()}")
        return Start(first, ended, _children() - before, sum(json.loads(line)["seconds"].values()), load)


def meet(words: list[str], runs: int) -> None:
    """Print a line for each node that joins by an invitation, and the median."""
    swarmd = [sys.executable, "-m", "swarmd"]
    endless = [word for word in PROGRAM if word not in ("--rounds", "1")]
    with tempfile.TemporaryDirectory() as folder:
        state = str(Path(folder) / "inviting")
        here = ["--listen", "/ip4/127.0.0.1/tcp/0"]
        inviting = subprocess.Popen(
            [*endless, *words, *here, "--state-dir", state],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert inviting.stdout is not None
            inviting.stdout.readline()  # the line of a round, so the node is up
            asked = subprocess.run(
                [*swarmd, "invite", "--state-dir", state], capture_output=True, text=True, check=True
            )
            print(f"{'run':>8} {'round 1':>8} {'shared':>8} {'CPU':>8} {'load':>8}")
            found = []
            for number in range(1 + runs):
                load, begun = os.getloadavg()[0], time.monotonic()
                command = [
                    *endless,
                    asked.stdout.strip(),
                    *here,
                    "--state-dir",
                    str(Path(folder) / str(number)),
                ]
                before = _children()
                with subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                ) as node:
                    assert node.stdout is not None
                    try:
                        seconds = [time.monotonic() - begun for _ in _until_shared(node.stdout)]
                    finally:
                        node.terminate()
                found.append(seconds[-1])
                name = "warming" if number == 0 else str(number)
                print(
                    f"{name:>8} {seconds[0]:8.2f} {seconds[-1]:8.2f} {_children() - before:8.2f} {load:8.1f}",
                    flush=True,
                )
            print(f"{'median':>8} {'':8} {statistics.median(found[1:]):8.2f}")
        finally:
            inviting.terminate()
            inviting.communicate()


def _until_shared(lines: Iterable[str]) -> Iterator[None]:
    """Yield once a round, up to the first round that trained on another node's rollout."""
    for line in lines:
        yield
        if json.loads(line)["external"]:
            return


def _children() -> float:
    """Return the CPU seconds of all ended descendants of this process."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.node.start", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--set", default="", metavar="WORDS", help="more arguments for `swarmd join`")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--invited", action="store_true", help="measure a second node, which joins by an invitation"
    )
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.invited:
        meet(["--model", arguments.model, *shlex.split(arguments.set)], arguments.runs)
        return
    out = sys.stderr if arguments.json else sys.stdout
    print(f"{'seconds':>8} {'round 1':>8} {'the end':>8} {'CPU':>8} {'in round':>8} {'load':>8}", file=out)
    runs = []
    for number in range(1 + arguments.runs):
        runs.append(start(["--model", arguments.model, "--seed", str(number), *shlex.split(arguments.set)]))
        _row("warming" if number == 0 else str(number), runs[-1], out)
    found = {name: statistics.median(asdict(run)[name] for run in runs[1:]) for name in asdict(runs[0])}
    _row("median", Start(**found), out)
    if arguments.json:
        print(json.dumps({"schema": 1, "median": found, "runs": [asdict(run) for run in runs[1:]]}))


def _row(name: str, run: Start, out: object) -> None:
    print(
        f"{name:>8} {run.first_round:8.2f} {run.all:8.2f} {run.cpu:8.2f} {run.round:8.2f} {run.load:8.1f}",
        file=out,
    )  # type: ignore[call-overload]


if __name__ == "__main__":
    main()
