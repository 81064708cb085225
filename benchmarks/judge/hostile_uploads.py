"""Sends a real judge two hundred uploads that it must not load.

Measures their cost, and whether the judge accepts one of them.

    python -m benchmarks.judge.hostile_uploads [--seed 1] [--json]

The judge is a separate process on loopback, with the tiny model. Each upload comes from a different peer and
network. Seconds run from the first byte sent to the last byte of the rejection. Memory is the increase of the
judge's peak (VmHWM, reset before each upload; Linux). A slow upload never sends its last byte: its seconds
are the judge's timeout, so only its CPU time counts. At the end good weights are uploaded and must be
evaluated. Rejected uploads must have left no file and no row, and started no process. With --json the last
line is one JSON object. The exit code is 1 if an upload was accepted or a limit exceeded.
"""

import argparse
import hashlib
import json
import sqlite3
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx2
import psutil

from judge import config
from swarmd.policy.models.tiny import WEIGHTS
from swarmd.tasks.curriculum import TINY_9
from testbed.hostile_uploads import HostileUpload, Shapes, uploads
from testbed.judge_process import serving
from testbed.signing_peer import SigningPeer
from testbed.uploaded_weights import parts_of

CAP = 8_000_000  # bytes of an upload
MOST_S = 1.0
MOST_MEMORY = 64 * 2**20


@dataclass
class Cost:
    kind: str
    status: int
    error: str
    seconds: float
    cpu: float  # seconds, of the judge
    memory: int  # bytes


def send(url: str, number: int, upload: HostileUpload) -> tuple[int, Any]:
    """Send an upload; return status and document of the answer."""
    peer = SigningPeer(number, url)
    body = upload.body
    said = {
        "model": "tiny",
        "curriculum": TINY_9.digest,
        "bytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
    } | upload.said
    target = "/v1/verified?" + urlencode(said)
    headers = {
        **peer.headers("POST", target, b""),
        **upload.headers,
        "x-forwarded-for": f"198.{18 + number % 2}.{number // 2}.7",
    }
    message = f"POST\n{url}\n{target}\n{peer.sequence}\n{said['sha256']}"
    headers["swarmd-signature"] = peer.identity.sign(b"swarmd judge request v1", message.encode()).hex()
    if upload.slow:
        return _drip(url, target, headers, body, int(upload.said.get("bytes", len(body))))
    with httpx2.Client(trust_env=False, timeout=120) as client:
        content = iter([body]) if "transfer-encoding" in headers else body
        answer = client.post(url + target, headers=headers, content=content)
    return answer.status_code, answer.json()


def _drip(url: str, target: str, headers: dict[str, str], body: bytes, size: int) -> tuple[int, Any]:
    import socket

    parts = urlsplit(url)
    lines = "".join(
        f"{name}: {value}\r\n"
        for name, value in {**headers, "host": parts.netloc, "content-length": f"{size}"}.items()
    )
    with socket.create_connection((parts.hostname, parts.port), 120) as connection:
        connection.sendall(f"POST {target} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        answer = b""
        while not answer.endswith(b"}") and (piece := connection.recv(65_536)):
            answer += piece
    return int(answer.split()[1]), json.loads(answer.split(b"\r\n\r\n", 1)[1])


def peak(judge: psutil.Process) -> int:
    lines = Path(f"/proc/{judge.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measured(url: str, judge: psutil.Process, shapes: Shapes, seed: int) -> Iterator[Cost]:
    for number, upload in enumerate(uploads(shapes, seed), 1):
        Path(f"/proc/{judge.pid}/clear_refs").write_text("5")  # reset the peak
        before, cpu = peak(judge), sum(judge.cpu_times()[:2])
        begun = time.perf_counter()
        status, document = send(url, number, upload)
        seconds = time.perf_counter() - begun
        found = peak(judge) - before, sum(judge.cpu_times()[:2]) - cpu
        yield Cost(upload.kind, status, document.get("error", ""), seconds, found[1], found[0])


def table(costs: Sequence[Cost]) -> str:
    kinds: dict[str, list[Cost]] = defaultdict(list)
    for cost in costs:
        kinds[cost.kind].append(cost)
    lines = [f"{'kind':<26}{'uploads':>8}{'refused':>9}{'worst s':>9}{'judge CPU s':>13}{'worst MiB':>11}"]
    for kind, of in kinds.items():
        refused = sum(400 <= cost.status < 500 for cost in of)
        worst = max(c.seconds for c in of), max(c.cpu for c in of), max(c.memory for c in of) / 2**20
        lines.append(f"{kind:<26}{len(of):>8}{refused:>9}{worst[0]:>9.3f}{worst[1]:>13.2f}{worst[2]:>11.1f}")
    return "\n".join(lines)


def left_behind(folder: Path) -> tuple[int, int]:
    """Count the files and rows that uploads left behind."""
    with closing(sqlite3.connect(folder / "judge.sqlite3")) as database:
        ((rows,),) = database.execute("SELECT count(*) FROM verifications")
    return len(list((folder / "judge.sqlite3.uploads").iterdir())), rows


def evaluated(url: str, weights: bytes) -> Any:
    status, queued = send(url, 500, HostileUpload("good", weights))
    assert status == 202, queued
    while (found := httpx2.get(f"{url}/v1/verified/{queued['verification']}").json())["state"] in (
        "queued",
        "running",
    ):
        time.sleep(0.2)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    weights = (WEIGHTS["tiny"] / "model.safetensors").read_bytes()
    shapes = {name: entry["shape"] for name, entry in parts_of(weights)[0].items() if name != "__metadata__"}
    with (
        tempfile.TemporaryDirectory() as temporary,
        serving(f"{temporary}/judge.sqlite3", "--verified-bytes", str(CAP)) as (process, url),
    ):
        judge = psutil.Process(process.pid)
        costs = list(measured(url, judge, shapes, given.seed))
        files, rows = left_behind(Path(temporary))
        processes = len(
            [
                child
                for child in judge.children(recursive=True)
                if "judge.verified" in " ".join(child.cmdline())
            ]
        )
        good = evaluated(url, weights)
    quick = [cost for cost in costs if cost.kind != "slow"]
    loaded = sum(cost.status < 400 for cost in costs) + rows + files + processes
    worst_seconds = max(cost.seconds for cost in quick)
    worst_cpu, worst_memory = (max(getattr(cost, name) for cost in costs) for name in ("cpu", "memory"))
    figures = {
        "uploads": len(costs),
        "refused": sum(400 <= cost.status < 500 for cost in costs),
        "loaded": loaded,
        "worst_seconds": worst_seconds,
        "worst_cpu": worst_cpu,
        "patience_with_slow_ones": max(cost.seconds for cost in costs if cost.kind == "slow"),
        "worst_memory": worst_memory,
        "good": {name: good.get(name) for name in ("state", "score", "n", "error")},
    }
    held = loaded == 0 and worst_cpu < MOST_S and worst_memory < MOST_MEMORY and good["state"] == "done"
    print(table(costs))
    print(f"\nloaded {loaded}, worst {worst_seconds:.3f} s, {worst_memory / 2**20:.1f} MiB")
    print(f"slow ones are ended after {config.VERIFIED_STALL_S:g} s; then good weights: {figures['good']}")
    if given.json:
        print(json.dumps({"schema": 1, "work": {"seed": given.seed}, "figures": figures, "held": held}))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
