"""The README's two commands, as real processes.

`swarmd bootstrap` runs without options for tasks; the nodes have another curriculum, and one has a later
version.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from swarmd.state.folder import LOG_FILE
from tests.engines.p2pd import p2pd_missing
from tests.swarm.test_join import COMMON, until

pytestmark = [pytest.mark.slow, pytest.mark.net]

ENGINES = ("libp2p", "libp2p" if p2pd_missing() else "hivemind")
LATER = {"swarmd": "0.99.0", "reasoning-gym": "0.99.0"}


def later_versions(folder: Path) -> str:
    """Return a PYTHONPATH on which the packages of LATER appear in later versions, with the same code."""
    for package, version in LATER.items():
        info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(distribution(package).read_text("entry_points.txt") or "")
    return str(folder)


def started(stack: ExitStack, *words: str, **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "swarmd", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | environment
    )
    assert process.stdout is not None
    stack.enter_context(process.stdout)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def first_line(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def test_nodes_of_another_curriculum_meet_through_a_bootstrap_node_and_share(tmp_path: Path) -> None:
    with ExitStack() as stack:
        loopback = ["--listen", "/ip4/127.0.0.1/tcp/0"]
        boot = started(
            stack,
            "bootstrap",
            "--state-dir",
            str(tmp_path / "boot"),
            *loopback,
            "--json",
            SWARMD_SWARM_ENGINE="libp2p",
        )
        address = first_line(boot)["addresses"][0]["address"]
        later, nodes = later_versions(tmp_path / "later"), []
        for number, engine in enumerate(ENGINES):
            words = [
                "join",
                *COMMON,
                "--seed",
                str(number),
                "--pace",
                "0.5",
                "--state-dir",
                str(tmp_path / engine / str(number)),
            ]
            sapo = {"SWARMD_SWARM_CURRICULUM": "sapo-9", "SWARMD_SWARM_ENGINE": engine}
            # PYTHONSAFEPATH, because otherwise the working folder comes first.
            sapo |= {"PYTHONPATH": later, "PYTHONSAFEPATH": "1"} if number else {}
            nodes.append(started(stack, *words, "--bootstrap", address, "--json", **sapo))
        for number, (node, engine) in enumerate(zip(nodes, ENGINES, strict=True)):
            first_line(node)
            state = tmp_path / engine / str(number)
            until(state, lambda status: status["last"]["external"] > 0, node)
            until(
                state,
                lambda status: (
                    status["peers"] == 1 and status["connected"] >= 1 and status["trouble"] is None
                ),
                node,
            )
            log = (state / LOG_FILE).read_text()
            assert (f"swarmd {LATER['swarmd']} starts" in log) == bool(number), log
