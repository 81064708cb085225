"""Nodes behind home routers connect: real processes in a small internet of namespaces (tests.p2p.nat.lab)."""

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from swarmd.daemon.local_api.control import call
from tests.p2p.nat.figures import PORT, SECONDS, Net, cut_and_heal, exchange, obtain
from tests.p2p.nat.lab import BootstrapProcess, Lab, missing

pytestmark = [pytest.mark.net, pytest.mark.slow]
CUT = 10.0  # seconds a partition lasts


@pytest.fixture(autouse=True)
def _possible() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    with ExitStack() as stack:
        yield Net(stack, tmp_path)


@pytest.mark.parametrize("engine", ["libp2p", pytest.param("hivemind", marks=pytest.mark.p2pd)])
def test_two_nodes_behind_nat_exchange_frames_and_blobs(net: Net, engine: str) -> None:
    """One node is behind two NATs, the home's and the carrier's."""
    net.bootstrap(engine)
    since = time.monotonic()
    net.lab.carrier(20)
    author, asker = (
        net.probe(net.lab.home(2), engine),
        net.probe(net.lab.home(3, carrier=20), engine),
    )
    outside = net.probe(net.lab.public(4), engine)
    for probe in (author, asker, outside):
        probe.wait_for_peers(1, SECONDS)
    assert asker.peer_id not in author.peers(), (
        "the nodes are connected, but their frames should have been forwarded"
    )
    exchange([author, asker, outside], 5)

    author.order(hold=30_000)
    held = author.wait(lambda: author.last("held"), SECONDS)
    while (got := obtain(asker, held, [author.peer_id]))["bytes"] is None:
        assert time.monotonic() - since < 2 * SECONDS, "no relay gave the author a reservation"
        time.sleep(0.5)
    print(
        f"{engine}: through the relay {time.monotonic() - since:.0f} s after the start, in"
        f" {got['seconds'] * 1000:.0f} ms"
    )

    if engine == "libp2p":  # p2pd needs four other nodes that report its public address
        author.wait(lambda: asker.peer_id in author.peers(), SECONDS)
        print(f"{engine}: connected without the relay {time.monotonic() - since:.0f} s after the start")

    author.order(hold=20_000)
    held = author.wait(lambda: author.last("held")["size"] == 20_000 and author.last("held"), SECONDS)
    outside.wait(lambda: author.peer_id in outside.peers(), SECONDS)
    # Over the connection that the author opened.
    assert obtain(outside, held, [author.peer_id])["bytes"] == 20_000
    asker.wait(lambda: outside.peer_id in asker.peers(), SECONDS)
    got = obtain(asker, held, [outside.peer_id])
    print(
        f"{engine}: a blob of 20 KB from one behind NAT to another, from who had fetched it, in"
        f" {got['seconds'] * 1000:.0f} ms"
    )
    assert got["bytes"] == 20_000


def test_ipv6_reaches_nodes_that_ipv4_cannot(net: Net) -> None:
    """One machine has no IPv4, one has no IPv6, and the homes have both but cannot punch IPv4 holes."""
    net.bootstrap("libp2p")
    six = net.probe(net.lab.public(4, ipv4=False), "libp2p")
    opened = net.probe(net.lab.home(2, ipv6=True, open6=True), "libp2p")
    one, two = (net.probe(net.lab.home(number, ipv6=True, symmetric=True), "libp2p") for number in (3, 5))
    four = net.probe(net.lab.home(6), "libp2p")
    since = time.monotonic()
    opened.wait(lambda: six.peer_id in opened.peers(), SECONDS)
    print(f"directly by IPv6 {time.monotonic() - since:.0f} s after the start")

    for asker, author in ((four, six), (four, opened), (one, two)):
        author.order(hold=30_000)
        held = author.wait(lambda author=author: author.last("held"), SECONDS)
        while obtain(asker, held, [author.peer_id])["bytes"] is None:
            assert time.monotonic() - since < 2 * SECONDS, "no relay gave the author a reservation"
            time.sleep(0.5)
    print(f"all through relays {time.monotonic() - since:.0f} s after the start")
    one.wait(lambda: two.peer_id in one.peers(), SECONDS)
    print(f"two firewalls passed {time.monotonic() - since:.0f} s after the start")
    assert four.peer_id not in six.peers()


