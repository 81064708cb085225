"""A person at a terminal and a rule-based program share with a node that trains.

All are real processes on loopback.
"""

import codecs
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio

from p2p.topic import Topic
from p2p.types import Reason
from swarmd.config.config import NodeConfig
from swarmd.daemon.local_api import control
from swarmd.exchange.swarm_id import swarm_digest
from swarmd.library import network
from swarmd.library.joined_swarm import JoinedSwarm
from swarmd.state.folder import StateFolder, in_use
from swarmd.state.metrics import read_metrics
from swarmd.tasks.curriculum import TINY_9
from swarmd.terminal import ended_by_signals
from tests.doubles import TIMEOUT_S
from tests.doubles import until as waited
from tests.p2p.real import real_member
from tests.packaging.checkout import ROOT
from tests.processes import wait_until
from tests.swarm.test_meeting import started
from tests.swarm.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.net]

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ENGINE = {"SWARMD_SWARM_ENGINE": "libp2p"}


class Learner(NamedTuple):
    """A node with default settings, but without the gate.

    So it trains on right answers even if they are very different from its own.
    """

    state: Path
    process: "subprocess.Popen[str]"
    address: str

    def says(self, operation: str) -> dict[str, Any]:
        return control.call(self.state, operation, dict, timeout=TIMEOUT_S)

    def peer(self, peer_id: str) -> dict[str, Any]:
        """Return the node's information about one peer."""
        return next(
            (row for row in self.says("peers")["peers"] if row["id"] == peer_id), {"frames": 0, "model": None}
        )

    def trained_on(self) -> int:
        """Return the number of external rollouts that were trained on in all rounds so far."""
        return sum(line.external for line in read_metrics(self.state / "metrics.jsonl"))


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learner]:
    with ExitStack() as stack:
        state = tmp_path_factory.mktemp("learner")
        words = [
            "join",
            "--model",
            "tiny",
            "--device",
            "cpu",
            "--seed",
            "1",
            "--listen",
            LOOPBACK,
            "--pace",
            "0.3",
        ]
        process = started(stack, *words, "--state-dir", str(state), **ENGINE, SWARMD_GATE_MODE="off")
        yield Learner(
            state, process, until(state, lambda status: bool(status["addresses"]), process)["addresses"][0]
        )


class Terminal:
    """A program that runs at a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "swarmd", *words]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=os.environ | ENGINE, text=True
        )
        os.close(theirs)
        # The bytes of a character may arrive in two pieces.
        self._said, self._decoder = "", codecs.getincrementaldecoder("utf-8")()

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Wait until the new output matches the pattern, and return the output up to the end of the match."""
        while (found := re.search(pattern, self._said)) is None:
            assert select.select([self._ours], [], [], TIMEOUT_S)[0], f"no {pattern!r} in {self._said!r}"
            try:
                self._said = (self._said + self._decoder.decode(os.read(self._ours, 4096))).replace(
                    "\r\n", "\n"
                )
            except OSError:  # the program has ended
                raise AssertionError(f"no {pattern!r} in {self._said!r}; {self.said_last()}") from None
        said, self._said = self._said[: found.end()], self._said[found.end() :]
        return said

    def said_last(self) -> str:
        """Return the program's standard error after its end."""
        return self.process.communicate(timeout=TIMEOUT_S)[1]

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._ours)


def test_a_node_trains_on_answers_that_a_person_gives_at_a_terminal(learner: Learner, tmp_path: Path) -> None:
    before = learner.trained_on()
    words = [
        "--curriculum",
        "tiny-9",
        "--specialty",
        "basic_arithmetic",
        "--listen",
        LOOPBACK,
        "--bootstrap",
        learner.address,
    ]
    with Terminal("answer", *words, "--seed", "1", "--state-dir", str(tmp_path)) as terminal:
        converse(terminal, learner)
        assert (
            "You left: 3 answered, 2 right, 2 shared." in terminal.said_last()
            and terminal.process.returncode == 0
        )
    assert learner.trained_on() >= before + 2


