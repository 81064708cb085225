"""A node with separate generators and trainers, run as a user runs it, whose trainer is killed.

`test_generators` and `test_data_parallel` show that the end of any other worker ends the trainer.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarmd.state.metrics import read_metrics
from tests.doubles import TIMEOUT_S
from tests.processes import ended, wait_until
from tests.swarm.waiting import until

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


def test_a_killed_trainer_and_its_workers_are_restarted_and_the_run_continues(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(SETTINGS)
    state = tmp_path / "state"
    command = [
        sys.executable,
        "-m",
        "swarmd",
        "join",
        "--config",
        str(tmp_path / "node.toml"),
        "--state-dir",
        str(state),
        "--json",
    ]
    command += ["--pace", "0.5"]  # so that rounds leave CPU time to other tests

    def workers(status: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = status["last"]["workers"]
        return found

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as node:
        try:
            assert node.stdout is not None and json.loads(node.stdout.readline())["round"] == 1
            all_up = {"trainers": 2, "generators": 1}
            first = until(
                state,
                lambda s: s["last"] and all(workers(s)[kind]["alive"] == n for kind, n in all_up.items()),
                node,
            )
            theirs = [
                psutil.Process(pid)
                for kind in ("generators", "trainers")
                for pid in workers(first)[kind]["pids"]
            ]
            os.kill(first["trainer"]["pid"], signal.SIGKILL)
            again = until(
                state,
                lambda s: (
                    s["last"]
                    and s["trainer"]["restarts"] == 1
                    and s["round"] > first["round"] + 1
                    and all(workers(s)[kind]["alive"] == n for kind, n in all_up.items())
                ),
                node,
            )
            assert workers(again)["version"] > 0
            wait_until(lambda: all(map(ended, theirs)))  # workers end when their trainer ends
            node.send_signal(signal.SIGTERM)
            assert node.wait(TIMEOUT_S) == 0
        finally:
            node.kill()
    lines = read_metrics(state / "metrics.jsonl")
    assert [line.round for line in lines] == list(range(1, len(lines) + 1))
    versions = [line.workers.version for line in lines]
    assert versions == sorted(versions) and all(line.updates in (1, 2) for line in lines)
