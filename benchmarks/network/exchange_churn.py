"""Measures the rollouts that a swarm loses if a third of its nodes is killed: real processes on loopback.

    python -m benchmarks.network.exchange_churn [--nodes 16] [--times 3]
        [--engine libp2p|hivemind|mixed] [--json]

All nodes share sets of 32 KiB and gather four rollouts a round. Then a third of the nodes is killed with
SIGKILL. Each rollout that at least two nodes held, at least one of which survives, is then fetched by a
survivor that lacks it; this survivor is told only the rollout's author. Then the killed nodes are restarted
under the same identities, while the survivors go on sharing. Prints how long each restarted node takes to
hear its first frame.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.network.exchange import WANTED, told
from testbed.probe_process import ProbeProcess

ROLLOUT = 4 * 1024  # bytes
ASKED = 60  # most rollouts fetched after each kill
SHARE_EVERY = 2.0  # seconds between two sets that one node shares
PATIENCE = 60.0


class Swarm:
    """The nodes, each with a folder; a killed node restarts in the same folder."""

    def __init__(self, stack: ExitStack, folder: Path, count: int, engine: str) -> None:
        self._stack, self._folder, self._engine = stack, folder, engine
        self._rounds = 0
        self.nodes: dict[int, ProbeProcess] = {}
        self.ids: dict[int, str] = {}  # peer ids, also of killed nodes
        for n in range(count):
            self.start(n)
        for node in self.nodes.values():
            node.wait_for_peers(min(count - 1, 4), 180)
        self.ids = {n: node.peer_id for n, node in self.nodes.items()}

    def start(self, n: int) -> ProbeProcess:
        engine = ("libp2p", "hivemind")[n % 2] if self._engine == "mixed" else self._engine
        bootstrap = [node.addresses[0] for node in list(self.nodes.values())[:3]]
        more = ["--wanted", str(WANTED)]
        node = ProbeProcess(
            self._folder / str(n),
            bootstrap=bootstrap,
            engine=engine,
            module="benchmarks.network.exchange_node",
            more=more,
        )
        self.nodes[n] = self._stack.enter_context(node)
        return node

    def kill(self, n: int) -> None:
        self.nodes.pop(n).kill()

    def share(self) -> None:
        """Have the nodes share one set each, one node after the other, over SHARE_EVERY seconds."""
        self._rounds += 1
        for i, node in enumerate(self.nodes.values()):
            at = time.time() + 0.3 + i * SHARE_EVERY / len(self.nodes)
            node.order(round=self._rounds, at=at, rollouts=8, bytes=ROLLOUT)
        time.sleep(SHARE_EVERY)

    def holders(self) -> dict[str, tuple[int, set[int]]]:
        """Return, by the rollout's id, its size and the nodes that hold it."""
        found: dict[str, tuple[int, set[int]]] = {}
        mark = time.monotonic()
        for node in self.nodes.values():
            node.order(list=mark)
        for n, node in self.nodes.items():
            listed = node.wait(partial(told, node, "listed", mark), PATIENCE)
            for name, size in listed["blobs"].items():
                found.setdefault(name, (size, set()))[1].add(n)
        return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network.exchange_churn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--engine", choices=["libp2p", "hivemind", "mixed"], default="libp2p")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        report = measure(Swarm(stack, Path(folder), arguments.nodes, arguments.engine), arguments)
    out = sys.stderr if arguments.json else sys.stdout
    print(
        f"{arguments.nodes} nodes, engine {arguments.engine}, a third killed {arguments.times} times",
        file=out,
    )
    print(
        f"rollouts with a living holder that were not to be had   {report['unobtainable']} of"
        f" {report['asked']}",
        file=out,
    )
    print(
        f"heard something after the start, median / slowest, s    {report['first_p50']:.2f} /"
        f" {report['first_max']:.2f}",
        file=out,
    )
    if arguments.json:
        work = {k: getattr(arguments, k) for k in ("nodes", "times", "engine")}
        print(json.dumps({"schema": 1, "work": work, **report}), flush=True)


def measure(swarm: Swarm, arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(1)
    asked = missing = 0
    first: list[float] = []
    for _ in range(arguments.times):
        for _ in range(4):
            swarm.share()
        time.sleep(SHARE_EVERY)
        before = swarm.holders()
        killed = rng.sample(sorted(swarm.nodes), arguments.nodes // 3)
        for n in killed:
            swarm.kill(n)
        missing_now, asked_now = _ask(swarm, before, killed, rng)
        missing, asked = missing + missing_now, asked + asked_now
        back = [swarm.start(n) for n in killed]
        until = time.monotonic() + PATIENCE
        while not all(node.last("first") for node in back) and time.monotonic() < until:
            swarm.share()
        first += [said["first"] if (said := node.last("first")) else PATIENCE for node in back]
    return {
        "asked": asked,
        "unobtainable": missing,
        "first_p50": statistics.median(first),
        "first_max": max(first),
        "first": first,
    }


def _ask(
    swarm: Swarm, before: dict[str, tuple[int, set[int]]], killed: Sequence[int], rng: random.Random
) -> tuple[int, int]:
    """Fetch the survivors' rollouts; return how many could not be fetched, and how many were tried.

    If a killed node held the rollout, the asking node is told that the killed node is its author: the hardest
    case.
    """
    held = {
        name: (size, holders)
        for name, (size, holders) in before.items()
        if len(holders) >= 2 and holders - set(killed)
    }
    hard = sorted(held, key=lambda name: (not held[name][1] & set(killed), name))[:ASKED]
    orders: dict[int, list[str]] = defaultdict(list)
    for name in hard:
        size, holders = held[name]
        if without := sorted(set(swarm.nodes) - holders):
            asker = rng.choice(without)
            gone = swarm.ids[min(holders & set(killed))] if holders & set(killed) else swarm.ids[min(holders)]
            swarm.nodes[asker].order(fetch=name, size=size, author=gone)
            orders[asker].append(name)
    missing = 0
    for asker, names in orders.items():
        node = swarm.nodes[asker]
        for name in names:
            missing += not node.wait(partial(told, node, "fetched", name), PATIENCE)["found"]
    return missing, sum(map(len, orders.values()))


if __name__ == "__main__":
    main()
