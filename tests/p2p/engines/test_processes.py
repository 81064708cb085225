"""Real processes on loopback: nodes that are killed and restarted, and two nodes with one key."""

import itertools
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testbed.probe_process import ProbeProcess
from tests.doubles import TIMEOUT_S

pytestmark = [pytest.mark.net, pytest.mark.slow]
ENGINES = ["libp2p", pytest.param("libp2p hivemind", marks=pytest.mark.p2pd, id="mixed")]

ENDLESS = 100_000  # more frames than a test publishes


class Nodes:
    """Starts probes with the engines in turn; in a mixed swarm a node may restart with the other engine."""

    def __init__(self, stack: ExitStack, engines: str) -> None:
        self._stack, self._engines, self.mixed = stack, itertools.cycle(engines.split()), " " in engines

    def start(self, folder: Path, **options: Any) -> ProbeProcess:
        return self._stack.enter_context(ProbeProcess(folder, engine=next(self._engines), **options))


@pytest.fixture(params=ENGINES)
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(stack, request.param)


def port_of(address: str) -> str:
    return address.split("/p2p/")[0]


def swarm(nodes: Nodes, folder: Path, count: int) -> list[ProbeProcess]:
    probes = [nodes.start(folder / "0")]
    probes += [nodes.start(folder / str(n), bootstrap=probes[0].addresses) for n in range(1, count)]
    for probe in probes:
        probe.wait_for_peers(1, TIMEOUT_S)
    return probes


def frames_from(probe: ProbeProcess, author: str) -> list[int]:
    return [got["got"] for got in probe.said("got") if got["author"] == author]


def latest(probe: ProbeProcess) -> int:
    """Return the number of the last frame that the probe sent."""
    probe.wait_for("sent", 1, TIMEOUT_S)
    return int(probe.said("sent")[-1]["sent"])


def hears(probe: ProbeProcess, author: str, beyond: int = 0, count: int = 1) -> None:
    """Wait until the probe has heard `count` frames of the author with numbers above `beyond`."""
    probe.wait(
        lambda: len([number for number in frames_from(probe, author) if number > beyond]) >= count, TIMEOUT_S
    )


@pytest.mark.parametrize(
    ("nodes", "victim"),
    [
        pytest.param("libp2p", 0, id="libp2p, the bootstrap node"),
        pytest.param("libp2p", 2, id="libp2p, another node"),
        pytest.param("libp2p hivemind", 0, marks=pytest.mark.p2pd, id="mixed, the bootstrap node"),
    ],
    indirect=["nodes"],
)
def test_a_killed_node_exchanges_frames_soon_after_its_restart(
    nodes: Nodes, tmp_path: Path, victim: int
) -> None:
    probes = swarm(nodes, tmp_path, 3)
    others = [probe for n, probe in enumerate(probes) if n != victim]
    address, peer_id = probes[victim].addresses[0], probes[victim].peer_id
    for probe in others:
        probe.order(publish=1024, count=ENDLESS, every=0.25)
    probes[victim].order(publish=32 * 1024)
    for probe in others:
        hears(probe, peer_id)
        probe.wait_for_peers_to_be(2, TIMEOUT_S)  # so that they also know each other
    last = latest(probes[victim])
    probes[victim].kill()
    for probe, other in itertools.permutations(others):  # the others notice that it left
        probe.wait_for_peers_to_be(1, TIMEOUT_S)
        hears(probe, other.peer_id, beyond=latest(other))

    bootstrap = [] if victim == 0 else probes[0].addresses  # the first node has only its address book
    back = nodes.start(tmp_path / str(victim), listen=port_of(address), bootstrap=bootstrap)
    assert back.peer_id == peer_id and back.addresses[0] == address
    # Frames of the first seconds are rejected, because they may be replays.
    back.wait(lambda: back.said("got") or (back.last("rejected") or {}).get("rejected"), TIMEOUT_S)
    back.order(publish=1024, count=ENDLESS, every=0.25)
    for probe in others:
        hears(probe, peer_id, beyond=last)


def test_after_a_kill_while_publishing_no_later_frame_is_lost(nodes: Nodes, tmp_path: Path) -> None:
    """No sequence number or message id is used twice, although the process is killed while it publishes."""
    rng = random.Random(0)
    hearer = nodes.start(tmp_path / "hearer")
    sent: list[int] = []
    for _ in range(3 if nodes.mixed else 2):  # mixed: once with the other engine, then with the first
        sender = nodes.start(tmp_path / "sender", bootstrap=hearer.addresses)
        sender.wait_for_peers(1, TIMEOUT_S)
        sender.order(publish=200, count=ENDLESS, every=0.05)
        sender.wait_for("sent", rng.randint(20, 40), TIMEOUT_S)
        hears(hearer, sender.peer_id, beyond=sent[-1] if sent else 0)
        sender.kill()
        numbers = [message["sent"] for message in sender.said("sent")]
        assert not sent or numbers[0] > sent[-1]
        sent += numbers
    got = frames_from(hearer, sender.peer_id)
    assert len(got) == len(set(got)) and hearer.last("rejected")["rejected"] == {}  # type: ignore[index]


@pytest.mark.parametrize("engine", ["libp2p", pytest.param("hivemind", marks=pytest.mark.p2pd)])
def test_the_later_of_two_nodes_with_the_same_key_leaves(tmp_path: Path, engine: str) -> None:
    with ExitStack() as stack:
        hub = stack.enter_context(ProbeProcess(tmp_path / "hub", engine=engine))
        first = stack.enter_context(ProbeProcess(tmp_path / "first", engine=engine, bootstrap=hub.addresses))
        first.wait_for_peers(1, TIMEOUT_S)
        first.order(publish=100, count=ENDLESS, every=0.2)
        hears(hub, first.peer_id)
        (tmp_path / "second").mkdir()
        shutil.copy(tmp_path / "first" / "key", tmp_path / "second" / "key")
        second = stack.enter_context(
            ProbeProcess(tmp_path / "second", engine=engine, bootstrap=hub.addresses)
        )
        second.wait(lambda: second.last("twin") == {"twin": "later"}, TIMEOUT_S)
        first.wait(lambda: first.last("twin") == {"twin": "earlier"}, TIMEOUT_S)
        second.wait(lambda: second.peers() == [], TIMEOUT_S)
        hears(hub, first.peer_id, beyond=latest(first))
        second.order(publish=77)
        second.wait_for("sent", 1, TIMEOUT_S)
        second.kill()
        hears(hub, first.peer_id, beyond=latest(first), count=3)
        assert not [got for got in hub.said("got") if got["bytes"] == 77]
