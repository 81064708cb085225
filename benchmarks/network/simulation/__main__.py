"""Plays fixed scenarios of 8 to 10,000 nodes in virtual time; each node runs swarmd's `Exchange`.

    python -m benchmarks.network.simulation [--scenario "100 nodes"] [--seeds 3]
    python -m benchmarks.network.simulation --compare main

--compare plays the scenarios on this tree and on another commit, and prints the differences as markdown.
docs/p2p.md has the figures. The scenario of 10,000 nodes is played only if it is named, because it takes over
ten CPU minutes and 5 GB of memory.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import swarmd
from benchmarks.network.simulation.comparison import NotComparable, compare, number
from benchmarks.network.simulation.play import means, play
from benchmarks.network.simulation.scenarios import SCENARIOS


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:14} {scenario.about}" for name, scenario in SCENARIOS.items()),
    )
    parser.add_argument(
        "--scenario",
        action="append",
        choices=SCENARIOS,
        metavar="NAME",
        help="a scenario to play; may be repeated",
    )
    parser.add_argument(
        "--seeds", type=int, help="number of seeds for all scenarios, instead of each scenario's number"
    )
    parser.add_argument("--compare", metavar="BASE", help="the commit to compare with")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the figures as a JSON object on the last line, and the table on stderr",
    )
    arguments = parser.parse_args(argv)
    names = arguments.scenario or [name for name in SCENARIOS if name != "10,000 nodes"]
    if arguments.compare:
        options = [part for name in names for part in ("--scenario", name)]
        if arguments.seeds:
            options += ["--seeds", str(arguments.seeds)]
        try:
            print(compare(arguments.compare, options))
        except NotComparable as error:
            parser.error(str(error))
        return
    runs: list[dict[str, object]] = []
    out = sys.stderr if arguments.json else sys.stdout
    for name in names:
        figures = [play(SCENARIOS[name], seed) for seed in range(arguments.seeds or SCENARIOS[name].seeds)]
        if not runs:
            print("| scenario | " + " | ".join(figures[0]) + " |", file=out)
            print("|---|" + "---|" * len(figures[0]), file=out)
        print(f"| {name} | " + " | ".join(map(number, means(figures).values())) + " |", file=out, flush=True)
        runs.append({"scenario": name, "figures": figures})
    if arguments.json:
        print(json.dumps({"schema": 2, "tree": str(Path(swarmd.__file__).parents[1]), "runs": runs}))


if __name__ == "__main__":
    main()
