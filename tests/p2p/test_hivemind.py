"""What only the hivemind engine has to withstand: a child process that dies, hangs or outlives us, and peers it passes things on for."""

import itertools
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import multiaddr
import psutil
import pytest
import trio
import trio.testing

from benchmarks.probes import ProbeProcess
from p2p.address import parse_listen
from p2p.admission.host_bans import PEERS
from p2p.engines import choose, engine
from p2p.engines.hivemind import p2pd as p2pd_module
from p2p.engines.hivemind.p2pd import P2pdGone, Wire, messages, missing, open_p2pd, peer_bytes, peer_of
from p2p.engines.libp2p.stack import Stack
from p2p.errors import BadAddress, CannotListen, EngineMissing, PortInUse
from p2p.identity import Identity
from p2p.member import Member
from p2p.topic import Topic
from p2p.types import Engine, Handlers, PeerId, Verdict
from tests.p2p.hostile import hostile_stack
from tests.p2p.waiting import SECONDS, heard, until

NEEDS_P2PD = pytest.mark.skipif(missing() is not None, reason=missing() or "")
pytestmark = pytest.mark.trio
TOPIC = Topic("main", "0123456789abcdef")


def with_p2pd(test: Any) -> Any:
    return pytest.mark.net(NEEDS_P2PD(test))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files whose path leaves room for that of a socket."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


QUIET = Handlers(lambda frame, via, shard: Verdict.ACCEPT, lambda peer, question: b"")


def build(name: str, n: int, handlers: Handlers = QUIET, **options: Any) -> Any:
    settings: dict[str, Any] = {"listen": ["/ip4/127.0.0.1/tcp/0"], "bootstrap": [], "addressbook": None, "clock": time.time}
    return engine(name)(Identity.from_seed(bytes([n]) * 32), TOPIC, handlers, rng=random.Random(n), **settings | options)


def member(n: int, name: str = "hivemind", **options: Any) -> Member:
    def build_engine(handlers: Handlers) -> Engine:
        return build(name, n, handlers, **options)  # type: ignore[no-any-return]

    numbers = itertools.count(int(time.time() * 1000))
    return Member(Identity.from_seed(bytes([n]) * 32), TOPIC, build_engine, sequence=numbers, clock=time.time)


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name() == "p2pd"]


# The child process.


@with_p2pd
async def test_a_port_in_use_an_address_not_ours_and_what_is_no_address_are_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"port {port} .*swarm.listen"):
            await build("hivemind", 1, listen=[f"/ip4/127.0.0.1/tcp/{port}"]).run()
    with pytest.raises(CannotListen, match=r"203\.0\.113\.7.*swarm.listen"):
        await build("hivemind", 1, listen=["/ip4/203.0.113.7/tcp/0"]).run()
    with pytest.raises(BadAddress, match="one looks like /ip4/"):
        build("hivemind", 1, bootstrap=["nonsense"])
    assert not children()


