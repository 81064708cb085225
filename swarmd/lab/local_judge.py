"""Run a judge on loopback."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from swarmd.lab.parent_watch import LabFailed, end, watched


@contextlib.contextmanager
def local_judge(folder: Path, curriculum: str = "tiny-9") -> Iterator[str]:
    """Run a judge on loopback until the block ends; yield its URL."""
    command = [
        *(*watched(), "judge", "serve", "--json"),
        *("--host", "127.0.0.1", "--port", "0"),
        *("--curriculum", curriculum, "--database", str(folder / "judge.sqlite")),
    ]
    with (folder / "judge.log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        with process.stdout:
            try:
                url = str(json.loads(process.stdout.readline())["url"])
            except (ValueError, KeyError, TypeError):
                raise LabFailed(
                    f"the judge did not start. Read {folder / 'judge.log'} for its reason."
                ) from None
            yield url
    finally:
        end(process)
