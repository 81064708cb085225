"""Measures how much a program's training loop slows down while hostile peers attack its swarm.

python -m tests.attacks.hostile_loop [--seconds 30] [--through-node] [ATTACK…]

The loop trains tiny-latent on one torch thread; at each step it shares a group and collects groups (`import
swarmd`). An honest member shares, too. `clock` and `thread` are the increase of a step's time over the time
before the attack, as shares: of wall time, and of CPU time of the loop's thread. `core` is the CPU share of
the swarm's two threads before, during and after the attack. Python runs one thread at a time, so on an idle
machine the loop loses at most the difference in `core`. On a busy machine, `clock` also shows the load of
other programs.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import swarmd
from p2p.types import PeerId
from swarmd.daemon.local_api import control
from swarmd.exchange import wire
from swarmd.policy.models.tiny import WEIGHTS
from swarmd.state.status import Status
from swarmd.types import Rollout
from testbed import ROOT
from testbed.hostile_answers import CODE, DEEP, SLOW
from tests.attacks.nodes import attacker

FLOODS: dict[str, tuple[str, dict[str, str | float]]] = {
    "flooder": ("flooding", {"kind": "frames"}),
    "new-keys": ("flooding", {"kind": "frames", "redial": "fresh"}),
    "crowder": ("deafening", {"skew": 0, "rate": 400, "connections": 5, "seconds": 3600}),
}
# Members that share rollouts that an honest member would not share.
MEMBERS = ("malformed", "plagiarist")
WARM_STEPS = 20
Join = Callable[[Path], AbstractContextManager[swarmd.JoinedSwarm]]


def joined(folder: Path, *bootstrap: str) -> swarmd.JoinedSwarm:
    return swarmd.join(
        name="loop",
        curriculum="tiny-9",
        listen=["/ip4/127.0.0.1/tcp/0"],
        bootstrap=bootstrap,
        folder=folder,
        external=8,
    )


def share(swarm: swarmd.JoinedSwarm) -> None:
    (task,) = swarm.tasks.draw()
    swarm.share(task, [f"<answer>{swarm.tasks.truth(task)}</answer>", *["<answer>no</answer>"] * 7])


def member(kind: str, folder: Path, address: str) -> None:
    """Run another member of the swarm until the process is killed."""
    swarm = joined(folder, address)
    network = swarm.network
    assert network is not None
    publish = partial(network._soon, network._swarm.member.publish)
    me = PeerId(str(swarm.report()["peer_id"]))
    texts = [swarmd.Completion(f"<answer>{text}</answer>", True) for text in [*CODE, *SLOW[:2], *DEEP]]
    for number in itertools.count(1):
        time.sleep(0.5 if kind == "honest" else 0.05)
        if kind == "honest":
            share(swarm)
        elif kind == "plagiarist":
            for group in swarm.collect(8):
                copied = Rollout(group.ref, group.completions, me)
                publish(wire.KIND, wire.encode([copied], number, "copied"))
        else:
            (task,) = swarm.tasks.draw()
            publish(wire.KIND, os.urandom(500))
            publish(wire.KIND, wire.encode([Rollout(task.ref, tuple(texts[:8]), me)], number, "bad"))
            publish(f"{wire.KIND}-image", os.urandom(500))


class Loop:
    """A training loop with a swarm in it."""

    def __init__(self, swarm: swarmd.JoinedSwarm) -> None:
        torch.set_num_threads(1)
        self._swarm = swarm
        self._model = AutoModelForCausalLM.from_pretrained(WEIGHTS["tiny-latent"], dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5)
        self._ids = torch.randint(0, 100, (16, 48))
        self.collected = 0

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._ids, labels=self._ids).loss.backward()
        self._optimizer.step()
        share(self._swarm)
        self.collected += len(self._swarm.collect(4))

    def run(self, seconds: float) -> tuple[float, float, float]:
        """Return a step's median wall time, its CPU time, and the CPU share of the other threads."""
        times, thread, program = list[float](), time.thread_time(), time.process_time()
        while sum(times) < seconds:
            begun = time.monotonic()
            self.step()
            times.append(time.monotonic() - begun)
        thread, program = time.thread_time() - thread, time.process_time() - program
        return statistics.median(times), thread / len(times), (program - thread) / sum(times)


