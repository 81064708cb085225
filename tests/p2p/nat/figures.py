"""Nodes in the NAT lab; as a program, it measures figures that take too long for a test.

python -m tests.p2p.nat.figures punch --observers 3     time until two homes meet by relay, and directly
python -m tests.p2p.nat.figures partition --seconds 60  time until a swarm reconnects after a cut
"""

import argparse
import json
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from testbed.probe_process import ProbeProcess
from tests.doubles import TIMEOUT_S
from tests.p2p.nat.lab import BootstrapProcess, Lab, Place

SECONDS = TIMEOUT_S
PORT = 4001
CARRIERS = {"none": (None, None), "one": (20, None), "two": (20, 21), "same": (20, 20)}  # of both homes


class Net:
    """A lab with a bootstrap node at 11.0.0.1, and the programs that run in it."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self.lab = stack.enter_context(Lab(folder))
        self.hub = self.lab.public(1)

    def bootstrap(self, engine: str) -> BootstrapProcess:
        self.boot = self._stack.enter_context(BootstrapProcess(self.hub, self._folder / "bootstrap", engine))
        return self.boot

    def probe(self, place: Place, engine: str) -> ProbeProcess:
        name, digest = self.boot.topic.split("/")[3:5]
        return self._stack.enter_context(
            ProbeProcess(
                self._folder / place.name,
                listen=f"/ip4/0.0.0.0/tcp/{PORT},/ip6/::/tcp/{PORT}",
                bootstrap=self.boot.addresses,
                digest=digest,
                engine=engine,
                more=["--swarm", name],
                python=place.python,
            )
        )

    def doctor(self, place: Place, *options: str) -> dict[str, Any]:
        said = place.run("swarmd", "doctor", "network", "--json", *options)
        assert said.returncode == 0, said.stderr + said.stdout
        found: dict[str, Any] = json.loads(said.stdout)
        return found


def exchange(probes: list[ProbeProcess], count: int, every: float = 0.25, size: int = 16 * 1024) -> float:
    """Let all probes publish `count` frames; return the seconds until each has heard all of them."""
    heard = [len(probe.said("got")) for probe in probes]
    since = time.monotonic()
    for probe in probes:
        probe.order(publish=size, count=count, every=every)
    for probe, before in zip(probes, heard, strict=True):
        probe.wait_for_frames(before + count * (len(probes) - 1), SECONDS)
    return time.monotonic() - since


def obtain(
    probe: ProbeProcess, held: dict[str, Any], holders: list[str], seconds: float = 5.0
) -> dict[str, Any]:
    before = len(probe.said("fetched"))
    probe.order(fetch=held["held"], size=held["size"], holders=holders, seconds=seconds)
    return dict(probe.wait(lambda: len(probe.said("fetched")) > before and probe.last("fetched"), SECONDS))


def fresh(probe: ProbeProcess, since: float) -> set[str]:
    """Return the authors of frames that the probe heard and that were sent after `since`."""
    return {got["author"] for got in probe.said("got") if got["at"] - got["delay"] > since}


def cut_and_heal(net: Net, seconds: float) -> tuple[float, float]:
    """Cut a swarm of six nodes with both engines into two halves, and heal the cut.

    Return the seconds from the healing until all nodes hear each other, and the seconds that two frames of
    each node took before the cut, as a measure of the machine's load.
    """
    net.bootstrap("libp2p")
    numbers = range(4, 10)
    probes = [
        net.probe(net.lab.public(n), engine)
        for n, engine in zip(numbers, ["libp2p", "hivemind"] * 3, strict=True)
    ]
    for probe in probes:
        probe.wait_for_peers(5, SECONDS)
    before = exchange(probes, 2)
    for number in numbers[3:]:
        net.lab.cut(number)
    cut = time.monotonic()
    for half in (probes[:3], probes[3:]):
        exchange(half, 3)
    time.sleep(max(0.0, cut + seconds - time.monotonic()))
    for number in numbers[3:]:
        net.lab.heal(number)
    healed, since = time.monotonic(), time.time()
    authors = {probe.peer_id for probe in probes}
    while any(fresh(probe, since) != authors - {probe.peer_id} for probe in probes):
        if time.monotonic() - healed > SECONDS:
            raise TimeoutError("they never met again")
        for probe in probes:
            probe.order(publish=1024)
        time.sleep(0.5)
    return time.monotonic() - healed, before


def punch(net: Net, observers: int, engine: str, symmetric: int, carriers: str) -> dict[str, Any]:
    """Measure hole punching between two homes.

    There are a bootstrap node that relays, and members on the public net that tell the homes their public
    addresses. Return the seconds until one home first fetched a blob from the other, and until they had a
    connection without the relay; None if that took over a minute.
    """
    net.bootstrap(engine)
    since = time.monotonic()
    behind = CARRIERS[carriers]
    for carrier in {*behind} - {None}:
        net.lab.carrier(carrier)
    homes = [
        net.lab.home(number, symmetric=symmetric > at, carrier=behind[at]) for at, number in enumerate((2, 3))
    ]
    author, asker = (net.probe(home, engine) for home in homes)
    for number in range(observers):
        net.probe(net.lab.public(4 + number), engine)
    author.order(hold=30_000)
    held = author.wait(lambda: author.last("held"), SECONDS)
    for probe in (author, asker):
        probe.wait_for_peers(1 + observers, SECONDS)
    fetched = direct = None
    command = ["ip", "netns", "exec", homes[1].name, "ss", "-tnH", "state", "established"]
    while (fetched is None or direct is None) and time.monotonic() - since < 60:
        if (
            direct is None
            and f"11.0.0.{behind[0] or 2}:"
            in subprocess.run(command, capture_output=True, text=True, check=True).stdout
        ):
            direct = time.monotonic() - since
        if fetched is None and obtain(asker, held, [author.peer_id])["bytes"]:
            fetched = time.monotonic() - since
        # Go-libp2p backs off after a failed dial, also before hole punching.
        time.sleep(4 if fetched is None else 0.2)
    return {
        "engine": engine,
        "symmetric": symmetric,
        "carriers": carriers,
        "observers": observers,
        "fetched": fetched,
        "direct": direct,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.p2p.nat.figures")
    commands = parser.add_subparsers(dest="command", required=True)
    punching = commands.add_parser("punch")
    punching.add_argument("--observers", type=int, default=3)
    punching.add_argument(
        "--symmetric",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="routers use a new port for each connection",
    )
    punching.add_argument(
        "--carriers",
        choices=CARRIERS,
        default="none",
        help="homes behind a carrier's NAT: none, one, two with separate carriers, two with the same",
    )
    punching.add_argument("--engine", choices=("libp2p", "hivemind"), default="libp2p")
    commands.add_parser("partition").add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    with ExitStack() as stack:
        net = Net(stack, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        if given.command == "punch":
            figures = punch(net, given.observers, given.engine, given.symmetric, given.carriers)
        else:
            figures = {"cut": given.seconds, "healed_after": cut_and_heal(net, given.seconds)[0]}
    print(json.dumps({"schema": 1, **figures}))


if __name__ == "__main__":
    main()
