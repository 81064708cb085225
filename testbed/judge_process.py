"""A judge as a process, on a free port of loopback, which trusts a local proxy's address of the client."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving(database: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve the tiny-9 curriculum; yield the process and its address. At the end it is killed."""
    command = [
        sys.executable,
        "-m",
        "judge.cli",
        "serve",
        "--database",
        database,
        "--curriculum",
        "tiny-9",
        "--port",
        "0",
    ]
    command += ["--json", "--proxy", "127.0.0.1", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()
