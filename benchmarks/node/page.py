"""Measures the CPU time that the node's page and /metrics take, as a share of a core.

One node of a swarm of `swarmd join` processes on loopback is measured.

    python -m benchmarks.node.page [--nodes 2] [--pairs 6] [--seconds 20] [--pace 1] [--json]

The CPU seconds of that node's daemon are measured in windows of --seconds: while nobody reads, while one
reader follows the page's events, and while /metrics is scraped each second. A window without a reader lies
before and after each window with one; all are repeated --pairs times. The first second after a change does
not count. The cost is the median difference from the mean of the windows without a reader before and after.
"""

import argparse
import http.client
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil

from swarmd.daemon.local_api.control import call
from testbed.local_swarm import LocalNode, local_swarm

SETTLING = 20  # rounds
PATIENCE = 300.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.node.page", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--pace",
        default="1",
        help="shortest round in seconds; at 1, everything on the page that can change changes each second",
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--model", "tiny", "--device", "cpu", "--pace", arguments.pace]
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder), arguments.nodes, words) as nodes:
        nodes[0].variables["SWARMD_METRICS_LISTEN"] = str(port)
        for node in nodes:
            node.start()
        _settle(nodes[0])
        address = call(nodes[0].folder, "ui", dict)["address"]
        watched = {"page": lambda: _shown(address), "metrics": lambda: _scraped(port)}
        measured = _measure(nodes[0], arguments.pairs, arguments.seconds, watched)
    if arguments.json:
        document = {
            name: {"median": statistics.median(values), "values": values} for name, values in measured.items()
        }
        print(json.dumps({"schema": 1, **document}))
        return
    for name, values in measured.items():
        each = " ".join(f"{value:.2%}" for value in values)
        print(f"{name:8} {statistics.median(values):7.2%} of a core   ({each})")


def _measure(
    node: LocalNode,
    pairs: int,
    seconds: float,
    watched: Mapping[str, Callable[[], AbstractContextManager[None]]],
) -> dict[str, list[float]]:
    assert node.process is not None
    daemon = psutil.Process(node.process.pid)
    found: dict[str, list[float]] = {"nothing": [_share(daemon, seconds)]}
    for _ in range(pairs):
        for name, show in watched.items():
            with show():
                time.sleep(1)
                shown = _share(daemon, seconds)
            time.sleep(1)
            found["nothing"].append(_share(daemon, seconds))
            found.setdefault(name, []).append(shown - statistics.mean(found["nothing"][-2:]))
    return found


def _share(process: psutil.Process, seconds: float) -> float:
    """Return the share of a core that a process uses during this many seconds."""
    before, begun = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after = process.cpu_times()
    taken = float(after.user + after.system - before.user - before.system)
    return taken / (time.monotonic() - begun)


@contextmanager
def _shown(address: str) -> Iterator[None]:
    """Read the page's events, as a browser does."""
    place, _, query = address.partition("/?")
    host = place.removeprefix("http://")
    with socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2])), timeout=60) as reader:
        reader.sendall(f"GET /events?{query} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert b" 200 " in reader.recv(64 * 1024)
        got = []

        def read() -> None:
            while some := reader.recv(1 << 20):
                got.append(len(some))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield
        finally:
            reader.shutdown(socket.SHUT_RDWR)
            thread.join()
        assert sum(got) > 1000, "the page's reader received hardly any events"


@contextmanager
def _scraped(port: int) -> Iterator[None]:
    done = threading.Event()
    sizes = []

    def scrape() -> None:
        while not done.wait(1):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/metrics")
            sizes.append(len(connection.getresponse().read()))
            connection.close()

    scraper = threading.Thread(target=scrape, daemon=True)
    scraper.start()
    try:
        yield
    finally:
        done.set()
        scraper.join()
    assert sizes and min(sizes) > 500


def _settle(node: LocalNode) -> None:
    end = time.monotonic() + PATIENCE
    while len(node.lines()) < SETTLING:
        node.check()
        if time.monotonic() > end:
            sys.exit(f"fewer than {SETTLING} rounds in {PATIENCE:.0f} s; see {node.log}")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
