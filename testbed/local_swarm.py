"""Start a swarm of real `swarmd join` processes on loopback, for the demo, tests and benchmarks."""

import contextlib
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2p.identity import Identity, nickname
from swarmd.daemon.local_api import control
from swarmd.errors import SwarmdError
from swarmd.lab.parent_watch import LabFailed, end, watched
from swarmd.state.folder import IDENTITY_FILE
from swarmd.state.metrics import read_metrics
from swarmd.state.status import Status
from swarmd.types import RoundLine

# Ports below the range from which Linux and macOS assign ephemeral ports, so no other program gets one
# unasked.
UNASKED_PORTS = range(10_000, 32_000)


def checkpoints(every: float) -> dict[str, str]:
    """Return the environment of a node that saves a checkpoint every few seconds.

    The daily limit of bytes written is lifted, so use this for short runs only.
    """
    return {"SWARMD_CHECKPOINT_EVERY": str(every), "SWARMD_CHECKPOINT_GIGABYTES_A_DAY": "10000"}


@dataclass
class LocalNode:
    """One `swarmd join` process, with a separate state folder and port."""

    folder: Path
    command: Sequence[str]
    peer_id: str
    variables: dict[str, str]  # environment variables, for settings without a flag
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return nickname(self.peer_id)

    @property
    def log(self) -> Path:
        return self.folder / "node.log"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        with self.log.open("ab") as log:
            environment = (
                os.environ | {"OMP_NUM_THREADS": "1", "SWARMD_LIMITS_PRIORITY": "normal"} | self.variables
            )
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def kill(self) -> None:
        """Kill the process (SIGKILL) and wait for its end."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def check(self) -> None:
        """Raise LabFailed if the node ended with an error."""
        if self.process is not None and self.process.poll() not in (None, 0):
            raise LabFailed(f"{self.name} ended with status {self.process.returncode}; see {self.log}")

    def lines(self) -> Sequence[RoundLine]:
        """Return the lines of the node's metrics.jsonl."""
        return read_metrics(self.folder / "metrics.jsonl")

    def status(self) -> Status | None:
        """Return the node's status, or None if it does not answer."""
        try:
            return control.call(self.folder, "status", Status)
        except SwarmdError:
            return None


@contextlib.contextmanager
def local_swarm(
    folder: Path, nodes: int, options: Sequence[str] = (), variables: dict[str, str] | None = None
) -> Iterator[list[LocalNode]]:
    """Prepare `nodes` nodes of one new swarm; end all running nodes when the block ends.

    Keys and ports are made first, so that each node gets the addresses of all other nodes. options,
    variables: passed to each `swarmd join`.
    """
    name = f"lab-{secrets.token_hex(4)}"  # a random name, so two swarms on one machine never meet
    folders = [folder / f"node-{number}" for number in range(1, nodes + 1)]
    for path in folders:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    identities = [Identity.load_or_create(path / IDENTITY_FILE) for path in folders]
    addresses = [f"/ip4/127.0.0.1/tcp/{port}" for port in free_ports(nodes)]
    dialable = [
        f"{address}/p2p/{identity.peer_id}" for address, identity in zip(addresses, identities, strict=True)
    ]
    swarm = []
    for number, (path, identity, address) in enumerate(
        zip(folders, identities, addresses, strict=True), start=1
    ):
        command = [
            *(*watched(), "swarmd", "join", "--swarm", name, "--listen", address),
            *("--seed", str(number), "--state-dir", str(path), *options),
            *(word for other in dialable if not other.startswith(address) for word in ("--bootstrap", other)),
        ]
        swarm.append(LocalNode(path, command, identity.peer_id, variables or {}))
    try:
        yield swarm
    finally:
        started = [node.process for node in swarm if node.process is not None]
        for process in started:
            # Signal all processes first, then wait for each, so that they end at the same time.
            process.terminate()
        for process in started:
            end(process)


def free_ports(count: int) -> list[int]:
    """Find free loopback ports outside the ephemeral range, so that they stay free until the nodes start."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            one, port = stack.enter_context(socket.socket()), secrets.choice(UNASKED_PORTS)
            with contextlib.suppress(OSError):
                # The port is in use.
                one.bind(("127.0.0.1", port))
                ports.append(port)
        return ports
