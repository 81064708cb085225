"""`swarmd join` as a user runs it: real processes, each with a state folder."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from msgspec import to_builtins

from swarmd.daemon.local_api import control
from swarmd.state.metrics import read_metrics
from swarmd.trainer.checkpoint import Checkpoints
from testbed.local_swarm import checkpoints
from tests.doubles import TIMEOUT_S
from tests.engines.p2pd import p2pd_missing
from tests.processes import killed_after
from tests.swarm.waiting import until
from tests.terminals import rest_of, terminal

pytestmark = [pytest.mark.slow, pytest.mark.net]

COMMON = ["--model", "tiny", "--device", "cpu", "--listen", "/ip4/127.0.0.1/tcp/0", "--seed", "1"]


def swarmd(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swarmd", *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | environment,
    )


def join(state: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return swarmd("join", *COMMON, "--state-dir", str(state), *words, **environment)


def node(state: Path, *words: str) -> "subprocess.Popen[str]":
    """Return the command line of a node that runs until it is stopped."""
    command = [
        sys.executable,
        "-m",
        "swarmd",
        "join",
        *COMMON,
        "--state-dir",
        str(state),
        "--pace",
        "0.5",
        "--json",
        *words,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def saved_all(state: Path) -> bool:
    """Return whether the latest checkpoint is of the last round in the metrics."""
    found = Checkpoints(state / "checkpoints").newest()
    return found is not None and found[0].round == read_metrics(state / "metrics.jsonl")[-1].round


@contextmanager
def silent_judge() -> Iterator[str]:
    """Run a judge that accepts connections and never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a node without a limit of rounds; yield it after its first round."""
    with killed_after(node(tmp_path / "state")) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["round"] == 1
        yield process


def test_rounds_are_recorded_and_resumed_while_the_judge_is_silent(tmp_path: Path) -> None:
    first = join(tmp_path, "--rounds", "3", "--json")
    assert first.returncode == 0, first.stderr
    lines = [json.loads(line) for line in first.stdout.splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert [{k: v for k, v in line.items() if k != "schema"} for line in lines] == to_builtins(
        read_metrics(tmp_path / "metrics.jsonl")
    )
    assert set(lines[0]["seconds"]) == {"generate", "score", "share", "collect", "train", "checkpoint"}

    with silent_judge() as judge:
        second = join(tmp_path, "--rounds", "5", "--json", "--judge", judge, **checkpoints(every=0))
    assert second.returncode == 0, second.stderr
    assert "resumed after round 3" in second.stderr
    # The silent judge delays nothing.
    assert [json.loads(line)["judge"] for line in second.stdout.splitlines()] == [None] * 2
    assert [line.round for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert saved_all(tmp_path)


def test_commands_reach_a_running_node_and_a_killed_trainer_is_restarted(
    running: subprocess.Popen[str], tmp_path: Path
) -> None:
    state = ("--state-dir", str(tmp_path / "state"))
    # A round may end before the node listens.
    until(tmp_path / "state", lambda s: bool(s["addresses"]), running)
    status = json.loads(swarmd("status", "--json", *state).stdout)
    assert (
        status["schema"] == 1
        and status["state"] == "training"
        and status["round"] >= 1
        and status["peer_id"].startswith("12D3Koo")
    )
    assert status["addresses"] and all(address.endswith(status["peer_id"]) for address in status["addresses"])
    assert json.loads(swarmd("peers", "--json", *state).stdout)["peers"] == []

    address = swarmd("ui", "--no-browser", *state).stdout.strip()
    with urllib.request.urlopen(address, timeout=TIMEOUT_S) as page:
        assert page.status == 200 and status["peer_id"] in page.read().decode()
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(address.partition("?")[0], timeout=TIMEOUT_S)

    assert swarmd("pause", *state).returncode == 0
    paused = until(tmp_path / "state", lambda s: s["state"] == "paused", running)
    assert paused["cause"] and "swarmd resume" in paused["remedy"]
    assert swarmd("resume", *state).returncode == 0
    until(tmp_path / "state", lambda s: s["round"] > paused["round"], running)

    second = join(tmp_path / "state", "--rounds", "1")
    assert second.returncode == 5 and "Traceback" not in second.stderr
    assert "another node" in second.stderr and "--state-dir" in second.stderr

    before = control.call(tmp_path / "state", "status", dict)
    os.kill(before["trainer"]["pid"], signal.SIGKILL)
    until(tmp_path / "state", lambda s: s["trainer"]["restarts"] == 1, running)
    after = until(
        tmp_path / "state", lambda s: s["round"] > before["round"] + 1 and s["state"] == "training", running
    )
    assert after["trainer"]["restarts"] == 1 and after["trainer"]["pid"] != before["trainer"]["pid"]
    assert (after["pid"], after["addresses"]) == (
        before["pid"],
        before["addresses"],
    ), "the connection was lost"

    assert swarmd("stop", *state).returncode == 0
    assert running.wait(TIMEOUT_S) == 0 and running.stderr is not None
    said = running.stderr.read().splitlines()
    assert not any("Traceback" in line for line in said)
    # On a busy machine, "loading the network and the questions, for 4 s" comes first.
    first = next(line for line in said if line.startswith("starting: loading PyTorch"))
    assert (
        first
        == "starting: loading PyTorch; wait: usually 2 s, many times that if other programs use all cores"
    )
    told = (
        "stopping: you asked it to: it finishes its round and saves; wait; `swarmd stop --now` cuts the"
        " round; Ctrl-C again saves nothing"
    )
    rounds = read_metrics(tmp_path / "state" / "metrics.jsonl")[-1].round
    assert [line for line in said if line.startswith("stop")] == [
        told,
        f"stopped: {rounds} rounds, saved; `swarmd join` goes on",
    ]
    assert swarmd("status", *state).returncode == 6
    assert saved_all(tmp_path / "state")


def test_a_signal_before_the_first_round_ends_the_node_at_once_with_a_message(tmp_path: Path) -> None:
    with killed_after(node(tmp_path / "state")) as process:
        until(tmp_path / "state", lambda _: True, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0 and process.stderr is not None
        said = [line for line in process.stderr.read().splitlines() if line.startswith("stop")]
    assert said == [
        (
            "stopping: the system or another program asked it to: no round has begun; "
            "wait; `swarmd stop --now` cuts the round; Ctrl-C again saves nothing"
        ),
        "stopped: at once: no round had begun; `swarmd join` goes on from there",
    ]


def test_a_background_node_outlives_its_terminal_and_can_be_stopped_at_once(tmp_path: Path) -> None:
    """The terminal that started the node is closed. `swarmd stop --now` does not wait for a round's end."""
    state = ("--state-dir", str(tmp_path))
    ours, theirs = terminal()
    command = [sys.executable, "-m", "swarmd", "join", *COMMON, *state, "--background"]
    with killed_after(
        subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    ) as starter:
        os.close(theirs)
        said = " ".join(rest_of(ours).split())
        assert starter.wait(TIMEOUT_S) == 0
    assert "The node runs in the background" in said and "swarmd stop --state-dir" in said
    assert "Closing this terminal" not in said and "starting: loading" in said
    status = control.call(tmp_path, "status", dict)
    with ExitStack() as ends:
        # So that a failure of this test leaves no node behind.
        ends.callback(psutil.Process(status["pid"]).kill)
        assert os.getsid(status["pid"]) == status["pid"] != starter.pid
        # The node has no open file of the terminal.
        assert {str(Path(f"/proc/{status['pid']}/fd/{each}").readlink()) for each in range(3)} == {os.devnull}

        second = swarmd("join", *COMMON, *state, "--background")
        assert second.returncode == 5 and f"pid {status['pid']}" in second.stderr
        assert "runs with this state folder already" in second.stderr

        begun = time.monotonic()
        stopped = swarmd("stop", "--now", *state)
        assert stopped.returncode == 0 and "loses the unfinished one" in stopped.stderr
        assert time.monotonic() - begun < 60
        assert saved_all(tmp_path)
        ends.pop_all()