@pytest.mark.p2pd
def test_the_doctor_says_which_nodes_can_be_reached(net: Net, tmp_path: Path) -> None:
    """Nodes of both engines dial back for each other.

    The bootstrap node is running, so it is asked through its control API.
    """
    boot = net.bootstrap("libp2p")
    member = net.probe(net.lab.public(4), "hivemind")
    member.wait_for_peers(1, SECONDS)
    diagnosis = net.doctor(net.hub, "--state-dir", str(boot.folder))
    assert diagnosis["reachable"] is True
    assert diagnosis["survey"]["verdicts"] == [
        {
            "by": member.peer_id,
            "name": diagnosis["survey"]["verdicts"][0]["name"],
            "outcome": "REACHED",
            "seen_at": "11.0.0.1",
        }
    ]

    places = {
        "home": net.lab.home(2),
        "forwarded": net.lab.home(3, forward=PORT),
        "public": net.lab.public(5),
    }
    options = [
        "--bootstrap",
        boot.addresses[0],
        "--listen",
        f"/ip4/0.0.0.0/tcp/{PORT}",
        "--state-dir",
        str(tmp_path / "none"),
    ]
    with ThreadPoolExecutor() as pool:
        said = dict(
            zip(places, pool.map(lambda place: net.doctor(place, *options), places.values()), strict=True)
        )
    assert {name: diagnosis["reachable"] for name, diagnosis in said.items()} == {
        "home": False,
        "forwarded": True,
        "public": True,
    }
    words = {
        name: " ".join(f"{f['says']} {f['remedy']}" for f in diagnosis["findings"])
        for name, diagnosis in said.items()
    }
    assert (
        f"forward TCP port {PORT} of your router to 192.168.2.10" in words["home"]
        and "other nodes see it at 11.0.0.2" in words["home"]
    )
    assert "other nodes see it at 11.0.0.3" in words["forwarded"] and "your router" not in words["forwarded"]
    assert said["home"]["takes_part"] and "takes full part" in said["home"]["summary"]


@pytest.mark.p2pd
def test_a_partitioned_swarm_reconnects_soon(net: Net) -> None:
    """In a swarm of both engines, the halves are cut apart for 10 s and each continues."""
    seconds, before = cut_and_heal(net, CUT)
    print(f"all hear all {seconds:.1f} s after the cut was healed; two frames took {before:.1f} s before")
    assert seconds < 120 + 4 * before  # within 30 s on an idle machine


def test_every_frame_arrives_over_a_lossy_line(net: Net) -> None:
    """The lines of two homes have 60 ms delay each way and lose 2 % of all packets."""
    net.bootstrap("libp2p")
    probes = [net.probe(net.lab.home(number, delay_ms=60, loss=0.02), "libp2p") for number in (2, 3)]
    probes.append(net.probe(net.lab.public(4), "libp2p"))
    for probe in probes:
        probe.wait_for_peers(1, SECONDS)
    seconds = exchange(probes, 15)
    delays = sorted(got["delay"] for probe in probes for got in probe.said("got"))
    print(
        f"{len(delays)} frames in {seconds:.1f} s, delay {delays[len(delays) // 2]:.2f} s, at most"
        f" {delays[-1]:.2f} s"
    )
    for probe in probes:
        assert len({(got["author"], got["got"]) for got in probe.said("got")}) == 30


@pytest.mark.p2pd
def test_two_nodes_on_one_network_find_each_other_without_an_address(net: Net, tmp_path: Path) -> None:
    """There is a node of each engine; both use the same code to announce and listen."""
    with ExitStack() as stack:
        engines = {4: "libp2p", 5: "hivemind"}
        nodes = [
            stack.enter_context(BootstrapProcess(net.lab.public(n), tmp_path / str(n), engine))
            for n, engine in engines.items()
        ]
        since = time.monotonic()
        while not all(call(node.folder, "peers", dict, timeout=SECONDS)["peers"] for node in nodes):
            assert time.monotonic() - since < SECONDS
            time.sleep(0.1)
        print(f"connected {time.monotonic() - since:.1f} s after both were up")


def test_a_network_lab_leaves_nothing_behind(tmp_path: Path) -> None:
    with Lab(tmp_path) as lab:
        home = lab.home(2, delay_ms=1)
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert home.name in names
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert home.name.rpartition("-")[0] + "-" not in names
