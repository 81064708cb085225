"""A judge as a process on a free loopback port. It trusts the client address that a local proxy reports."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving(database: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve the curriculum tiny-9; yield the judge's process and address. Kill the process at the end."""
    command = [
        sys.executable,
        "-m",
        "judge",
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
