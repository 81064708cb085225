"""Measures a judge under load: evaluations a second, latency, CPU, and answers that kill -9 loses.

    python -m benchmarks.judge.load --rate 200 --seconds 120
    python -m benchmarks.judge.load --workers 2 --database postgresql://…
    python -m benchmarks.judge.load --kills 100

An evaluation is two signed requests, ask and answer, by one of --keys keys over persistent connections. A key
reports a later round at each evaluation. The judge is a separate process on loopback; the client runs on the
same machine. With --workers several judges share one PostgreSQL, and each key always uses the same judge. The
latency of a request is counted from the time at which it is due at --rate, so a judge that falls behind has a
high latency. A judge generates its questions in its first half minute; with --up 0 the load begins during
that time. With --kills the judge is killed at random moments under load, and every acknowledged answer is
looked up afterwards.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psutil

from swarmd.tasks.curriculum import TINY_9
from testbed.judge_process import serving
from testbed.signing_peer import SigningPeer, encode


@dataclass
class Load:
    """The figures of a measured load."""

    seconds: list[float] = field(default_factory=list)  # latency of each request
    errors: Counter[str] = field(default_factory=Counter)
    evaluations: int = 0
    acknowledged: dict[str, str] = field(default_factory=dict)  # the peer of each evaluation


class Caller:
    """One persistent connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.origin, self._address = url, (parts.hostname, parts.port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, peer: SigningPeer, target: str, document: dict[str, Any]) -> tuple[int, Any]:
        body = encode(document)
        # Requests seem to come from several networks, behind a proxy, because a judge limits fresh keys of
        # one network.
        network = int(peer.identity.public_key[0])
        near = {"host": "judge", "content-length": str(len(body)), "x-forwarded-for": f"198.18.{network}.7"}
        headers = {**peer.headers("POST", target, body), **near}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        # A judge closes a connection that was idle for five seconds.
        if self._streams is None or self._streams[0].at_eof():
            self.close()
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        writer.write(f"POST {target} HTTP/1.1\r\n{head}\r\n".encode() + body)
        answered = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answered.split("content-length: ")[1].split("\r\n")[0])
        content = await reader.readexactly(length)
        if "connection: close" in answered:
            self.close()
        return int(answered.split()[1]), json.loads(content)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def evaluate(caller: Caller, peer: SigningPeer, load: Load, due: float, round_number: int) -> None:
    ask = {"round": round_number, "curriculum": TINY_9.digest, "asker": {"model": "tiny", "sharing": "swarm"}}
    status, asked = await caller.post(peer, "/v1/evaluations", ask)
    load.seconds.append(time.monotonic() - due)
    if status != 201:
        load.errors[f"{status} {asked['error']}"] += 1
        return
    begun = time.monotonic()
    given = {"answers": [{"text": "<answer>0</answer>", "ended": True}]}
    evaluation = asked["evaluations"][0]["evaluation"]
    status, grade = await caller.post(peer, f"/v1/evaluations/{evaluation}/answers", given)
    load.seconds.append(time.monotonic() - begun)
    if status != 200:
        load.errors[f"{status} {grade['error']}"] += 1
        return
    load.evaluations += 1
    load.acknowledged[evaluation] = peer.identity.peer_id