def converse(terminal: Terminal, learner: Learner) -> None:
    before = learner.trained_on()
    me = re.findall(r"12D3Koo\w+", terminal.wait_for("/quit or Ctrl-D"))[0]
    truths = []
    for _ in range(3):
        sum_ = re.findall(r"Calculate (\d+) ([+-]) (\d+)", terminal.wait_for("answer> "))[0]
        truths.append(int(sum_[0]) + int(sum_[1] + sum_[2]))
        if len(truths) == 1:  # first wrong, then right
            terminal.type("/help\n")
            terminal.wait_for("/quit or Ctrl-D: leave.")
            terminal.type("1000\n")
            assert "Not right." in terminal.wait_for("again, 1 left, Enter gives up> ")
            terminal.type(f"a sum: <answer>{truths[-1]}</answer>\n")
        elif len(truths) == 2:  # right at once, on two lines
            terminal.type(f"\\\n{truths[-1]}\n")
        else:
            terminal.type("wrong\n\n")
        terminal.wait_for(f"{'A right answer' if len(truths) == 3 else 'Right'}: {truths[-1]}\n")
    assert "nodes do not learn from wrong answers alone. 3 answered, 2 right, 2 shared." in terminal.wait_for(
        "2 shared."
    )
    # Rollouts that waited for a peer arrive together.
    assert wait_until(lambda: (row := learner.peer(me))["frames"] >= 1 and row)["rejected"] == 0
    until(learner.state, lambda _: learner.trained_on() >= before + 2, learner.process)
    wait_until(lambda: learner.peer(me)["model"] == "a person")
    terminal.wait_for("answer> ")
    terminal.type("/skip\n")
    terminal.wait_for("answer> ")
    terminal.type("\x04")  # Ctrl-D


def test_a_person_plays_an_environment_text_by_text(tmp_path: Path) -> None:
    words = ["--curriculum", "tools-6", "--specialty", "calculator", "--listen", LOOPBACK]
    with Terminal("answer", *words, "--seed", "1", "--state-dir", str(tmp_path)) as terminal:
        terminal.wait_for("/quit or Ctrl-D")
        said = re.findall(r"What is ([-+*0-9]+)\?", terminal.wait_for("answer> "))[0]
        terminal.type(f"<tool>{said}</tool>\n")
        value = re.findall(r"→ (-?\d+)\n", terminal.wait_for("answer> "))[0]
        terminal.type(f"<answer>{value}</answer>\n")
        terminal.wait_for(re.escape(f"Right: <tool>{said}</tool>\n<answer>{value}</answer>"))
        terminal.wait_for("1 answered, 1 right")


def test_the_example_rule_program_joins_as_a_peer(learner: Learner, tmp_path: Path) -> None:
    before = learner.trained_on()
    command = [
        sys.executable,
        str(ROOT / "docs" / "examples" / "rule_peer.py"),
        str(tmp_path),
        learner.address,
    ]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | ENGINE | {"PYTHONPATH": str(ROOT)}) as rule:
        try:
            status = until(tmp_path, lambda status: status["shared"]["rollouts"] >= 3, rule)
            wait_until(lambda: learner.peer(status["peer_id"])["frames"] >= 3)
            until(learner.state, lambda _: learner.trained_on() > before, learner.process)
            row = learner.peer(status["peer_id"])
            assert row["rejected"] == 0
            wait_until(lambda: learner.peer(status["peer_id"])["model"] == "a rule")
            done = subprocess.run(
                [sys.executable, "-m", "swarmd", "stop", "--state-dir", str(tmp_path)],
                capture_output=True,
                text=True,
            )
            assert (done.returncode, rule.wait(TIMEOUT_S)) == (0, 0)
        finally:
            rule.kill()


def test_messages_of_an_unknown_kind_are_counted_in_status_and_metrics(learner: Learner) -> None:
    member = real_member("libp2p", 9, Topic("main", swarm_digest(TINY_9)), bootstrap=[learner.address])
    why = Reason.UNKNOWN_KIND.value

    async def share_images() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(member.run)

            def counted() -> bool:
                member.publish("rollouts-image", os.urandom(100))
                return why in learner.says("status")["rejected"]

            await waited(counted, every=0.5)
            await waited(
                lambda: any(why in line.rejected for line in read_metrics(learner.state / "metrics.jsonl"))
            )
            nursery.cancel_scope.cancel()

    trio.run(share_images)
    assert "update swarmd" in learner.says("status")["advice"][why]


def test_a_signal_during_the_start_ends_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes when the network thread has started, but not yet its event loop."""
    run, before, main = network.run, signal.getsignal(signal.SIGTERM), threading.main_thread().ident
    assert main is not None

    def late(member: Callable[[], Awaitable[None]]) -> None:
        signal.pthread_kill(main, signal.SIGTERM)
        wait_until(lambda: peer._closed)  # the `with` block is being left
        run(member)

    monkeypatch.setattr(network, "run", late)
    swarm = {"engine": "libp2p", "listen": (LOOPBACK,), "mdns": "off", "curriculum": "tiny-9"}
    config = NodeConfig.model_validate({"swarm": swarm})
    peer = JoinedSwarm(config, StateFolder.open(tmp_path), "a rule")
    with pytest.raises(SystemExit), ended_by_signals(), peer.open():
        raise AssertionError("the peer has started despite the signal")
    assert signal.getsignal(signal.SIGTERM) == before and not in_use(tmp_path)
