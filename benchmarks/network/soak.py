"""Soak test: memory, delivered frames and longest silence of a swarm of real nodes over a long time.

    python -m benchmarks.network.soak [--nodes 8] [--per-second 5] [--bytes 600] [--minutes 30]
        [--engine libp2p|hivemind|mixed] [--json]

All nodes together publish --per-second frames. Memory is the resident set of a node and its child (p2pd): the
mean over the minute before the settling time ends, and the mean over the last minute. The growth of the node
that grew most is reported.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from testbed.probe_process import ProbeProcess

LOOK_EVERY = 5.0  # seconds
DRAIN = 10.0  # seconds to wait for the last frames


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument(
        "--per-second", type=float, default=5.0, help="frames a second that all nodes together publish"
    )
    parser.add_argument("--bytes", type=int, default=600)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--settled", type=float, default=5.0, help="minutes after which memory should no longer grow"
    )
    parser.add_argument("--engine", choices=["libp2p", "hivemind", "mixed"], default="libp2p")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), arguments)
    out = sys.stderr if arguments.json else sys.stdout
    out.write(table(report))
    if arguments.json:
        print(json.dumps(report), flush=True)


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        probes: list[ProbeProcess] = []
        for n in range(arguments.nodes):
            engine = ("libp2p", "hivemind")[n % 2] if arguments.engine == "mixed" else arguments.engine
            bootstrap = probes[0].addresses[:1] if probes else []
            probes.append(
                stack.enter_context(
                    ProbeProcess(folder / str(n), bootstrap=bootstrap, engine=engine, more=["--report", "5"])
                )
            )
        for probe in probes:
            probe.wait_for_peers(min(arguments.nodes - 1, 4), 120)
        every = arguments.nodes / arguments.per_second
        count = round(arguments.minutes * 60 / every)
        begun = time.monotonic()
        for probe in probes:
            probe.order(publish=arguments.bytes, count=count, every=every)
            time.sleep(every / arguments.nodes)  # so that the nodes publish in turn
        sizes, quiet = _watch(probes, begun, arguments.minutes * 60)
        time.sleep(DRAIN)
        return _report(arguments, probes, sizes, quiet)


def _watch(
    probes: Sequence[ProbeProcess], begun: float, seconds: float
) -> tuple[list[list[tuple[float, float]]], float]:
    """Return each node's (seconds since the start, MiB), and the longest silence of any node."""
    sizes: list[list[tuple[float, float]]] = [[] for _ in probes]
    last, heard, quiet = [time.monotonic()] * len(probes), [0] * len(probes), 0.0
    while (now := time.monotonic()) - begun < seconds:
        for n, probe in enumerate(probes):
            sizes[n].append((now - begun, probe.resident()))
            if (count := len(probe.said("got"))) > heard[n]:
                last[n], heard[n] = now, count
            quiet = max(quiet, now - last[n])
        time.sleep(LOOK_EVERY)
    return sizes, quiet


def _report(
    arguments: argparse.Namespace,
    probes: Sequence[ProbeProcess],
    sizes: list[list[tuple[float, float]]],
    quiet: float,
) -> dict[str, Any]:
    sent = {probe.peer_id: len(probe.said("sent")) for probe in probes}
    expected = sum(count for probe in probes for author, count in sent.items() if author != probe.peer_id)
    got = sum(len(probe.said("got")) for probe in probes)
    twice = sum(
        count - 1
        for probe in probes
        for count in Counter((g["author"], g["got"]) for g in probe.said("got")).values()
    )
    settled, end = arguments.settled * 60, arguments.minutes * 60
    rows = [(_mean(size, settled - 60, settled), _mean(size, end - 60, end)) for size in sizes]
    grown = max(rows, key=lambda row: row[1] / row[0])
    return {
        "schema": 1,
        "work": {
            k: getattr(arguments, k) for k in ("nodes", "per_second", "bytes", "minutes", "settled", "engine")
        },
        "mib_settled": round(statistics.mean(row[0] for row in rows), 1),
        "mib_end": round(statistics.mean(row[1] for row in rows), 1),
        "growth": round(grown[1] / grown[0] - 1, 4),  # of the node that grew most
        "delivered": got / expected if expected else None,
        "frames": sum(sent.values()),
        "twice": twice,
        "longest_silence": round(quiet, 1),
        "restarts": sum((probe.last("restarts") or {"restarts": 0})["restarts"] for probe in probes),
    }


def _mean(size: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    return statistics.mean([mib for at, mib in size if begin <= at <= end] or [size[-1][1]])


def table(report: dict[str, Any]) -> str:
    work, delivered = report["work"], 100 * (report["delivered"] or 0)
    what = f"{work['per_second']} frames a second of {work['bytes']} bytes"
    return (
        f"{work['nodes']} nodes, {what}, {work['minutes']:.0f} min, {work['engine']}\nmemory of a node after"
        f" {work['settled']:.0f} min   {report['mib_settled']:8.1f} MiB\n               at the end  "
        f" {report['mib_end']:8.1f} MiB; the node that grew most by {100 * report['growth']:.1f} %\ndelivered"
        f"                   {delivered:8.2f} % of {report['frames']} frames to all others,"
        f" {report['twice']} twice\nlongest silence of a node   {report['longest_silence']:8.1f} s; engines"
        f" started again: {report['restarts']}\n"
    )


if __name__ == "__main__":
    main()
