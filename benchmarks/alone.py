"""Seconds until a node that is alone or beside its twin says why.

Real `swarmd join` processes on loopback, the tiny model.

    python -m benchmarks.alone [CAUSE…] [--json]
    python -m benchmarks.alone --healthy 3600 [--pace 2]

Each cause is brought about, and the time is taken from when it is true and the node answers `swarmd status`,
to when the status names it. --healthy: three nodes for so many seconds, and how often one of them says that
something is wrong. Nothing is right but 0.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarmd.daemon.local_api import control
from swarmd.lab.demo.processes import LocalNode, free_ports, local_judge, local_swarm
from swarmd.state.folder import IDENTITY_FILE

PATIENCE = 120.0  # seconds
OPTIONS = ("--model", "tiny", "--device", "cpu", "--pace", "5")
MODULE = "import runpy, sys; sys.argv[0] = 'swarmd'; runpy.run_module('swarmd', run_name='__main__')"
FAST_CLOCK = f"import time; now = time.time; time.time = lambda: now() + 600; {MODULE}"
OTHER_VERSION = (
    "import importlib.metadata as m; real = m.version; m.version = lambda n: '0.2.0' if n == 'reasoning-gym'"
    " else real(n)"
)
DEAD_KEY = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"

Document = Mapping[str, Any]


def up(node: LocalNode) -> float:
    """Start a node; returns when it answers."""
    return seconds_until(node, lambda _: True)[1]


def seconds_until(node: LocalNode, holds: Callable[[Document], Any]) -> tuple[Any, float]:
    """Wait until the status holds; returns what it says then, and when."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        node.check()
        status = node.status()
        if status is not None and (found := holds(status)):
            return found, time.monotonic()
        time.sleep(0.2)
    raise TimeoutError(f"{node.name} did not say it within {PATIENCE:.0f} s; see {node.log}")


def trouble(words: str) -> Callable[[Document], str | None]:
    return lambda status: cause_with(words, status["trouble"] or {})


def cause_with(words: str, said: Document) -> str | None:
    cause = str(said.get("cause", ""))
    return cause if words in cause else None


def trains(status: Document) -> bool:
    return bool(status["state"] == "training" and status["round"] > 0)


def behind(node: LocalNode, program: str) -> None:
    """Start the node through another program than `python -m swarmd`."""
    node.command = [sys.executable, "-c", program, *node.command[3:]]


Result = tuple[str, float]  # what was said, and after how many seconds
Nodes = Sequence[LocalNode]


def timed(node: LocalNode, holds: Callable[[Document], str | None], since: float | None = None) -> Result:
    """Measure until a status names its cause.

    since: when it became true; by default when the node is up.
    """
    begun = up(node) if since is None else since
    said, at = seconds_until(node, holds)
    return said, at - begun


def nobody(nodes: Nodes, _folder: Path) -> Result:
    nodes[0].start()
    return timed(nodes[0], trouble("you are the first here"))


def dead_address(nodes: Nodes, _folder: Path) -> Result:
    nodes[0].command = [
        *nodes[0].command,
        "--bootstrap",
        f"/ip4/127.0.0.1/tcp/{free_ports(1)[0]}/p2p/{DEAD_KEY}",
    ]
    nodes[0].start()
    return timed(nodes[0], trouble("does not answer"))


def another_curriculum(nodes: Nodes, _folder: Path) -> Result:
    nodes[1].variables = {"SWARMD_SWARM_CURRICULUM": "sapo-9"}
    for node in nodes:
        node.start()
    return timed(nodes[1], trouble("only 1 node of tiny-9, and this node is of sapo-9"))


def another_version(nodes: Nodes, folder: Path) -> Result:
    (folder / "sitecustomize.py").write_text(OTHER_VERSION)
    nodes[1].variables |= {"PYTHONPATH": os.pathsep.join([str(folder), str(Path.cwd())])}
    for node in nodes:
        node.start()
    return timed(nodes[0], trouble("1 node of tiny-9 with swarmd"))


def clock_off(nodes: Nodes, _folder: Path) -> Result:
    behind(nodes[2], FAST_CLOCK)
    for node in nodes:
        node.start()
    return timed(nodes[2], trouble("this machine's clock is 10 minutes ahead of all 2 peers"))


