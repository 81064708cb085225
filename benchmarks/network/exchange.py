"""Measures how long nodes need to gather the rollouts of their next batch, and the bytes received.

The nodes are real processes on loopback.

    python -m benchmarks.network.exchange [--nodes 8] [--kib 32] [--rollout-kib 4]
        [--engine libp2p|hivemind|mixed] [--peer genrl] [--rounds 10] [--json]

In each round all nodes share a set of KIB kilobytes at the same moment, and each node gathers four rollouts
of other nodes. Often all four are from the author whose offer arrives first; if a set is one rollout (--kib
16 --rollout-kib 16), they are from four authors. "node" is the seconds from that moment until one node holds
its four rollouts, "every" the seconds until the last node does. Bytes are all bytes that the nodes' sockets
received (`ss`, duplicates included), per byte of gathered rollout content. The traffic of idle nodes is
printed separately, because a round of a real model takes longer than a round here.

--peer genrl: GenRL 0.3.0's exchange, from its published package in a separate environment (build/peers, or
the folder $BENCHMARK_PEERS): every node gathers the sets of all other nodes through hivemind's DHT. The run
measures first one side, then the other.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from testbed import TIMEOUT_S
from testbed.environments import default_environment, environment_of
from testbed.probe_process import ProbeProcess

WANTED = 4  # J
PAUSE = 1.5  # seconds between rounds
ROUND_LIMIT = 30.0  # seconds
WARM_UP = 2  # rounds


@dataclass(frozen=True)
class Side:
    """The measurements of swarmd's nodes or of the peer's nodes.

    Seconds are by round and node; bytes and CPU seconds are sums over all nodes and rounds.
    """

    rounds: Sequence[Sequence[float]]
    expected: int  # nodes that should have held their rollouts, summed over all rounds
    received: float  # bytes, without upkeep
    content: int
    cpu: float  # without upkeep
    upkeep: float  # CPU seconds a second of one idle node
    chatter: float  # bytes a second that an idle node receives

    @property
    def every(self) -> list[float]:
        return [max(seconds) for seconds in self.rounds if seconds]

    @property
    def node(self) -> list[float]:
        return [s for seconds in self.rounds for s in seconds]

    def figures(self) -> dict[str, Any]:
        return {
            "node_p50": quantile(self.node, 50),
            "node_p95": quantile(self.node, 95),
            "every_p50": quantile(self.every, 50),
            "every_p95": quantile(self.every, 95),
            "held": len(self.node) / self.expected,
            "bytes_per_byte": self.received / self.content if self.content else None,
            "cpu_seconds_per_node_round": self.cpu / self.expected,
            "upkeep": self.upkeep,
            "upkeep_bytes_per_second": self.chatter,
        }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network.exchange",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument(
        "--kib", type=int, default=32, help="KiB of rollouts that each node shares in a round"
    )
    parser.add_argument("--rollout-kib", type=int, default=4, help="KiB of each of these rollouts")
    parser.add_argument("--engine", choices=["libp2p", "hivemind", "mixed"], default="libp2p")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--settle",
        type=float,
        default=20.0,
        help="seconds before the first round, because a new swarm exchanges many messages",
    )
    parser.add_argument("--peer", choices=["genrl"])
    parser.add_argument(
        "--environment", type=Path, help="folder of the peer's virtual environment; created if it is missing"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    if (arguments.nodes - 1) * max(1, arguments.kib // arguments.rollout_kib) < WANTED:
        parser.error(
            f"the other nodes together share fewer than the {WANTED} rollouts that each node gathers"
        )
    python = None
    if arguments.peer:
        python = environment_of(
            "genrl-exchange", arguments.environment or default_environment("genrl-exchange")
        )
    with tempfile.TemporaryDirectory() as folder:
        ours = measure(Path(folder) / "ours", arguments)
        peer = measure(Path(folder) / "peer", arguments, python) if python is not None else None
    show(ours, peer, arguments, sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        names = ("nodes", "kib", "rollout_kib", "engine", "peer", "rounds")
        work = {name: getattr(arguments, name) for name in names}
        mine, theirs = quantile(ours.every, 50), quantile(peer.every, 50) if peer is not None else None
        found = {
            "schema": 1,
            "work": work,
            "ours": mine,
            "peer": theirs,
            "ratio": theirs / mine if theirs else None,
        }
        print(
            json.dumps(
                {**found, **ours.figures(), "peer_figures": peer.figures() if peer is not None else None}
            ),
            flush=True,
        )


def measure(folder: Path, arguments: argparse.Namespace, python: Path | None = None) -> Side:
    """Measure the nodes of one side. python: the peer's interpreter; None for swarmd's nodes."""
    with ExitStack() as stack:
        nodes: list[ProbeProcess] = []
        for n in range(arguments.nodes):
            bootstrap = nodes[0].addresses[:1] if nodes else []
            nodes.append(stack.enter_context(_start(folder / str(n), n, bootstrap, arguments, python)))
        for node in nodes:
            node.wait_for_peers(min(arguments.nodes - 1, 4), TIMEOUT_S)
        for node in nodes:
            node.wait_for("cpu", 1, TIMEOUT_S)
        received_so_far = Traffic(nodes)
        time.sleep(arguments.settle / 2)
        idle, told, since = _cpu(nodes), received_so_far(), time.monotonic()
        time.sleep(arguments.settle / 2)
        seconds = time.monotonic() - since
        upkeep, chatter = (_cpu(nodes) - idle) / seconds, (received_so_far() - told) / seconds
        for n in range(WARM_UP):
            _play(nodes, n, arguments)
        begun, busy, since = received_so_far(), _cpu(nodes), time.monotonic()
        rounds = [_play(nodes, WARM_UP + n, arguments) for n in range(arguments.rounds)]
        time.sleep(PAUSE)  # for late duplicates, and for the nodes' reports of CPU time
        seconds = time.monotonic() - since
        received = received_so_far() - begun - chatter * seconds
        cpu = _cpu(nodes) - busy - upkeep * seconds
        content = sum(
            held["bytes"] for node in nodes for held in node.said("held") if held["held"] >= WARM_UP
        )
    return Side(
        rounds,
        arguments.nodes * arguments.rounds,
        received,
        content,
        cpu,
        upkeep / arguments.nodes,
        chatter / arguments.nodes,
    )


def _start(
    folder: Path, number: int, bootstrap: Sequence[str], arguments: argparse.Namespace, python: Path | None
) -> ProbeProcess:
    if python is not None:
        return ProbeProcess(
            folder,
            bootstrap=bootstrap,
            engine="hivemind",
            python=python,
            module="benchmarks.peers.genrl_exchange",
            more=["--nodes", str(arguments.nodes)],
        )
    engine = ("libp2p", "hivemind")[number % 2] if arguments.engine == "mixed" else arguments.engine
    return ProbeProcess(
        folder,
        bootstrap=bootstrap,
        engine=engine,
        module="benchmarks.network.exchange_node",
        more=["--wanted", str(WANTED)],
    )


def _play(nodes: Sequence[ProbeProcess], number: int, arguments: argparse.Namespace) -> list[float]:
    """Play one round; return the seconds of each node that gathered its rollouts in time."""
    at = time.time() + 0.5
    kib, each = arguments.kib, arguments.rollout_kib
    for node in nodes:
        node.order(round=number, at=at, rollouts=max(1, kib // each), bytes=min(each, kib) * 1024)
    until = time.monotonic() + ROUND_LIMIT
    found = []
    for node in nodes:
        try:
            held = node.wait(partial(told, node, "held", number), max(0.1, until - time.monotonic()))
        except TimeoutError:
            sys.stderr.write(
                f"round {number}: a node did not get its chosen rollouts in {ROUND_LIMIT:.0f} s\n"
            )
            continue
        found.append(float(held["after"]))
    time.sleep(PAUSE)
    return found


def told(node: ProbeProcess, key: str, value: object) -> dict[str, Any] | None:
    """Return the node's output line in which `key` has this value."""
    return next((said for said in node.said(key) if said[key] == value), None)


