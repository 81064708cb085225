"""An operator's own tasks and rewards, in real processes.

Nodes with the same questions meet and share, even with different rewards. A node whose task file changes ends
with a message.
"""

import os
import signal
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from p2p.types import Reason
from swarmd.daemon.local_api import control
from swarmd.state.metrics import read_metrics
from tests import ROOT
from tests.doubles import TIMEOUT_S
from tests.swarm.test_join import COMMON, until
from tests.swarm.test_meeting import started

pytestmark = [pytest.mark.slow, pytest.mark.net]
EXAMPLE = ROOT / "docs" / "examples" / "sums.py"
ALL = {
    "SWARMD_SWARM_ENGINE": "libp2p",
    "SWARMD_SHARING_SHARE": "all",
    "SWARMD_SHARING_TAKE": "unfiltered",
}


def joined(
    stack: ExitStack, folder: Path, bootstrap: list[str], *words: str, **settings: str
) -> tuple["subprocess.Popen[str]", list[str]]:
    """Start a node; return it and the arguments with which other nodes join through it."""
    pace = ["--pace", "1", "--state-dir", str(folder), "--json"]
    node = started(stack, "join", *COMMON, *pace, *bootstrap, *words, **ALL, **settings)
    output = node.stdout
    assert output is not None
    # A node blocks if its output is not read.
    threading.Thread(target=output.read, daemon=True).start()
    status = until(folder, lambda status: bool(status["addresses"]), node)
    return node, bootstrap or ["--bootstrap", status["addresses"][0]]


def test_two_nodes_with_different_rewards_share_and_each_uses_its_own_reward(tmp_path: Path) -> None:
    (tmp_path / "least.py").write_text("def reward(facts, answer, score):\n    return 0.75 - score / 2\n")
    rewards = {"usual": "", "own": str(tmp_path / "least.py")}
    with ExitStack() as stack:
        bootstrap: list[str] = []
        nodes = {}
        for name, reward in rewards.items():
            nodes[name], bootstrap = joined(stack, tmp_path / name, bootstrap, SWARMD_TASKS_REWARD=reward)
        for name, node in nodes.items():
            until(tmp_path / name, lambda status: status["last"] and status["last"]["external"] > 0, node)
        lines = {name: tmp_path / name / "metrics.jsonl" for name in rewards}
        until(
            tmp_path / "usual",
            lambda _: any((line.reward_mean or 0.0) < 0.25 for line in read_metrics(lines["usual"])),
            nodes["usual"],
        )
        usual, own = map(read_metrics, lines.values())
        assert all(0.25 <= line.reward_mean <= 0.75 for line in own)
        assert not any(Reason.UNKNOWN_TASK.value in line.rejected for line in (*usual, *own))


def test_nodes_with_the_same_tasks_share_and_a_node_whose_file_changes_ends(tmp_path: Path) -> None:
    copy = tmp_path / "copy.py"
    copy.write_bytes(EXAMPLE.read_bytes())  # the same contents at another path
    with ExitStack() as stack:
        nodes = {}
        bootstrap: list[str] = []
        for name, own in (("first", EXAMPLE), ("second", copy)):
            nodes[name], bootstrap = joined(stack, tmp_path / name, bootstrap, "--curriculum", str(own))
        until(
            tmp_path / "second",
            lambda status: status["last"] and status["last"]["external"] > 0 and status["peers"] == 1,
            nodes["second"],
        )

        copy.write_text(copy.read_text() + "\n# edited")
        # The next trainer reads the file again.
        os.kill(control.call(tmp_path / "second", "status", dict)["trainer"]["pid"], signal.SIGKILL)
        assert nodes["second"].wait(timeout=TIMEOUT_S) == 2
        assert (
            "the file of the tasks sums, or of tasks.reward, has changed since this node started"
            in (tmp_path / "second" / "swarmd.log").read_text()
        )
