"""How long a frame takes from one node to all others: real processes, real libp2p, over loopback.

    python -m benchmarks.rollout_delay [--nodes N] [--kib K] [--messages M] [--every S] [--json]

Every node publishes M frames of K KiB, S seconds apart, while all listen. The delay of a frame is from its
sealing to its admission, at each receiver ("one") and at the last of them ("all"). CPU is that of all nodes
while they publish, per frame and receiver, upkeep included; what upkeep alone takes is measured afterwards.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.probes import ProbeProcess

IDLE = 10.0  # seconds over which the idle cost is measured


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout_delay")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--kib", type=int, default=32)
    parser.add_argument("--messages", type=int, default=20, help="per node")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between one node's frames")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), arguments.nodes, arguments.kib, arguments.messages, arguments.every)
    out = sys.stderr if arguments.json else sys.stdout
    out.write(table(report))
    if arguments.json:
        sys.stdout.write(json.dumps(report) + "\n")


def measure(folder: Path, nodes: int, kib: int, messages: int, every: float) -> dict[str, Any]:
    with ExitStack() as stack:
        probes = [stack.enter_context(ProbeProcess(folder / "0"))]
        probes += [
            stack.enter_context(ProbeProcess(folder / str(n), bootstrap=probes[0].addresses))
            for n in range(1, nodes)
        ]
        ids = {probe.peer_id for probe in probes}
        for probe in probes:
            probe.wait_for_peers(min(len(ids) - 1, 4), 60)
        before = _cpu(probes)
        for probe in probes:
            probe.order(publish=kib * 1024, count=messages, every=every)
        expected = messages * (nodes - 1)
        for probe in probes:
            try:
                probe.wait_for_frames(expected, messages * every + 30)
            except TimeoutError:
                sys.stderr.write(f"a node got {len(probe.said('got'))} of {expected} frames\n")
        spent = _cpu(probes) - before
        time.sleep(IDLE / 2)  # the last copies
        before, since = _cpu(probes), time.monotonic()
        time.sleep(IDLE)
        idle_rate = (_cpu(probes) - before) / (time.monotonic() - since)
        return _report(probes, nodes, kib, messages, spent, idle_rate)


def _report(
    probes: Sequence[ProbeProcess], nodes: int, kib: int, messages: int, spent: float, idle_rate: float
) -> dict[str, Any]:
    one: list[float] = []
    by_frame: dict[tuple[str, int], list[float]] = defaultdict(list)
    for probe in probes:
        for got in probe.said("got"):
            one.append(got["delay"])
            by_frame[got["author"], got["got"]].append(got["delay"])
    everybody = [max(delays) for delays in by_frame.values() if len(delays) == nodes - 1]
    return {
        "schema": 1,
        "nodes": nodes,
        "kib": kib,
        "published": nodes * messages,
        "delivered": len(one),
        "expected": nodes * messages * (nodes - 1),
        "delay_one_ms": _quantiles(one),
        "delay_all_ms": _quantiles(everybody),
        "cpu_ms_per_frame_and_receiver": round(1000 * spent / max(len(one), 1), 2),
        "idle_cpu_percent_per_node": round(100 * idle_rate / nodes, 2),
        "restarts": sum((probe.last("restarts") or {"restarts": 0})["restarts"] for probe in probes),
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {"p50": 0.0, "p95": 0.0, "max": 0.0}
    cuts = statistics.quantiles(seconds, n=20, method="inclusive")
    return {
        "p50": round(1000 * cuts[9], 1),
        "p95": round(1000 * cuts[18], 1),
        "max": round(1000 * max(seconds), 1),
    }


def _cpu(probes: Sequence[ProbeProcess]) -> float:
    return sum(float(found["cpu"]) for probe in probes if (found := probe.last("cpu")))


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['nodes']} nodes, {report['kib']} KiB: {report['delivered']} of"
        f" {report['expected']} deliveries\n"
    ]
    lines.append(f"{'delay, ms':<24}{'p50':>10}{'p95':>10}{'max':>10}\n")
    for name, key in (("to one other node", "delay_one_ms"), ("to all other nodes", "delay_all_ms")):
        lines.append(
            f"{name:<24}"
            + "".join(f"{report[key][column]:>10.1f}" for column in ("p50", "p95", "max"))
            + "\n"
        )
    lines.append(f"CPU per frame and receiver {report['cpu_ms_per_frame_and_receiver']} ms; ")
    lines.append(f"idle {report['idle_cpu_percent_per_node']} % of a core per node\n")
    return "".join(lines)


if __name__ == "__main__":
    main()