def test_a_background_node_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    for words, code in (
        (("--local", "-1"), 2),
        (("--model", str(tmp_path / "weights")), 3),
    ):
        done = join(tmp_path / "state", "--background", *words)
        alone = join(tmp_path / "state", *words)
        assert (done.returncode, done.stderr) == (alone.returncode, alone.stderr)
        assert done.returncode in (2, code) and done.stderr
    json_too = join(tmp_path / "state", "--background", "--json", "--rounds", "1")
    assert json_too.returncode == 0 and json.loads(json_too.stdout)["pid"] > 0


def test_joining_on_a_port_in_use_gives_a_message_with_the_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        done = swarmd(
            "join", "--model", "tiny", "--listen", address, "--state-dir", str(tmp_path), "--rounds", "1"
        )
    assert (
        done.returncode in (2, 4)
        and "port" in done.stderr
        and "swarm.listen" in done.stderr
        and "Traceback" not in done.stderr
    )


def mounted(folder: Path, megabytes: int) -> bool:
    """Mount a small separate disk, if the user may do so."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "tmpfs", str(folder)],
        capture_output=True,
    )
    return done.returncode == 0


def test_a_full_disk_pauses_the_node_until_there_is_space(tmp_path: Path) -> None:
    state = tmp_path / "state"
    if os.geteuid() != 0 or not mounted(state, 64):
        pytest.skip("needs root, to mount a small disk")
    try:
        with killed_after(node(state)) as process:
            assert process.stdout is not None and process.stderr is not None
            json.loads(process.stdout.readline())
            # Read the pipes, because a full pipe would stop the node.
            for pipe in (process.stdout, process.stderr):
                threading.Thread(target=pipe.read, daemon=True).start()
            with (
                (state / "ballast").open("wb", buffering=0) as ballast,
                pytest.raises(OSError, match="No space left"),
            ):
                while True:
                    ballast.write(bytes(1 << 16))
            status = until(state, lambda s: s["state"] == "paused", process)
            assert "space" in status["cause"] + status["remedy"]
            (state / "ballast").unlink()
            until(state, lambda s: s["state"] == "training", process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
        found = Checkpoints(state / "checkpoints").newest()
        rounds = [line.round for line in read_metrics(state / "metrics.jsonl")]
        assert found is not None and found[0].round == rounds[-1] and found[2] == []
        assert rounds == list(range(1, len(rounds) + 1))
    finally:
        subprocess.run(["umount", "-l", str(state)], check=False)


def test_a_disk_that_is_full_at_the_start_gives_a_message_at_once(tmp_path: Path) -> None:
    state = tmp_path / "state"
    if os.geteuid() != 0 or not mounted(state, 8):
        pytest.skip("needs root, to mount a small disk")
    try:
        done = join(state, "--rounds", "1")
    finally:
        subprocess.run(["umount", "-l", str(state)], check=False)
    assert (
        done.returncode == 2 and "the disk has 8 MB free, and a node needs 24 MB at least" in done.stderr
    ), done.stderr
    assert "Traceback" not in done.stderr and "round 1" not in done.stderr


def test_large_sets_are_offered_and_fetched_and_a_signal_saves(tmp_path: Path) -> None:
    """Sixty-four completions of each of four questions take about 3 KB.

    Each node trains on rollouts that it fetched from the other.
    """
    engines = ("libp2p", "libp2p" if p2pd_missing() else "hivemind")
    nodes: list[subprocess.Popen[str]] = []
    bootstrap: list[str] = []
    try:
        for number, engine in enumerate(engines):
            state = tmp_path / str(number)
            config = tmp_path / f"{number}.toml"
            config.write_text(f'[round]\ncompletions = 64\n[swarm]\nengine = "{engine}"\n')
            command = [
                sys.executable,
                "-m",
                "swarmd",
                "join",
                *COMMON,
                "--state-dir",
                str(state),
                "--config",
                str(config),
                *bootstrap,
            ]
            # With the same seed both nodes would have the same rollouts, and none would be fetched.
            command += ["--seed", str(number)]
            nodes.append(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
            )
            status = until(state, lambda status: bool(status["addresses"]), nodes[-1])
            bootstrap = ["--bootstrap", status["addresses"][0]]
        for number, node in enumerate(nodes):
            state = tmp_path / str(number)
            until(state, lambda status: bool(status["last"]) and status["last"]["external"] > 0, node)
            # Only sets that do not fit into a frame are fetched.
            status = until(state, lambda status: status["exchange"]["fetched"] > 0, node)
            assert status["exchange"]["bytes_in"] > 0
        for node, way in zip(nodes, (signal.SIGTERM, signal.SIGINT), strict=True):
            node.send_signal(way)
        assert [node.wait(TIMEOUT_S) for node in nodes] == [0, 130]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    for number in range(len(engines)):
        log = (tmp_path / str(number) / "swarmd.log").read_text()
        assert "Traceback" not in log and saved_all(tmp_path / str(number))