def started(command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a program with its temporary files in the folder, because it is killed before removing them."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@contextmanager
def through_node(folder: Path) -> Iterator[swarmd.JoinedSwarm]:
    """Join through a node in a separate process."""
    words = ["join", "--swarm", "loop", "--curriculum", "tiny-9", "--model", "tiny", "--device", "cpu"]
    words += ["--pace", "5", "--listen", "/ip4/127.0.0.1/tcp/0", "--state-dir", str(folder)]
    command = [sys.executable, "-m", "swarmd", *words]
    with started(command, folder.parent) as node:
        try:
            while not _listens(folder):
                time.sleep(0.5)
            with swarmd.join(folder=folder) as swarm:
                yield swarm
        finally:
            node.kill()


def _listens(folder: Path) -> bool:
    try:
        return bool(control.call(folder, "status", Status).addresses)
    except swarmd.errors.SwarmdError:
        return False


@contextmanager
def other_member(kind: str, folder: Path, address: str) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.attacks.hostile_loop", "--member", kind, str(folder), address]
    with started(command, folder.parent) as process:
        try:
            yield
        finally:
            process.kill()


def measure(name: str, seconds: float, join: Join) -> dict[str, Any]:
    """Play one attack, and return the increase of a step's time as shares, and other figures."""
    with (
        tempfile.TemporaryDirectory() as folder,
        join(Path(folder) / "loop") as swarm,
        ExitStack() as stack,
    ):
        report = swarm.report()
        address = report["addresses"][0]
        stack.enter_context(other_member("honest", Path(folder) / "honest", address))
        loop = Loop(swarm)
        while loop.collected < 1:
            loop.step()
        for _ in range(WARM_STEPS):
            loop.step()
        before = loop.run(seconds)
        with ExitStack() as hostile:
            if name in FLOODS:
                module, options = FLOODS[name]
                of: dict[str, str | float] = {"swarm": "loop", "seconds": 3600.0, **options}
                flood = attacker(hostile, Path(folder), module, [address], report["swarm"]["digest"], **of)
                flood.wait_for("ready", 1, 300.0)
            elif name in MEMBERS:
                hostile.enter_context(other_member(name, Path(folder) / name, address))
                while swarm.report()["connected"] < 2:
                    loop.step()
            had, collected = sum(report["rejected"].values()), loop.collected
            during = loop.run(seconds)
            refused = sum(swarm.report()["rejected"].values()) - had
            collected = loop.collected - collected
        after = loop.run(seconds)
        assert swarm.joined
    clock, thread = (round(during[n] / before[n] - 1, 4) for n in (0, 1))
    core = [round(of[2], 4) for of in (before, during, after)]
    found = {"clock": clock, "thread": thread, "core": core, "step_s": round(before[0], 3)}
    return found | {"refused": refused, "collected": collected}


def main() -> None:
    if sys.argv[1:2] == ["--member"]:
        kind, folder, address = sys.argv[2:]
        member(kind, Path(folder), address)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*FLOODS, *MEMBERS, "none"]
    parser.add_argument(
        "attacks", nargs="*", metavar="ATTACK", help=f"attacks to play, of {', '.join(names)}; default: all"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="seconds to measure before, during and after each attack"
    )
    parser.add_argument(
        "--through-node", action="store_true", help="join the swarm through a node in a separate process"
    )
    given = parser.parse_args()
    join: Join = through_node if given.through_node else joined
    os.environ["SWARMD_SWARM_MDNS"] = "off"
    for name in given.attacks or names:
        print(name, measure(name, given.seconds, join), flush=True)


if __name__ == "__main__":
    main()