def _cpu(nodes: Sequence[ProbeProcess]) -> float:
    return sum(float(said["cpu"]) for node in nodes if (said := node.last("cpu")))


class Traffic:
    """Counts the bytes that the TCP sockets of all nodes have received so far.

    A closed socket counts with the bytes of its last reading. Each byte sent over loopback counts once, at
    its receiver.
    """

    def __init__(self, nodes: Sequence[ProbeProcess]) -> None:
        self._nodes = nodes
        self._sockets: dict[tuple[str, str], int] = {}  # bytes received, by local and remote address

    def __call__(self) -> int:
        pids = {pid for node in self._nodes if (said := node.last("cpu")) for pid in said["pids"]}
        lines = subprocess.run(
            ["ss", "-tinpHO"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for line in lines:
            owners = {int(pid) for pid in re.findall(r"pid=(\d+)", line)}
            if owners & pids and (found := re.search(r"bytes_received:(\d+)", line)):
                local, remote = line.split()[3:5]
                self._sockets[local, remote] = int(found[1])
        return sum(self._sockets.values())


def quantile(seconds: Sequence[float], percent: int) -> float:
    if len(seconds) < 2:
        return seconds[0] if seconds else float("nan")
    return statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def show(ours: Side, peer: Side | None, arguments: argparse.Namespace, out: Any) -> None:
    print(
        f"{arguments.nodes} nodes, {arguments.kib} KiB each a round, {arguments.rounds} rounds, engine"
        f" {arguments.engine}",
        file=out,
    )
    print(f"{'':34} {'swarmd':>10}" + (f" {'genrl':>10} {'ratio':>7}" if peer else ""), file=out)
    rows = {
        "a node holds its choice, p50, ms": ("node_p50", 1000),
        "a node holds its choice, p95, ms": ("node_p95", 1000),
        "every node does, p50, ms": ("every_p50", 1000),
        "every node does, p95, ms": ("every_p95", 1000),
        "of them got it, %": ("held", 100),
        "bytes received per byte gathered": ("bytes_per_byte", 1),
        "CPU ms a node and round": ("cpu_seconds_per_node_round", 1000),
        "CPU of upkeep, % of a core": ("upkeep", 100),
        "bytes a second of upkeep": ("upkeep_bytes_per_second", 1),
    }
    mine, theirs = ours.figures(), peer.figures() if peer is not None else {}
    for text, (name, scale) in rows.items():
        line = f"{text:34} {scale * (mine[name] or 0):10.1f}"
        if theirs:
            other = theirs[name] or 0
            line += f" {scale * other:10.1f} {other / mine[name] if mine[name] else 0:7.2f}"
        print(line, file=out)


if __name__ == "__main__":
    main()
