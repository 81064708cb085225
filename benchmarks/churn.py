"""kill -9 of random processes of a running swarm.

    python -m benchmarks.churn [--kills 20] [--nodes 3] [--seed 0] [--json]

The nodes save every 5 s here, in place of every minute, so that kills meet young and old checkpoints. rounds_lost counts the finished
rounds that a kill lost (each takes half a second at least); they are run again.

Prints a line a kill and a table; with --json the last line is one object.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from swarmd.lab.churn import churn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kills = churn(
            Path(folder), arguments.kills, arguments.seed, arguments.nodes, talk=lambda text: print(text, file=sys.stderr, flush=True)
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
