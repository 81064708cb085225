"""Real processes for the attacks: honest nodes on loopback, and the common parts of hostile peers."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils import encode_varint_prefixed

from p2p.engines.libp2p.pubsub import MESHSUB
from p2p.identity import Identity
from p2p.topic import Topic
from testbed.probe_process import ProbeProcess
from tests.doubles import TIMEOUT_S


def probe_swarm(stack: ExitStack, folder: Path, engine: str, nodes: int) -> list[ProbeProcess]:
    """Start honest nodes and wait until they are connected to each other."""
    first = stack.enter_context(ProbeProcess(folder / "0", engine=engine))
    more = [
        ProbeProcess(folder / str(n), engine=engine, bootstrap=first.addresses[:1]) for n in range(1, nodes)
    ]
    probes = [first, *map(stack.enter_context, more)]
    for probe in probes:
        probe.wait_for_peers(nodes - 1, TIMEOUT_S)
    return probes


def attacker(
    stack: ExitStack,
    folder: Path,
    module: str,
    victims: Sequence[str],
    digest: str = "0",
    **options: str | float,
) -> ProbeProcess:
    """Start a hostile process. It is killed at the end, because it reads no orders and would not leave."""
    given = {
        name: [] if value is True else [str(value)] for name, value in options.items() if value is not False
    }
    more = [word for name, value in given.items() for word in (f"--{name}", *value)]
    hostile = ProbeProcess(
        folder / "hostile", module=f"tests.attacks.{module}", bootstrap=victims, digest=digest, more=more
    )
    stack.enter_context(hostile)
    stack.callback(hostile.kill)
    return hostile


def cpu(probe: ProbeProcess) -> float:
    """Return the CPU seconds of a node and of its p2pd."""
    process = psutil.Process(probe.process.pid)
    return sum(sum(part.cpu_times()[:2]) for part in (process, *process.children(recursive=True)))


def key_of(seed: int, number: int) -> Identity:
    return Identity(seed.to_bytes(16, "big") + number.to_bytes(16, "big"))


async def subscribe(host: Any, victim: Any, topic: Topic) -> tuple[Any, Any]:
    """Connect a libp2p host to a victim and subscribe to its topic.

    Return the stream, and an event that is set when the connection ends.
    """
    await host.connect(victim)
    ended = host.get_network().get_connections(victim.peer_id)[0].muxed_conn.event_closed
    stream = await host.new_stream(victim.peer_id, list(MESHSUB))
    hello = rpc_pb2.RPC(subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=str(topic))])
    await stream.write(encode_varint_prefixed(hello.SerializeToString()))
    return stream, ended


async def swallow(stream: Any) -> None:
    """Read and discard all bytes until the other end hangs up."""
    try:
        while await stream.read(65536):
            pass
    except Exception:  # the victim hung up
        return
