"""Bytes that an interrupted download fetches twice.

Kill -9 at random moments, from a server on loopback that speaks the hub's protocol.

    python -m benchmarks.download [--megabytes 200] [--kills 5] [--seed 1] [--rate 40]

The server sends at --rate MB a second. "twice" counts what it had handed to its socket past the point from
which the next process asked on: what was in the sockets' buffers, and the chunk in hand (1 MiB). The content
is compared in the end.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

COMMIT, NAME = "c0ffee" + 34 * "0", "model.safetensors"
FETCH = "from swarmd.policy.models import hub; hub.with_weights(hub.locate('owner/model', None))"


class WeightServer(BaseHTTPRequestHandler):
    """One repository, owner/model, with a small configuration and one large file."""

    files: dict[str, bytes]
    rate: float  # bytes a second
    # Of the large file: first byte asked for, and the one after the last that was sent
    spans: list[list[int]]
    sent = threading.Condition()

    def do_GET(self) -> None:
        parts = urlparse(self.path).path.strip("/").removeprefix("api/models/").split("/")[2:]
        if parts[:1] == ["resolve"]:
            self.send_file(parts[2])
        elif parts[:1] == ["tree"]:
            self.send(
                json.dumps(
                    [
                        {"type": "file", "path": n, "size": len(b), "oid": "0" * 40}
                        for n, b in self.files.items()
                    ]
                ).encode()
            )
        else:
            self.send(json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": []}).encode())

    do_HEAD = do_GET  # noqa: N815  the name that http.server looks for

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET" and len(body) < 10_000:
            self.wfile.write(body)

    def send_file(self, name: str) -> None:
        body = self.files[name]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.send(
            body[start:],
            206 if start else 200,
            ETag=f'"{hashlib.sha256(body).hexdigest()}"',
            X_Repo_Commit=COMMIT,
        )
        if self.command == "HEAD" or len(body) < 10_000:
            return
        span = [start, start]
        self.spans.append(span)
        step = 65_536
        try:
            while span[1] < len(body):
                self.wfile.write(body[span[1] : span[1] + step])
                with self.sent:
                    span[1] = min(len(body), span[1] + step)
                    self.sent.notify_all()
                time.sleep(step / self.rate)
        except OSError:
            return  # the process was killed

    def log_message(self, *_: object) -> None:
        pass


def reached(spans: Sequence[Sequence[int]], moment: int) -> bool:
    return bool(spans) and spans[-1][1] >= moment


def measure(size: int, kills: int, seed: int, rate: float) -> tuple[list[list[int]], bool]:
    """Return the spans that were sent, in order, and whether the whole file arrived unchanged."""
    rng = random.Random(seed)
    files = {"config.json": b'{"model_type": "llama"}', NAME: rng.randbytes(size)}
    spans: list[list[int]] = []
    handler = type("Handler", (WeightServer,), {"files": files, "rate": rate, "spans": spans})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    moments = sorted(rng.randrange(size) for _ in range(kills))
    with tempfile.TemporaryDirectory() as home:
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HTTP", "http"))
        }
        environment = kept | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": home,
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        for moment in [*moments, None]:
            with subprocess.Popen([sys.executable, "-c", FETCH], env=environment) as process:
                if moment is not None:
                    with WeightServer.sent:
                        WeightServer.sent.wait_for(partial(reached, spans, moment), 300)
                    process.kill()
        (whole,) = Path(home).rglob(f"snapshots/*/{NAME}")
        same = whole.read_bytes() == files[NAME]
    server.shutdown()
    server.server_close()
    return spans, same


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.download", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=40)
    arguments = parser.parse_args()
    spans, same = measure(arguments.megabytes * 10**6, arguments.kills, arguments.seed, arguments.rate * 1e6)
    print(f"{'from':>12} {'to':>12} {'twice, MB':>10}")
    twice = [max(0, end - following) for (_, end), (following, _) in itertools.pairwise(spans)]
    for (start, end), again in zip(spans, [*twice, 0], strict=True):
        print(f"{start:>12,} {end:>12,} {again / 1e6:>10.2f}")
    print(
        f"content as it is: {same}; sent twice: {sum(twice) / 1e6:.2f} MB in {arguments.kills} kills, at most"
        f" {max(twice) / 1e6:.2f} MB"
    )


if __name__ == "__main__":
    main()