async def press(peers: list[SigningPeer], rate: float, seconds: float, load: Load) -> None:
    """Evaluate each peer in turn, `rate` evaluations a second, over 16 connections to each judge."""
    begun = time.monotonic()
    numbers = iter(range(int(rate * seconds)))

    async def work() -> None:
        callers = {url: Caller(url) for url in {peer.origin for peer in peers}}
        for number in numbers:
            peer, due = peers[number % len(peers)], begun + number / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            try:
                await evaluate(callers[peer.origin], peer, load, due, number // len(peers))
            except (OSError, EOFError) as error:
                load.errors[type(error).__name__] += 1
                return  # the judge was killed
        for caller in callers.values():
            caller.close()

    await asyncio.gather(*(work() for _ in range(16)))


def cpu_seconds(pids: list[int]) -> dict[str, float]:
    """Return the CPU seconds of the judges and of their child processes, which score."""
    judges = [psutil.Process(pid) for pid in pids]
    children = [child for judge in judges for child in judge.children(recursive=True)]
    return {
        name: sum(sum(one.cpu_times()[:2]) for one in ones)
        for name, ones in (("judge", judges), ("scoring", children))
    }


def loaded(given: argparse.Namespace) -> dict[str, Any]:
    load = Load()
    with contextlib.ExitStack() as stack:
        shared = ["--shared"] if given.workers > 1 else []
        judges = [
            stack.enter_context(serving(given.database, "--key", given.key, *shared))
            for _ in range(given.workers)
        ]
        urls, pids = [url for _, url in judges], [process.pid for process, _ in judges]
        peers = [SigningPeer(number, urls[number % len(urls)]) for number in range(given.keys)]
        time.sleep(given.up)
        before, begun = cpu_seconds(pids), time.monotonic()
        asyncio.run(press(peers, given.rate, given.seconds, load))
        took, after = time.monotonic() - begun, cpu_seconds(pids)
    cuts = statistics.quantiles(load.seconds, n=100, method="inclusive")
    return {
        "evaluations": load.evaluations,
        "a_second": round(load.evaluations / took, 1),
        "errors": dict(load.errors),
        "p50_ms": round(1000 * cuts[49], 1),
        "p99_ms": round(1000 * cuts[98], 1),
        "longest_ms": round(1000 * max(load.seconds), 1),
        "cpu_ms_an_evaluation": {
            name: round(1000 * (after[name] - before[name]) / load.evaluations, 2) for name in after
        },
    }


def killed(given: argparse.Namespace) -> dict[str, Any]:
    """Kill the judge `given.kills` times under load; then look for every acknowledged answer."""
    load, rng, sequence = Load(), random.Random(1), 0
    for _ in range(given.kills):
        with serving(given.database, "--key", given.key) as (process, url):
            peers = [SigningPeer(number, url) for number in range(given.keys)]
            for peer in peers:
                peer.sequence = sequence

            async def run(process: subprocess.Popen[str], peers: list[SigningPeer]) -> None:
                enough = load.evaluations + rng.randint(1, 100)

                async def kill() -> None:
                    while load.evaluations < enough:
                        await asyncio.sleep(0.001)
                    process.kill()

                killer = asyncio.create_task(kill())
                await press(peers, given.rate, 60.0, load)
                killer.cancel()

            asyncio.run(run(process, peers))
            sequence += 1_000_000
    with serving(given.database, "--key", given.key) as (_, url):
        kept = {
            entry["evaluation"]
            for peer in sorted(set(load.acknowledged.values()))
            for entry in history(url, peer)
        }
    return {
        "kills": given.kills,
        "acknowledged": len(load.acknowledged),
        "lost": len(load.acknowledged.keys() - kept),
    }


def history(url: str, peer: str) -> Iterator[dict[str, Any]]:
    before: int | None = 2**63 - 1
    while before is not None:
        page = httpx2.get(f"{url}/v1/peers/{peer}?before={before}", timeout=60).json()
        yield from page["evaluations"]
        before = page["more_before"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=200.0, help="evaluations a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--up", type=float, default=30.0, help="seconds between the judge's start and the load"
    )
    parser.add_argument("--keys", type=int, default=400)
    parser.add_argument("--workers", type=int, default=1, help="number of judges on one PostgreSQL")
    parser.add_argument(
        "--kills",
        type=int,
        default=0,
        help="instead, kill the judge this many times, and look for the answers it acknowledged",
    )
    parser.add_argument(
        "--database", default="", help="a file or a postgresql:// address (default: a new file)"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given.database = given.database or str(Path(folder) / "judge.sqlite3")
        given.key = str(Path(folder) / "judge.key")
        print(json.dumps(killed(given) if given.kills else loaded(given)))


if __name__ == "__main__":
    main()
