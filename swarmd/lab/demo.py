"""`swarmd demo`: a whole swarm on this machine. Real processes, real libp2p on loopback, a real judge, and one node killed halfway."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import httpx2
from rich.console import Console
from rich.live import Live
from rich.table import Table

from p2p.identity import Identity, nickname
from swarmd.errors import SwarmdError
from swarmd.lab.figures import Curve, draw_rewards
from swarmd.state_folder import IDENTITY_FILE
from swarmd.telemetry import read_metrics

PACE = 1.5  # seconds a round takes at least, so that the others are still there when the killed node is back
PATIENCE = 90.0  # seconds without any node finishing a round before the demo gives up
LOOK = 0.25  # seconds between two looks


class DemoFailed(SwarmdError):
    """The demo could not be finished."""

    exit_code = 1


@dataclass
class DemoNode:
    """One `swarmd join` of the demo."""

    number: int
    folder: Path
    command: Sequence[str]
    peer_id: str
    process: subprocess.Popen[bytes] | None = None
    lost_at: int | None = None  # the round after which it was killed
    rejoined: bool = False
    lines: Sequence[Mapping[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return nickname(self.peer_id)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        with (self.folder / "node.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )

    def look(self) -> None:
        """Read its metrics; a node that ended badly ends the demo."""
        self.lines = read_metrics(self.folder / "metrics.jsonl")
        if self.process is not None and self.process.poll() not in (None, 0):
            raise DemoFailed(f"{self.name} ended with status {self.process.returncode}; see {self.folder / 'node.log'}")

    def lose(self) -> None:
        """SIGKILL, as when the power goes, and a new start on the same folder."""
        assert self.process is not None
        self.lost_at = self.lines[-1]["round"]
        self.process.kill()
        self.process.wait()
        self.start()

    def summary(self) -> dict[str, Any]:
        rewards = [line["reward_mean"] for line in self.lines]
        window = max(1, min(10, len(rewards) // 3))
        return {
            "peer_id": self.peer_id,
            "rounds": len(self.lines),
            "external_trained": sum(line["external"] for line in self.lines),
            "rejoined": self.rejoined,
            "reward_first": sum(rewards[:window]) / window,
            "reward_last": sum(rewards[-window:]) / window,
            "state_dir": str(self.folder),
        }


def run(nodes: int = 3, rounds: int = 30, out: Path | None = None, json_output: bool = False) -> int:
    """Run it, and print the table (or with `json_output` one JSON object on the last line of standard output)."""
    if nodes < 1 or rounds < 2:
        raise SwarmdError("a demo needs at least 1 node and 2 rounds")
    folder = (out or Path(f"demo-{datetime.now():%Y%m%d-%H%M%S}")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    talk = Console(stderr=True)
    talk.print(f"{nodes} nodes and a judge on this machine, {rounds} rounds each; everything is kept in {folder}")
    with _judge(folder) as judge_url, _swarm(folder, nodes, rounds, judge_url) as swarm:
        _watch(swarm, rounds, talk)
        evaluations = _evaluations(judge_url)
        figure = folder / "rewards.png"
        draw_rewards(
            [Curve(node.name, node.lines, node.lost_at) for node in swarm], figure, f"{nodes} nodes sharing experience, tiny model, tiny-9"
        )
    summaries = [node.summary() for node in swarm]
    if json_output:
        document = {"schema": 1, "nodes": summaries, "judge": {"url": judge_url, "evaluations": evaluations}, "figures": [str(figure)]}
        print(json.dumps(document))
    else:
        Console().print(_table(swarm, summaries))
        print(f"The judge asked {evaluations} questions. Reward curves: {figure}")
    return 0


@contextlib.contextmanager
def _judge(folder: Path) -> Iterator[str]:
    """A judge on loopback; gives its URL."""
    command = [sys.executable, "-m", "judge.cli", "serve", "--host", "127.0.0.1", "--port", "0", "--curriculum", "tiny-9"]
    command += ["--database", str(folder / "judge.sqlite"), "--json"]
    with (folder / "judge.log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        yield _url(process.stdout, folder)
    finally:
        _end(process)


def _url(output: IO[bytes], folder: Path) -> str:
    line = output.readline()
    try:
        return str(json.loads(line)["url"])
    except (ValueError, KeyError, TypeError):
        raise DemoFailed(f"the judge did not start; see {folder / 'judge.log'}") from None


@contextlib.contextmanager
def _swarm(folder: Path, nodes: int, rounds: int, judge_url: str) -> Iterator[list[DemoNode]]:
    """The nodes, started. Keys are made first, so that each can be given the addresses of all."""
    name = f"demo-{secrets.token_hex(4)}"  # two demos on one machine are two swarms
    folders = [folder / f"node-{number}" for number in range(1, nodes + 1)]
    for path in folders:
        path.mkdir(mode=0o700, exist_ok=True)
    identities = [Identity.load_or_create(path / IDENTITY_FILE) for path in folders]
    addresses = [f"/ip4/127.0.0.1/tcp/{port}" for port in _free_ports(nodes)]
    dialable = [f"{address}/p2p/{identity.peer_id}" for address, identity in zip(addresses, identities, strict=True)]
    swarm = []
    for number, (path, identity, address) in enumerate(zip(folders, identities, addresses, strict=True), start=1):
        command = [sys.executable, "-m", "swarmd", "join", "--model", "tiny", "--swarm", name, "--listen", address]
        command += ["--judge", judge_url, "--rounds", str(rounds), "--pace", str(PACE), "--seed", str(number), "--state-dir", str(path)]
        for other in dialable:
            if not other.startswith(address):
                command += ["--bootstrap", other]
        swarm.append(DemoNode(number, path, command, identity.peer_id))
    try:
        for node in swarm:
            node.start()
        yield swarm
    finally:
        for node in swarm:
            if node.process is not None:
                _end(node.process)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _watch(swarm: list[DemoNode], rounds: int, talk: Console) -> None:
    """Until every node has done its rounds. Halfway, one is killed and started again."""
    victim = swarm[-1]
    done, since = -1, time.monotonic()
    with Live(console=talk, auto_refresh=False, transient=not talk.is_terminal) as live:
        while any(node.running for node in swarm):
            time.sleep(LOOK)
            for node in swarm:
                node.look()
            if victim.lost_at is None and victim.lines and victim.lines[-1]["round"] >= rounds // 2:
                victim.lose()
                talk.print(f"killed {victim.name} after its round {victim.lost_at} with SIGKILL, and started it again")
            elif victim.lost_at is not None and not victim.rejoined and any(n["round"] > victim.lost_at for n in victim.lines):
                victim.rejoined = True
                talk.print(f"{victim.name} is back, as itself, with nothing lost but the round it was in")
            total = sum(len(node.lines) for node in swarm)
            if total != done:
                done, since = total, time.monotonic()
                _show(live, talk, swarm, rounds)
            elif time.monotonic() - since > PATIENCE:
                raise DemoFailed(f"no node has finished a round for {PATIENCE:.0f} s; see the logs in {victim.folder.parent}")
        for node in swarm:
            node.look()


def _show(live: Live, talk: Console, swarm: list[DemoNode], rounds: int) -> None:
    if talk.is_terminal:
        live.update(_table(swarm, [node.summary() for node in swarm], rounds), refresh=True)
    elif all(node.lines for node in swarm):
        slowest = min(len(node.lines) for node in swarm)
        if slowest % 5 == 0:
            talk.print("  ".join(f"{node.name} {len(node.lines)}/{rounds} reward {node.lines[-1]['reward_mean']:.2f}" for node in swarm))


def _table(swarm: list[DemoNode], summaries: Sequence[Mapping[str, Any]], rounds: int | None = None) -> Table:
    table = Table(title="the demo swarm", title_justify="left")
    for heading, justify in (
        ("node", "left"), ("peer id", "left"), ("rounds", "right"), ("peers", "right"), ("external trained", "right"),
        ("reward, first", "right"), ("reward, last", "right"), ("judge pass@1 (n)", "right"), ("killed", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify="right" if justify == "right" else "left")
    for node, summary in zip(swarm, summaries, strict=True):
        last = node.lines[-1] if node.lines else {}
        judged = last.get("judge")
        table.add_row(
            node.name,
            "…" + node.peer_id[-6:],
            str(summary["rounds"]) + (f"/{rounds}" if rounds else ""),
            str(last.get("peers", "")),
            str(summary["external_trained"]),
            f"{summary['reward_first']:.3f}",
            f"{summary['reward_last']:.3f}",
            f"{judged['score']:.2f} ({judged['n']})" if judged else "",
            "" if node.lost_at is None else f"after {node.lost_at}, {'rejoined' if node.rejoined else 'starting again'}",
        )
    return table


def _evaluations(judge_url: str) -> int:
    board = httpx2.get(f"{judge_url}/v1/leaderboard", timeout=10).json()
    return sum(int(row["n"]) for row in board["peers"])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Politely, then not."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
