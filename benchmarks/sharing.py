"""How much of the others' experience reaches each node's batches. Real nodes over loopback, at full speed.

    python -m benchmarks.sharing [--nodes 3] [--rounds 60] [--local 4] [--external 4] [--json]

Runs until the slowest node has played its rounds. The first five rounds of each node, while the swarm finds
itself, do not count.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from swarmd.lab.demo.processes import local_swarm

SETTLING = 5  # rounds


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharing", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60, help=f"more than {SETTLING}, which do not count")
    parser.add_argument("--local", type=int, default=4)
    parser.add_argument("--external", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.rounds <= SETTLING:
        parser.error(f"--rounds has to be more than {SETTLING}: the first {SETTLING} do not count")
    options = [
        "--model",
        "tiny",
        "--device",
        "cpu",
        "--local",
        str(arguments.local),
        "--external",
        str(arguments.external),
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        local_swarm(Path(folder), arguments.nodes, options) as swarm,
    ):
        for node in swarm:
            node.start()
        while min(len(node.lines()) for node in swarm) < arguments.rounds:
            for node in swarm:
                node.check()
            time.sleep(0.5)
        runs = {node.name: node.lines()[SETTLING:] for node in swarm}
    out = sys.stderr if arguments.json else sys.stdout
    print(
        f"{'node':20} {'rounds':>7} {'with J':>7} {'mean J':>7} {'stale':>6} {'s/round':>8}   J ="
        f" {arguments.external}",
        file=out,
    )
    shares = []
    for name, lines in runs.items():
        external = [line["external"] for line in lines]
        shares.append(sum(j == arguments.external for j in external) / len(external))
        seconds = statistics.median(sum(line["seconds"].values()) for line in lines)
        stale = statistics.mean(line["staleness"]["mean"] for line in lines)
        print(
            f"{name:20} {len(lines):7} {shares[-1]:7.1%} {statistics.mean(external):7.2f} {stale:6.2f}"
            f" {seconds:8.3f}",
            file=out,
        )
    if arguments.json:
        print(json.dumps({"schema": 1, "work": vars(arguments), "rounds_with_all_external": min(shares)}))


if __name__ == "__main__":
    main()
