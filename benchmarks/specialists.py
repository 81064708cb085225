"""What `sharing.take` is worth to specialists: how often they train on what they do not ask themselves.

Real nodes over loopback.

    python -m benchmarks.specialists [--take need] [--rounds 40] [--json]

Eight nodes of tiny in one swarm. Each asks itself four of six specialties, so two are weak: others alone can
teach it those. Four of the nodes take others' rollouts by the strategy, four uniformly. With 16 answers to
each of eight questions a set is over 2 KiB, so it is offered and each node fetches what it takes. A round
takes three seconds at least, as a real model's does: more is on offer than anybody takes. What comes before
every node has played ten rounds, while the swarm finds itself and learns who is good at what, does not count.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import ge
from pathlib import Path
from statistics import fmean
from typing import Any

from swarmd.lab.demo.processes import LocalNode, local_swarm

PAIRS = (
    ("base_conversion", "bf"),
    ("basic_arithmetic", "binary_matrix"),
    ("calendar_arithmetic", "fraction_simplification"),
)
NODES = 8
SETTLING = 10  # rounds
OPTIONS = ("--model", "tiny", "--device", "cpu", "--local", "8", "--external", "4", "--pace", "3")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.specialists", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--take", default="need", help="the strategy that is compared with uniform")
    parser.add_argument("--rounds", type=int, default=40, help="of the slowest node, that count")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder), NODES, OPTIONS) as swarm:
        for place, node in enumerate(swarm):
            node.variables = variables(place, arguments.take)
            node.start()
        begun = wait_for(swarm, [SETTLING] * NODES)
        wait_for(swarm, [count + arguments.rounds for count in begun])
        rows = [row(place, node, arguments.take, begun[place]) for place, node in enumerate(swarm)]
    shares = show(rows, arguments.take, sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        print(json.dumps({"schema": 1, "work": vars(arguments), **shares, "nodes": rows}))


def wait_for(swarm: Sequence[LocalNode], rounds: Sequence[int]) -> Sequence[int]:
    """Return how many rounds each node has played once all have played so many.

    LabFailed where one ended badly.
    """
    while True:
        played = [len(node.lines()) for node in swarm]
        if all(map(ge, played, rounds)):
            return played
        for node in swarm:
            node.check()
        time.sleep(0.5)


def lacks(place: int) -> Sequence[str]:
    """Return the specialties that a node does not ask itself."""
    return PAIRS[place // 2 % len(PAIRS)]


def take_of(place: int, take: str) -> str:
    return take if place % 2 else "uniform"


def variables(place: int, take: str) -> dict[str, str]:
    asks = [specialty for pair in PAIRS if pair != lacks(place) for specialty in pair]
    taking = {"SWARMD_SHARING_TAKE": take_of(place, take), "SWARMD_ROUND_COMPLETIONS": "16"}
    return taking | {"SWARMD_TASKS_SPECIALTIES": " ".join(asks)}


def row(place: int, node: LocalNode, take: str, begun: int) -> Mapping[str, Any]:
    """Return what a node trained on, a round, after the rounds that do not count."""
    lines = node.lines()[begun:]
    trained: Counter[str] = Counter()
    for line in lines:
        trained.update(line["external_by_specialty"])
    weak = sum(trained[specialty] for specialty in lacks(place))
    external = trained.total()
    return {
        "take": take_of(place, take),
        "rounds": len(lines),
        "external": external / len(lines),
        "weak": weak / len(lines),
    }


def show(rows: Sequence[Mapping[str, Any]], take: str, out: Any) -> Mapping[str, float]:
    """Print the table; return mean weak rollouts a round by kind of node, and how often one kind has more."""
    print(f"{'take':10} {'rounds':>7} {'external':>9} {'of weak specialties':>20}   a round, J = 4", file=out)
    for each in sorted(rows, key=lambda row: str(row["take"])):
        print(f"{each['take']:10} {each['rounds']:7} {each['external']:9.2f} {each['weak']:20.2f}", file=out)
    weak = {name: fmean(row["weak"] for row in rows if row["take"] == name) for name in ("uniform", take)}
    ratio = weak[take] / weak["uniform"]
    print(
        f"weak specialties: {take} {weak[take]:.2f}, uniform {weak['uniform']:.2f} a round: {ratio:.2f} times"
        " as often",
        file=out,
    )
    return {"uniform": weak["uniform"], "taken": weak[take], "ratio": ratio}


if __name__ == "__main__":
    main()
