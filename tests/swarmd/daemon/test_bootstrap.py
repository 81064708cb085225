"""`swarmd bootstrap`, as a real process on loopback."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from swarmd.cli.peers import _announce
from swarmd.daemon.bootstrap import announcement
from swarmd.daemon.inviting import place
from swarmd.exchange.swarm_id import swarm_digest
from swarmd.state.status import Status, SwarmLabel
from swarmd.tasks.curriculum import CURRICULA
from testbed.probe_process import ProbeProcess
from tests.doubles import TIMEOUT_S
from tests.packaging.checkout import ROOT, parse
from tests.processes import wait_until
from tests.swarmd.conftest import Run

LISTEN = "/ip4/127.0.0.1/tcp/0"


@contextmanager
def bootstrap(folder: Path, *options: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    command = [
        sys.executable,
        "-m",
        "swarmd",
        "bootstrap",
        "--state-dir",
        str(folder),
        "--listen",
        LISTEN,
        "--json",
        *options,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said, f"it did not start: {process.communicate()}"
            yield process, json.loads(said)
        finally:
            process.kill()


@pytest.mark.net
@pytest.mark.parametrize("curriculum", ["tiny-9", "sapo-9"])
def test_nodes_that_know_only_the_bootstrap_node_find_each_other(
    tmp_path: Path, run: Run, curriculum: str
) -> None:
    """The bootstrap node is a member of tiny-9 by default, and also forwards other curricula's messages."""
    with ExitStack() as stack:
        process, said = stack.enter_context(bootstrap(tmp_path / "boot"))
        assert said["relay"] and sorted(said["swarm"]["curricula"]) == sorted(CURRICULA)
        addresses = [entry["address"] for entry in said["addresses"]]
        assert [entry["from"] for entry in said["addresses"]] == ["machine"]
        digest = swarm_digest(CURRICULA[curriculum])
        options: dict[str, Any] = {"bootstrap": addresses, "digest": digest, "more": ["--swarm", "main"]}
        probes = [stack.enter_context(ProbeProcess(tmp_path / name, **options)) for name in "ab"]
        for probe in probes:
            probe.wait_for_peers(2, TIMEOUT_S)  # the bootstrap node and each other
        probes[0].order(publish=1000)
        probes[1].wait_for_frames(1, TIMEOUT_S)

        assert all(said["peer_id"] in probe.peers() for probe in probes)  # also a member of the other swarm
        state = ["--state-dir", tmp_path / "boot"]
        wait_until(lambda: json.loads(run("peers", "--json", *state).out)["peers"], TIMEOUT_S)
        status = run("status", *state)
        assert (
            status.code == 0
            and "helping: it trains nothing" in status.out
            and "trainer" not in status.out
            and "round" not in status.out
        )
        assert run("pause", *state).code == 2
        network = run("doctor", "network", "--json", *state)
        assert network.code == 0 and all(
            name in json.loads(network.out)["survey"]["curriculum"] for name in CURRICULA
        )
        assert run("bootstrap", *state).code == 5  # the bootstrap node uses the folder
        assert run("stop", *state).code == 0
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.net
def test_nodes_of_an_unknown_curriculum_find_each_other_too(tmp_path: Path) -> None:
    """The bootstrap node answers DHT questions about a curriculum that it does not know."""
    with ExitStack() as stack:
        _, said = stack.enter_context(bootstrap(tmp_path / "boot"))
        addresses = [entry["address"] for entry in said["addresses"]]
        probes = [
            stack.enter_context(ProbeProcess(tmp_path / name, bootstrap=addresses, digest="another"))
            for name in "ab"
        ]
        for probe, other in zip(probes, reversed(probes), strict=True):
            assert probe.wait(lambda probe=probe, other=other: probe.peers() == [other.peer_id], TIMEOUT_S)


@pytest.mark.net
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_end_the_bootstrap_node(tmp_path: Path, number: signal.Signals, code: int, run: Run) -> None:
    with bootstrap(tmp_path / "boot") as (process, said):
        listen = said["addresses"][0]["address"].split("/p2p/")[0]
        taken = run("bootstrap", "--state-dir", tmp_path / "other", "--listen", listen)
        assert (
            taken.code == 2 and "another program is using port" in taken.err and "swarm.listen" in taken.err
        )
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == code
        assert not (tmp_path / "boot" / "run.json").exists()
    with bootstrap(tmp_path / "boot") as (_, again):
        assert again["peer_id"] == said["peer_id"]


@pytest.mark.net
def test_a_bootstrap_node_starts_in_two_seconds_without_torch(tmp_path: Path) -> None:
    """This takes two seconds on an idle machine; the test limits CPU time, whatever the load."""
    with bootstrap(tmp_path / "boot") as (process, _):
        times = os.times()
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        assert (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK") < 2.0, times
        assert "libtorch" not in maps and "reasoning_gym" not in maps


def test_the_units_command_line_is_accepted_by_the_parser() -> None:
    unit = (ROOT / "packaging" / "swarmd-bootstrap.service").read_text(encoding="utf-8")
    [start] = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    assert parse(shlex.split(start))["listen"] == ()
    assert "RestartPreventExitStatus=2 5 130" in unit


def test_a_bootstrap_node_without_a_network_ends_with_a_message(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARMD_SWARM_ENGINE", "none")
    said = run("bootstrap", "--state-dir", tmp_path / "boot")
    assert said.code == 2 and 'swarm.engine is "none"' in said.err


PLACES = {
    "/ip4/127.0.0.1": "machine",
    "/ip6/fe80::1": "machine",
    "/ip4/192.168.2.10": "network",
    "/ip4/100.64.1.1": "network",
    "/ip6/fd00::2": "network",
    "/ip4/11.0.0.1": "internet",
    "/ip6/2600::1": "internet",
}
TOLD = {  # words of the announcement, and words that it must not have
    "machine": ("only this machine can dial it", "router"),
    "network": ("forward TCP port 4001 of your router", "only this machine"),
    "internet": ("other nodes join with", "no public address|only this machine"),
}


@pytest.mark.parametrize("host, where", PLACES.items())
def test_the_announcement_says_from_where_an_address_can_be_dialled(host: str, where: str) -> None:
    address = f"{host}/tcp/4001/p2p/x"
    assert place(address) == where
    status = Status(
        name="glad-cat",
        swarm=SwarmLabel("main", curricula=("tiny-9", "sapo-9")),
        relay="at most 64 MiB for each pair of nodes",
        addresses=[address],
        state_dir="/tmp/boot",
    )
    text, (wanted, unwanted) = "\n".join(announcement(status)), TOLD[where]
    assert wanted in text and not re.search(unwanted, text)
    assert "relays for nodes behind NAT: at most" in text
    assert "--state-dir /tmp/boot" in text
    # The node continues even if a full disk loses the message.
    with (
        patch("sys.stdout", io.StringIO()) as out,
        patch.object(out, "flush", side_effect=OSError(28, "full")),
    ):
        _announce(status, as_json=False)
    assert out.getvalue() == f"{address}\n"