def twins(nodes: Nodes, _folder: Path) -> Result:
    """Give nodes[2] the key of nodes[1], which runs already. The slower of the two counts."""
    shutil.copy(nodes[1].folder / IDENTITY_FILE, nodes[2].folder / IDENTITY_FILE)
    for node in nodes[:2]:
        node.start()
    seconds_until(nodes[1], lambda status: status["peers"])
    nodes[2].start()
    since = up(nodes[2])
    said, later = timed(nodes[2], trouble("it started earlier"), since)
    return said, max(later, timed(nodes[1], trouble("it started later"), since)[1])


def other_judge(nodes: Nodes, folder: Path) -> Result:
    with local_judge(folder, "sapo-9") as url:
        nodes[0].command = [*nodes[0].command, "--judge", url]
        nodes[0].start()
        return timed(nodes[0], lambda status: cause_with("asks sapo-9", status["judge"]))


def paused(nodes: Nodes, _folder: Path) -> Result:
    nodes[0].start()
    seconds_until(nodes[0], trains)
    control.call(nodes[0].folder, "pause")
    nodes[1].start()
    return timed(nodes[1], trouble("1 node connected, and paused"))


def left(nodes: Nodes, _folder: Path) -> Result:
    """Kill a node with SIGKILL; the others then say that they are alone."""
    for node in nodes:
        node.start()
    seconds_until(nodes[1], lambda status: status["peers"])
    nodes[0].kill()
    since = time.monotonic()
    _, gone = timed(nodes[1], lambda status: "gone" if not status["peers"] else None, since)
    said, alone = timed(nodes[1], trouble("does not answer"), since)
    return f"gone from peers after {gone:.1f} s; {said}", alone


CAUSES: Mapping[str, tuple[int, Callable[[Nodes, Path], Result]]] = {  # and how many nodes it takes
    "nobody": (1, nobody),
    "dead-address": (1, dead_address),
    "another-curriculum": (2, another_curriculum),
    "another-version": (2, another_version),
    "clock": (3, clock_off),
    "twins": (3, twins),
    "judge": (1, other_judge),
    "paused": (2, paused),
    "left": (2, left),
}


def bring_about(cause: str, folder: Path) -> Result:
    count, scenario = CAUSES[cause]
    with local_swarm(folder, count, OPTIONS, {"SWARMD_SWARM_MDNS": "off"}) as nodes:
        for node in nodes:
            node.variables = dict(node.variables)
        return scenario(nodes, folder)


def healthy(seconds: float, pace: float, folder: Path) -> dict[str, Any]:
    """Run three nodes of one swarm, and count how often one reports trouble after all have met."""
    with local_swarm(folder, 3, [*OPTIONS[:4], "--pace", str(pace)], {"SWARMD_SWARM_MDNS": "off"}) as nodes:
        for node in nodes:
            node.start()
        for node in nodes:
            seconds_until(node, lambda status: status["connected"] == 2)
        begun, alarms, asked = time.monotonic(), list[str](), 0
        while (now := time.monotonic() - begun) < seconds:
            for node in nodes:
                node.check()
                if (status := node.status()) is not None:
                    asked += 1
                    if status["trouble"]:
                        alarms.append(f"{now:.0f} s, {node.name}: {status['trouble']}")
            time.sleep(1.0)
        last = [node.status() or {} for node in nodes]
        logged = [
            line
            for node in nodes
            for line in (node.folder / "swarmd.log").read_text().splitlines()
            if "isolation_watch" in line
        ]
    return {
        "seconds": now,
        "asked": asked,
        "alarms": alarms,
        "logged": logged,
        "rounds": [status.get("round") for status in last],
        "given": [status.get("given") for status in last],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.alone", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("causes", nargs="*", metavar="CAUSE", help=", ".join(CAUSES))
    parser.add_argument("--healthy", type=float, default=0.0, help="seconds")
    parser.add_argument("--pace", type=float, default=2.0, help="seconds a round, with --healthy")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if options.healthy:
            print(json.dumps(healthy(options.healthy, options.pace, Path(place)), indent=2))
            return
        for cause in options.causes or CAUSES:
            folder = Path(place) / cause
            folder.mkdir()
            said, seconds = bring_about(cause, folder)
            line = json.dumps({"cause": cause, "seconds": round(seconds, 1), "said": said})
            print(line if options.json else f"{cause:<20} {seconds:5.1f} s  {said}", flush=True)


if __name__ == "__main__":
    main()
