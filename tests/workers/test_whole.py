"""A node with generators and trainers apart, as a person runs it; and everybody killed once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarmd.daemon import control
from swarmd.state.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.net]

SETTINGS = """
[model]
name = "tiny"
device = "cpu"
[round]
local = 4
external = 0
[replay]
mode = "on"
updates_per_round = 2
[swarm]
engine = "none"
[workers]
generators = 1
trainers = 2
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" if Path("/proc/self").exists() else True


def until(state: Path, node: "subprocess.Popen[str]", holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first status for which it holds, while the node lives; two minutes at most."""
    status: dict[str, Any] = {}
    for _ in range(1200):
        assert node.poll() is None, "the node ended"
        status = control.call(state, "status")
        if status["last"] and holds(status):
            return status
        time.sleep(0.1)
    raise AssertionError(f"waited in vain; the last status was {status}")


def test_whoever_is_killed_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(SETTINGS)
    state = tmp_path / "state"
    command = [sys.executable, "-m", "swarmd", "join", "--config", str(tmp_path / "node.toml"), "--state-dir", str(state), "--json"]

    def workers(status: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = status["last"]["workers"]
        return found

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as node:
        try:
            assert node.stdout is not None
            assert json.loads(node.stdout.readline())["round"] == 1
            first = until(state, node, lambda s: workers(s)["trainers"]["alive"] == 2 and workers(s)["generators"]["alive"] == 1)
            for kind in ("generators", "trainers"):
                os.kill(workers(first)[kind]["pids"][0], signal.SIGKILL)
            both = until(
                state, node, lambda s: all(workers(s)[k]["restarts"] == 1 and workers(s)[k]["pids"] for k in ("generators", "trainers"))
            )
            newer = workers(both)["version"] + 1
            after = until(state, node, lambda s: workers(s)["version"] >= newer and workers(s)["generators"]["alive"] == 1)
            assert after["trainer"]["restarts"] == 0 and after["round"] > first["round"]

            pids = [pid for kind in ("generators", "trainers") for pid in workers(after)[kind]["pids"]]
            os.kill(after["trainer"]["pid"], signal.SIGKILL)
            again = until(state, node, lambda s: s["trainer"]["restarts"] == 1 and s["round"] > after["round"] + 1)
            assert workers(again)["version"] > 0 and not any(alive(pid) for pid in pids), "workers end with their trainer"
            node.send_signal(signal.SIGTERM)
            assert node.wait(60) == 0
        finally:
            node.kill()
    lines = read_metrics(state / "metrics.jsonl")
    assert [line["round"] for line in lines] == list(range(1, len(lines) + 1))
    versions = [line["workers"]["version"] for line in lines]
    assert versions == sorted(versions) and all(line["updates"] in (1, 2) for line in lines)