@with_p2pd
async def test_two_nodes_do_not_share_a_port() -> None:
    first = build("hivemind", 1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(first.run)
        with pytest.raises(PortInUse):
            await build("hivemind", 2, listen=[addresses[0].split("/p2p/")[0]]).run()
        nursery.cancel_scope.cancel()


@with_p2pd
async def test_listening_everywhere_gives_addresses_that_can_be_dialled() -> None:
    node = build("hivemind", 1, listen=["/ip4/0.0.0.0/tcp/0"])
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(node.run)
        assert addresses[0].startswith("/ip4/127.0.0.1/tcp/") and not any("0.0.0.0" in address for address in addresses)
        assert all(address.endswith("/p2p/" + node.me) for address in addresses)
        nursery.cancel_scope.cancel()


@with_p2pd
async def test_the_child_has_our_key_tells_nobody_and_is_gone_with_us(short: Path) -> None:
    identity = Identity.from_seed(bytes([7]) * 32)
    async with open_p2pd(identity, ["-hostAddrs=/ip4/127.0.0.1/tcp/0"]) as p2pd:
        identified = (await p2pd.ask(type=p2pd.pb.Request.IDENTIFY)).identify
        assert peer_of(identified.id) == identity.peer_id and identified.id == peer_bytes(identity.peer_id)
        (folder,) = short.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and [file.name for file in folder.iterdir()] == ["control"]
        (child,) = children()
        assert set(child.environ()) == {"GOLOG_LOG_LEVEL", "GOMAXPROCS"} and identity.seed.hex() not in " ".join(child.cmdline())
    assert not children() and not list(short.iterdir())


@with_p2pd
@pytest.mark.parametrize("forbidden", [False, True])
async def test_the_child_interrupts_nobody_and_we_stay_as_we_were(forbidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError

    if forbidden:
        monkeypatch.setattr(os, "sched_setscheduler", forbid)
    async with open_p2pd(Identity.from_seed(bytes(32)), ["-hostAddrs=/ip4/127.0.0.1/tcp/0"]):
        (child,) = children()
        policies = {os.sched_getscheduler(thread.id) for thread in child.threads()}
        assert policies == {os.SCHED_OTHER if forbidden else os.SCHED_BATCH}
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


@with_p2pd
async def test_what_a_killed_node_left_behind_is_removed(short: Path) -> None:
    left, young, alive = (short / f"swarmd-p2pd-{name}" for name in ("left", "young", "alive"))
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as listening:
        for folder, listener in ((left, dead), (young, None), (alive, listening)):
            folder.mkdir()
            if listener is not None:
                listener.bind(str(folder / "control"))
        listening.listen()
        for folder in (left, alive):
            os.utime(folder, (1, 1))
        async with open_p2pd(Identity.from_seed(bytes(32)), ["-hostAddrs=/ip4/127.0.0.1/tcp/0"]):
            assert not left.exists() and young.exists() and alive.exists()


@with_p2pd
async def test_a_child_that_cannot_start_says_why() -> None:
    with pytest.raises((P2pdGone, BaseExceptionGroup)) as caught:
        async with open_p2pd(Identity.from_seed(bytes(32)), ["-hostAddrs=nonsense"]):
            raise AssertionError
    assert "exit code 1" in repr(caught.value) and "nonsense" in repr(caught.value)


@with_p2pd
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["it is killed", "it hangs"])
async def test_it_starts_again_with_the_same_port(sign: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the peers find it again."""
    a = member(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a.run)
        (child,) = children()
        b = member(2, "libp2p", bootstrap=addresses[:1])
        await nursery.start(b.run)
        await heard(b, a)
        monkeypatch.setattr(p2pd_module, "ANSWER_TIMEOUT", 5.0)
        child.send_signal(sign)
        await until(lambda: a.engine.restarts == 1 and a.addresses())  # type: ignore[attr-defined]
        assert a.addresses() == addresses and [other.pid for other in children()] != [child.pid]
        await heard(b, a)
        await heard(a, b)
        nursery.cancel_scope.cancel()
    assert not children()


@with_p2pd
async def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with ProbeProcess(tmp_path, engine="hivemind") as probe:
        probe.wait(lambda: probe.addresses, SECONDS)
        (child,) = psutil.Process(probe.process.pid).children()
        assert child.name() == "p2pd"
        probe.kill()
        assert psutil.wait_procs([child], 10)[0]


@with_p2pd
@pytest.mark.slow
async def test_it_dies_with_a_parent_that_is_killed_before_it_is_up(tmp_path: Path) -> None:
    """p2pd ends itself when nobody speaks to it within half a minute."""
    program = (
        "import os, signal; from pathlib import Path; from p2p.engines import p2pd; from p2p.identity import Identity\n"
        f"process = p2pd._start(Path({str(tmp_path)!r}), Identity.from_seed(bytes(32)), ['-hostAddrs=/ip4/127.0.0.1/tcp/0'])\n"
        "print(process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    child = psutil.Process(int(done.stdout))
    assert psutil.wait_procs([child], p2pd_module.START_TIMEOUT + 20)[0]


# Its peers.


@with_p2pd
async def test_a_machine_that_sends_one_hostile_peer_after_another_is_hung_up_on() -> None:
    """p2pd lets in whoever dials; who is new from there is not kept, though nobody shut him out. Those who are here stay."""
    a = member(1)

    async def offend(stack: Stack, target: Any) -> None:
        a.engine.shut_out(PeerId(str(stack.host.get_id())), 60)
        await hung_up_on(stack, target)

    async def hung_up_on(stack: Stack, target: Any) -> None:
        await until(lambda: not stack.host.get_network().get_connections(target))

    async with trio.open_nursery() as nursery:
        await nursery.start(a.run)
        b = member(2, "libp2p", bootstrap=a.addresses()[:1])
        await nursery.start(b.run)
        await until(a.peers)
        for n in range(int(PEERS) + 1):
            await hostile_stack(TOPIC, a.addresses(), offend, 60 + n)
        await hostile_stack(TOPIC, a.addresses(), hung_up_on, 70, meet=False)
        await heard(b, a)
        assert [peer.id for peer in a.peers()] == [b.identity.peer_id]
        nursery.cancel_scope.cancel()


@with_p2pd
async def test_a_dead_bootstrap_does_not_matter_and_one_that_comes_late_is_found(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    late = member(1, listen=[f"/ip4/127.0.0.1/tcp/{port}"])
    book = tmp_path / "peers.json"
    lone = member(2, bootstrap=[f"/dns4/localhost/tcp/{port}/p2p/{late.identity.peer_id}"], addressbook=book)
    async with trio.open_nursery() as nursery:
        await nursery.start(lone.run)
        await trio.sleep(1.5)  # it has dialled, and failed
        assert not lone.peers()
        await nursery.start(late.run)
        await until(lone.peers)
        assert [peer.direction for peer in lone.peers()] == ["outbound"]
        await heard(lone, late)
        await heard(late, lone)
        nursery.cancel_scope.cancel()
    assert late.identity.peer_id in book.read_text() and f"/ip4/127.0.0.1/tcp/{port}" in book.read_text()


@with_p2pd
async def test_a_known_peer_is_found_again_without_a_bootstrap(tmp_path: Path) -> None:
    a, book = member(1), tmp_path / "peers.json"
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a.run)
        for name, bootstrap in (("hivemind", addresses[:1]), ("libp2p", []), ("hivemind", [])):  # one book for both engines
            b = member(2, name, bootstrap=bootstrap, addressbook=book)
            async with trio.open_nursery() as inner:
                await inner.start(b.run)
                await until(b.peers)
                inner.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


@with_p2pd
@pytest.mark.parametrize("names", [("hivemind", "libp2p"), ("libp2p", "hivemind"), ("hivemind", "hivemind")], ids="-".join)
async def test_members_who_know_only_the_bootstrap_find_each_other(names: tuple[str, str]) -> None:
    """By Kademlia, which both engines speak."""
    middle = member(1, "hivemind")
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(middle.run)
        ends = [member(n, name, bootstrap=addresses[:1]) for n, name in enumerate(names, 2)]
        for end in ends:
            await nursery.start(end.run)
        for end, other in itertools.permutations(ends):
            await until(lambda end=end, other=other: other.identity.peer_id in {peer.id for peer in end.peers()}, 60)
        nursery.cancel_scope.cancel()


@with_p2pd
async def test_the_swarms_provider_record_is_one_for_both_engines() -> None:
    """Each end announces itself; a stranger with either library finds both, under the key that docs/wire.md names."""
    from libp2p.kad_dht.provider_store import ProviderStore
    from libp2p.peer.peerinfo import info_from_p2p_addr

    from p2p.engines.libp2p.stack import open_stack

    key = b"\x12\x20" + sha256(b"swarmd:/swarmd/1/main/0123456789abcdef/0").digest()
    identities = [Identity.from_seed(bytes([n]) * 32) for n in (66, 67)]
    loopback = "/ip4/127.0.0.1/tcp/0"
    go = member(1)
    async with trio.open_nursery() as nursery:
        (address, *_) = await nursery.start(go.run)
        py = member(2, "libp2p", bootstrap=[address])
        await nursery.start(py.run)
        wanted = {go.identity.peer_id, py.identity.peer_id}
        with trio.fail_after(60):
            async with open_p2pd(identities[0], [f"-hostAddrs={loopback}", "-dhtServer"]) as p2pd:
                where = [multiaddr.Multiaddr(address.split("/p2p/")[0]).to_bytes()]
                connect = {"peer": peer_bytes(go.identity.peer_id), "addrs": where}
                await p2pd.ask(type=p2pd.pb.Request.CONNECT, connect=connect)
                found: set[str | None] = set()
                while not found >= wanted:
                    await trio.sleep(0.5)
                    async with p2pd.wire() as wire:
                        dht = {"type": p2pd.pb.DHTRequest.FIND_PROVIDERS, "cid": b"\x01\x55" + key, "timeout": 5}
                        await p2pd.answer(wire, type=p2pd.pb.Request.DHT, dht=dht)
                        while (answer := await wire.receive(p2pd.pb.DHTResponse)).type != p2pd.pb.DHTResponse.END:
                            found.add(peer_of(answer.peer.id))
            listen = [parse_listen(loopback)]
            async with open_stack(identities[1], [TOPIC], lambda frame, via, topics: Verdict.ACCEPT, listen, time.time) as stack:
                await stack.host.connect(info_from_p2p_addr(multiaddr.Multiaddr(address)))
                found = set()
                while not found >= wanted:
                    await trio.sleep(0.5)
                    await stack.dht.add_peer(info_from_p2p_addr(multiaddr.Multiaddr(address)).peer_id)
                    lookup = ProviderStore(host=stack.host, peer_routing=stack.dht.peer_routing)
                    found = {str(info.peer_id) for info in await lookup.find_providers(key)}
        nursery.cancel_scope.cancel()


@with_p2pd
async def test_who_sends_what_is_no_frame_is_cut_off_before_it_costs_us_our_neighbours() -> None:
    """A neighbour with the other engine charges us for what we passed on, and has had too little of it to cut us off."""
    from libp2p.peer.peerinfo import info_from_p2p_addr

    from p2p.engines.libp2p.stack import open_stack

    a = member(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(a.run)
        b = member(2, "libp2p", bootstrap=addresses[:1])
        await nursery.start(b.run)
        await heard(b, a)
        hostile, cut = Identity.from_seed(bytes([66]) * 32), False
        listen = [parse_listen("/ip4/127.0.0.1/tcp/0")]
        with trio.fail_after(SECONDS):
            async with open_stack(hostile, [TOPIC], lambda frame, via, topics: Verdict.ACCEPT, listen, time.time) as stack:
                target = info_from_p2p_addr(multiaddr.Multiaddr(addresses[0]))
                await stack.host.connect(target)
                await stack.pubsub.wait_for_peer(target.peer_id, 20)
                for n in itertools.count():
                    await stack.pubsub.publish(str(TOPIC), b"no frame" + n.to_bytes(4, "big"))
                    await trio.sleep(0.02)
                    if cut := target.peer_id not in stack.pubsub.peers:
                        break
        assert cut and sum(a.rejected.values()) <= 20  # what comes after the cut is not looked at
        assert hostile.peer_id not in {peer.id for peer in a.peers()} and b.peers()
        await until(lambda: {peer.id for peer in a.peers()} == {b.identity.peer_id})
        await heard(b, a)
        await heard(a, b)
        assert a.engine.restarts == 0  # type: ignore[attr-defined]
        nursery.cancel_scope.cancel()


# The control socket's protocol, and which engine it is to be.


@NEEDS_P2PD
@pytest.mark.parametrize("step", [1, 7, 100_000])
async def test_messages_arrive_whole_however_they_are_cut(step: int) -> None:
    pb = messages()
    sent = [pb.PSMessage(data=bytes([n]) * size, seqno=b"%d" % n) for n, size in enumerate((0, 1, 100, 130, 20_000, 0))]
    ours, theirs = trio.testing.memory_stream_pair()
    whole, catch = trio.testing.memory_stream_one_way_pair()
    for message in sent:
        await Wire(trio.StapledStream(whole, catch)).send(message)
    await whole.aclose()
    content = b"".join([chunk async for chunk in catch])

    async def trickle() -> None:
        for start in range(0, len(content), step):
            await theirs.send_all(content[start : start + step])
        await theirs.aclose()

    wire = Wire(ours)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trickle)
        assert [await wire.receive(pb.PSMessage) for _ in sent] == sent
        with pytest.raises(P2pdGone):
            await wire.receive(pb.PSMessage)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff\x7f", b"\xff" * 9, b"\x81\x80\x80\x02"])
async def test_what_announces_too_much_is_refused(data: bytes) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await theirs.send_all(data)
    with pytest.raises(P2pdGone, match="no message"):
        await Wire(ours).receive(None)


async def test_peer_ids_go_both_ways_and_other_keys_are_no_members() -> None:
    peer = Identity.from_seed(bytes([3]) * 32).peer_id
    assert peer_of(peer_bytes(peer)) == peer
    assert peer_of(b"\x12\x20" + bytes(32)) is None and peer_of(b"") is None and peer_of(peer_bytes(peer)[:-1]) is None


@NEEDS_P2PD
async def test_auto_takes_hivemind_where_it_is_installed() -> None:
    assert choose("auto").name == choose("hivemind").name == "hivemind" and "installed" in choose("auto").why
    assert choose("libp2p").name == "libp2p" and choose("libp2p").why == "as configured"


async def test_auto_takes_libp2p_where_hivemind_is_not_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not (Path(place) / "hivemind").exists()])
    monkeypatch.delitem(sys.modules, "hivemind", raising=False)
    choice = choose("auto")
    assert choice.name == "libp2p" and ("pip install" in choice.why or "Linux on x86-64 only" in choice.why)
    with pytest.raises(EngineMissing, match=r"swarm\.engine"):
        choose("hivemind")
    with pytest.raises(EngineMissing):
        build("hivemind", 1)


async def test_another_machine_is_told_that_it_has_no_p2pd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2pd_module.platform, "machine", lambda: "arm64")
    assert "Linux on x86-64 only" in str(missing()) and choose("auto").name == "libp2p"


@NEEDS_P2PD
async def test_neither_hivemind_nor_torch_nor_libp2p_is_imported() -> None:
    program = (
        "import sys; from p2p.engines import engine; engine('hivemind'); from p2p.engines.hivemind.p2pd import messages; messages()\n"
        "sys.exit(bool({'libp2p', 'torch', 'hivemind'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
