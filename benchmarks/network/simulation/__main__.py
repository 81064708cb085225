"""Offers, rollouts and bytes of a node in swarms of 2 to 30,000 nodes, in virtual time, with real pacing.

    python -m benchmarks.network.simulation [--nodes 2,8,100,…] [--seconds 60] [--max-age 2] [--seed 0]
        [--known 1]

All nodes start within a minute. Rounds last --seconds: one number for all nodes, or a range such as 5,120
(log-uniform). Figures cover ten minutes, after ten minutes of settling, or twenty in swarms over 1,000 nodes.
docs/p2p.md has the model.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.network.simulation.swarm import ADDRESS, MAX_AGE, Swarm
from swarmd.exchange.pacing import TARGET_PER_S

SETTLING, LATER = 600.0, 1200.0  # seconds, up to MANY nodes and beyond
MANY = 1000
MEASURED = 600.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=_numbers(int), default=[2, 8, 100, 500, 1000, 10_000, 30_000])
    parser.add_argument("--seconds", type=_numbers(float), default=[60.0], help="of a round")
    parser.add_argument("--max-age", type=int, default=MAX_AGE, help="round.max_age of all nodes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--known", type=float, default=1.0, help="share of authors whose address a node has")
    parser.add_argument("--address", type=int, default=ADDRESS, help="bytes of the address in an offer")
    parser.add_argument(
        "--json",
        action="store_true",
        help="the figures as one object on the last line; the table goes to stderr",
    )
    arguments = parser.parse_args(argv)
    out = sys.stderr if arguments.json else sys.stdout
    print(
        "| nodes | offers heard a second, of the target | rounds with all J | Jain | kB a node and round: "
        "offers / control / fetches / connections "
        "| fetches that found no place | first offer after, s | took, s |\n|---|---|---|---|---|---|---|---|",
        file=out,
    )
    found = []
    for nodes in arguments.nodes:
        begun = time.monotonic()
        seconds = (arguments.seconds[0], arguments.seconds[-1])
        one = measure(nodes, seconds, arguments.seed, arguments.max_age, arguments.known, arguments.address)
        found.append(one)
        parts = " / ".join(
            f"{one['kb'][kind]:.0f}" for kind in ("offers", "control", "fetches", "connections")
        )
        print(
            f"| {nodes:,} | {one['offers']:.2f} ({one['offers'] / TARGET_PER_S:.2f}) | {one['full']:.2%} |"
            f" {one['jain']:.2f} | {sum(one['kb'].values()):.0f}: {parts} | {one['refused']:.1%} |"
            f" {one['first']:.0f} | {time.monotonic() - begun:.0f} |",
            file=out,
            flush=True,
        )
    if arguments.json:
        print(
            json.dumps(
                {
                    "schema": 1,
                    "work": {
                        "seconds": arguments.seconds,
                        "seed": arguments.seed,
                        "max_age": arguments.max_age,
                        "known": arguments.known,
                    },
                    "runs": found,
                }
            ),
            flush=True,
        )


def measure(
    nodes: int,
    seconds: tuple[float, float],
    seed: int,
    max_age: int = MAX_AGE,
    known: float = 1.0,
    address: int = ADDRESS,
) -> dict[str, Any]:
    """Return the figures of one swarm."""
    swarm = Swarm(nodes, seconds, seed, max_age, known=known, address=address)
    swarm.play((SETTLING if nodes <= MANY else LATER) - 120.0, fetch=nodes <= MANY)
    swarm.play(120.0, fetch=True)  # boards and connections as they are in a swarm that runs
    tally = swarm.play(MEASURED, fetch=True)
    paces = [min(node.pacing.pace, 1 / node.seconds) for node in swarm.nodes]
    return {
        "nodes": nodes,
        "offers": tally.offers / MEASURED,
        "full": tally.full / max(1, tally.rounds),
        "jain": sum(paces) ** 2 / (len(paces) * sum(pace**2 for pace in paces)),
        "kb": {
            kind: tally.bytes[kind] / max(1, tally.rounds) / 1000
            for kind in ("offers", "control", "fetches", "connections")
        },
        "refused": tally.refused / max(1, tally.refused + tally.served.total()),
        "first": swarm.sent[0] if swarm.sent else float("nan"),
    }


def _numbers(kind: type) -> Any:
    def numbers(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    return numbers


if __name__ == "__main__":
    main()
