"""Measures a node that is limited as a guest: how soon it pauses, and the share of the CPU that it uses.

    python -m benchmarks.node.guest stops [--times 200]
    python -m benchmarks.node.guest share [--cpu "25 %"] [--seconds 300]

stops   a real trainer is paused and resumed; seconds from the decision until the trainer is idle
share   a real node with a CPU limit; CPU seconds of all its processes, as the kernel counts them
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
import trio

from p2p.engines.traffic import Traffic
from p2p.member import Member
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.daemon.guest.conditions import MachineFacts
from swarmd.daemon.guest.guest import Guest
from swarmd.daemon.local_api.control import call
from swarmd.daemon.supervision.trainer_process import TrainerChild
from swarmd.errors import SwarmdError
from swarmd.exchange.swarm_id import curriculum_of
from swarmd.state.status import Status


class NoSwarm(Member):
    """A member without a network."""

    def __init__(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def come_back(self) -> None:
        pass


async def stops(times: int, folder: Path) -> dict[str, object]:
    config = NodeConfig.model_validate({"swarm": {"engine": "none"}, "limits": {"priority": "normal"}})
    said, states = trio.open_memory_channel[str](math.inf)
    rounds = 0

    def on_message(message: link.ToDaemon) -> None:
        nonlocal rounds
        if isinstance(message, link.TrainerState):
            said.send_nowait(message.state)
        rounds += isinstance(message, link.RoundDone)

    async def until(state: str) -> float:
        begun = time.monotonic()
        while await states.receive() != state:
            pass
        return time.monotonic() - begun

    start = link.StartTrainer(
        config.model_dump_json(), str(folder), "12D3KooWbenchmark", 1, curriculum_of(config).digest
    )
    child = TrainerChild(start, folder / "trainer.log", on_message, print)
    guest = Guest(config, folder, Traffic(), NoSwarm(), child.tell, print, measure=lambda *_: MachineFacts())
    seconds: list[float] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(child.run)
        await until("training")
        for number in range(times):
            await trio.sleep(0.05 * (number % 7))  # so that pauses come at different moments of a round
            guest.decide(MachineFacts(on_battery=True))
            seconds.append(await until("paused"))
            guest.decide(MachineFacts(on_battery=False))
            await until("training")
        child.stop()
    lines = len((folder / "metrics.jsonl").read_text().splitlines())
    return {
        "times": times,
        "median": median(seconds),
        "worst": max(seconds),
        "rounds": rounds,
        "lines": lines,
        "restarts": child.restarts,
    }


def share(cpu: str, seconds: float, folder: Path) -> dict[str, object]:
    command = [
        sys.executable,
        "-m",
        "swarmd",
        "join",
        "--model",
        "tiny",
        "--device",
        "cpu",
        "--state-dir",
        str(folder),
    ]
    environment = os.environ | {
        "SWARMD_LIMITS_CPU": cpu,
        "SWARMD_LIMITS_PRIORITY": "normal",
        "SWARMD_SWARM_MDNS": "off",
    }
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as node:
        try:
            begin = _first_round(folder)
            before, at = _spent(node.pid), time.monotonic()
            time.sleep(seconds)
            used, passed = _spent(node.pid) - before, time.monotonic() - at
            end = call(folder, "status", Status)
        finally:
            node.send_signal(signal.SIGINT)
    cores = psutil.cpu_count() or 1
    return {
        "cpu": cpu,
        "seconds": passed,
        "cores": cores,
        "share": used / passed / cores,
        "rounds": end.round - begin,
        "ledger": end.usage.total.cpu_seconds if end.usage else None,
    }


def _first_round(folder: Path) -> int:
    while True:
        try:
            if (done := call(folder, "status", Status).round) > 0:
                return done
        except SwarmdError:  # the node is starting
            pass
        time.sleep(0.5)


def _spent(pid: int) -> float:
    """Return the CPU seconds so far of a process and all its descendants.

    Children that have ended are included.
    """
    node, found = psutil.Process(pid), 0.0
    for process in [*node.children(recursive=True), node]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended; its parent's time includes it
            found += sum(process.cpu_times()[:4])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("stops").add_argument("--times", type=int, default=200)
    sharing = commands.add_parser("share")
    sharing.add_argument("--cpu", default="25 %")
    sharing.add_argument("--seconds", type=float, default=300.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = (
            trio.run(stops, given.times, Path(folder))
            if given.what == "stops"
            else share(given.cpu, given.seconds, Path(folder))
        )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
