"""The reason why a node is alone, shown by real processes without a model.

A bootstrap node and several peers run at the same time; each peer is alone for a different reason.
"""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import ROOT
from tests.swarm.test_meeting import first_line, started
from tests.swarm.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.net]

RULE_PEER = ROOT / "docs" / "examples" / "rule_peer.py"
SETTINGS = {
    "SWARMD_SWARM_ENGINE": "libp2p",
    "SWARMD_LISTEN": "/ip4/127.0.0.1/tcp/0",
    "SWARMD_SWARM_MDNS": "off",
    "SWARMD_PACE": "5",
}


def peer(
    stack: ExitStack, folder: Path, bootstrap: str, clock: str = "now()", **settings: str
) -> "subprocess.Popen[bytes]":
    program = (
        f"import runpy, time; now = time.time; time.time = lambda: {clock};"
        f" runpy.run_path({str(RULE_PEER)!r}, run_name='__main__')"
    )
    environment = os.environ | SETTINGS | settings
    folder.mkdir(mode=0o700, exist_ok=True)
    log = stack.enter_context((folder / "peer.log").open("wb"))
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder), bootstrap], stdout=log, stderr=log, env=environment
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def test_each_cause_is_named_and_a_healthy_node_has_none(tmp_path: Path) -> None:
    with ExitStack() as stack:
        words = [
            "bootstrap",
            "--state-dir",
            str(tmp_path / "boot"),
            "--listen",
            "/ip4/127.0.0.1/tcp/0",
            "--json",
        ]
        helper = first_line(started(stack, *words, SWARMD_SWARM_ENGINE="libp2p", SWARMD_SWARM_MDNS="off"))
        address = helper["addresses"][0]["address"]
        taken = stack.enter_context(socket.socket())
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        well = peer(stack, tmp_path / "well", address, SWARMD_SWARM_CURRICULUM="tiny-9")
        alone = {
            peer(
                stack, tmp_path / "late", address, "now() - 600", SWARMD_SWARM_CURRICULUM="tiny-9"
            ): "clock is 10 minutes behind all",
            peer(
                stack, tmp_path / "other", address, SWARMD_SWARM_CURRICULUM="sapo-9"
            ): "of tiny-9, and this node trains on sapo-9",
            peer(
                stack,
                tmp_path / "dead",
                f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}/p2p/{helper['peer_id']}",
            ): "does not answer",
        }
        for (process, said), folder in zip(alone.items(), ("late", "other", "dead"), strict=True):
            until(
                tmp_path / folder,
                lambda status, said=said: said in (status["trouble"] or {"cause": ""})["cause"],
                process,
            )  # type: ignore[misc]
        # This node checked as often as the other nodes.
        until(tmp_path / "well", lambda status: status["trouble"] is None, well)
