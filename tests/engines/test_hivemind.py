"""Attacks and failures that only the hivemind engine has to withstand.

Its child process may die, hang or outlive the engine, and forwards the traffic of peers.
"""

import contextlib
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import multiaddr
import psutil
import pytest
import trio
import trio.testing
from swarmd_engine_hivemind import engine as hivemind_engine
from swarmd_engine_hivemind import p2pd as p2pd_module
from swarmd_engine_hivemind.p2pd import (
    P2pdGone,
    Wire,
    messages,
    missing,
    open_p2pd,
    peer_bytes,
    peer_of,
)
from swarmd_engine_hivemind.streams import serve

from p2p.address import parse_listen
from p2p.engines import engine, offered
from p2p.engines.request_response import Responder
from p2p.engines.traffic import UNKNOWN_LINE, Traffic
from p2p.errors import EngineMissing
from p2p.identity import Identity
from p2p.member import Member
from p2p.types import Started, Verdict
from testbed.probe_process import ProbeProcess
from tests.doubles import until
from tests.p2p.real import QUIET, SECONDS, TOPIC, real_engine, real_member


def with_p2pd(test: Any) -> Any:
    return pytest.mark.net(pytest.mark.p2pd(test))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a folder for temporary files whose path is short enough for a socket's name."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def member(n: int, name: str = "hivemind", **options: Any) -> Member:
    return real_member(name, n, **options)


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name() == "p2pd"]


# The child process, p2pd.


@with_p2pd
async def test_running_out_of_file_descriptors_does_not_end_the_engine(nursery: trio.Nursery) -> None:
    _, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with open_p2pd(Identity(bytes([7]) * 32), ["-hostAddrs=/ip4/127.0.0.1/tcp/0"]) as p2pd:
        responder = Responder(lambda _, question: question, lambda _: True, Traffic().upload)
        await nursery.start(serve, p2pd, responder, lambda _: UNKNOWN_LINE)
        async with await trio.open_unix_socket(str(p2pd.folder / "asked")) as first:
            await first.send_eof()
            assert await first.receive_some(1) == b""  # the engine serves the stream
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(str(p2pd.folder / "asked"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            try:
                await trio.testing.wait_all_tasks_blocked(0.01)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert (await p2pd.ask(type=p2pd.pb.Request.IDENTIFY)).identify.id
        nursery.cancel_scope.cancel()


@with_p2pd
async def test_p2pd_has_the_nodes_key_keeps_it_secret_and_ends_with_the_node(short: Path) -> None:
    identity = Identity(bytes([7]) * 32)
    async with open_p2pd(identity, ["-hostAddrs=/ip4/127.0.0.1/tcp/0"]) as p2pd:
        identified = (await p2pd.ask(type=p2pd.pb.Request.IDENTIFY)).identify
        assert peer_of(identified.id) == identity.peer_id and identified.id == peer_bytes(identity.peer_id)
        (folder,) = short.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and [file.name for file in folder.iterdir()] == [
            "control"
        ]
        (child,) = children()
        assert set(child.environ()) == {
            "GOLOG_LOG_LEVEL",
            "GOMAXPROCS",
        } and identity.seed.hex() not in " ".join(child.cmdline())
    assert not children() and not list(short.iterdir())


@with_p2pd
async def test_a_p2pd_that_cannot_start_says_why() -> None:
    with pytest.raises((P2pdGone, BaseExceptionGroup)) as caught:
        async with open_p2pd(Identity(bytes(32)), ["-hostAddrs=nonsense"]):
            raise AssertionError
    assert "exit code 1" in repr(caught.value) and "nonsense" in repr(caught.value)


@with_p2pd
async def test_p2pd_dies_with_a_killed_parent(tmp_path: Path) -> None:
    with ProbeProcess(tmp_path, engine="hivemind") as probe:
        probe.wait(lambda: probe.addresses, SECONDS)
        (child,) = psutil.Process(probe.process.pid).children()
        assert child.name() == "p2pd"
        probe.kill()
        assert psutil.wait_procs([child], SECONDS)[0]


@with_p2pd
async def test_p2pd_dies_with_a_parent_killed_during_its_start(tmp_path: Path) -> None:
    """p2pd ends itself if nobody connects to it within the time allowed for its start."""
    program = (
        "import os, signal; from pathlib import Path; from swarmd_engine_hivemind import p2pd; from"
        " p2p.identity import Identity\np2pd.START_TIMEOUT_S = 1\nprocess ="
        f" p2pd._start(Path({str(tmp_path)!r}), Identity(bytes(32)),"
        " ['-hostAddrs=/ip4/127.0.0.1/tcp/0'])\nprint(process.pid, flush=True); os.kill(os.getpid(),"
        " signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
        assert psutil.wait_procs([psutil.Process(int(done.stdout))], SECONDS)[0]


# The peers of p2pd.


@with_p2pd
@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux can a port be held for another process")
async def test_no_other_process_can_take_the_port_while_p2pd_starts(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    def open_late(identity: Identity, flags: Sequence[str]) -> Any:
        (port,) = [int(flag.rsplit("/", 1)[1]) for flag in flags if flag.startswith("-hostAddrs=")]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        return open_p2pd(identity, flags)

    monkeypatch.setattr(hivemind_engine, "open_p2pd", open_late)
    engine = real_engine("hivemind", 1)
    await nursery.start(engine.run)
    assert engine.restarts == 0


@with_p2pd
async def test_the_engine_is_up_only_after_it_serves_questions(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """A peer that finds the engine may ask at once, so the start waits until p2pd hands over questions."""
    answers = False

    async def late(*arguments: Any, task_status: Started) -> None:
        nonlocal answers
        await trio.sleep(0.2)
        answers = True
        await serve(*arguments, task_status=task_status)

    monkeypatch.setattr(hivemind_engine, "serve", late)
    await nursery.start(real_engine("hivemind", 1).run)
    assert answers


@with_p2pd
async def test_both_engines_announce_a_swarm_under_the_same_dht_key(nursery: trio.Nursery) -> None:
    """A client of either library finds the nodes of both engines under the key in docs/wire.md."""
    from libp2p.kad_dht.provider_store import ProviderStore
    from libp2p.peer.peerinfo import info_from_p2p_addr

    from p2p.engines.libp2p.stack import open_stack

    key = b"\x12\x20" + sha256(b"swarmd:/swarmd/1/main/0123456789abcdef").digest()
    identities = [Identity(bytes([n]) * 32) for n in (66, 67)]
    loopback = "/ip4/127.0.0.1/tcp/0"
    go = member(1)
    (address, *_) = await nursery.start(go.run)
    py = member(2, "libp2p", bootstrap=[address])
    await nursery.start(py.run)
    wanted = {go.identity.peer_id, py.identity.peer_id}
    with trio.fail_after(SECONDS):
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
        async with open_stack(
            identities[1], [TOPIC], lambda frame, via, topics: Verdict.ACCEPT, listen, time.time
        ) as stack:
            await stack.host.connect(info_from_p2p_addr(multiaddr.Multiaddr(address)))
            found = set()
            while not found >= wanted:
                await trio.sleep(0.5)
                await stack.dht.add_peer(info_from_p2p_addr(multiaddr.Multiaddr(address)).peer_id)
                lookup = ProviderStore(host=stack.host, peer_routing=stack.dht.peer_routing)
                found = {str(info.peer_id) for info in await lookup.find_providers(key)}


# The control socket's protocol, and the choice of the engine.


@pytest.mark.p2pd
@pytest.mark.parametrize("step", [1, 7, 100_000])
async def test_messages_arrive_complete_however_they_are_split(step: int) -> None:
    pb = messages()
    sent = [
        pb.PSMessage(data=bytes([n]) * size, seqno=b"%d" % n)
        for n, size in enumerate((0, 1, 100, 130, 20_000, 0))
    ]
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
async def test_a_message_that_states_too_large_a_length_is_rejected(data: bytes) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await theirs.send_all(data)
    with pytest.raises(P2pdGone, match="malformed message"):
        await Wire(ours).receive(None)


async def test_peer_ids_round_trip_and_ids_of_other_key_types_give_none() -> None:
    peer = Identity(bytes([3]) * 32).peer_id
    assert peer_of(peer_bytes(peer)) == peer
    assert (
        peer_of(b"\x12\x20" + bytes(32)) is None
        and peer_of(b"") is None
        and peer_of(peer_bytes(peer)[:-1]) is None
    )


async def test_hivemind_is_found_by_its_entry_point() -> None:
    point = offered()["hivemind"]
    assert point.dist is not None and point.dist.name == "swarmd-engine-hivemind"
    assert point.load() is engine("hivemind") is hivemind_engine.HivemindEngine


async def test_a_missing_hivemind_package_gives_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not (Path(place) / "hivemind").exists()])
    monkeypatch.delitem(sys.modules, "hivemind", raising=False)
    with pytest.raises(EngineMissing, match=r"pip install --no-deps hivemind==.*swarm\.engine"):
        hivemind_engine.HivemindEngine(Identity(bytes(32)), TOPIC, QUIET, bootstrap=[])


@pytest.mark.parametrize("system, machine", [("linux", "riscv64"), ("darwin", "x86_64"), ("win32", "AMD64")])
async def test_an_unsupported_platform_gives_a_message_that_names_it(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    monkeypatch.setattr(p2pd_module.sys, "platform", system)
    monkeypatch.setattr(p2pd_module.platform, "machine", lambda: machine)
    assert f"this is {system} on {machine}" in str(missing())


@with_p2pd
async def test_p2pd_runs_on_systems_without_schedulers_and_byte_counters(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """macOS lacks these functions."""
    caplog.set_level("INFO")
    monkeypatch.delattr(os, "sched_getscheduler")
    monkeypatch.delattr(os, "sched_setscheduler")
    monkeypatch.delattr("psutil.Process.io_counters")
    member = real_member("hivemind", 1)
    async with trio.open_nursery() as nursery:
        await nursery.start(member.run)
        assert member.addresses()
        await until(lambda: "this system does not count a process's bytes" in caplog.text)
        nursery.cancel_scope.cancel()


@pytest.mark.p2pd
async def test_the_hivemind_engine_imports_neither_hivemind_nor_torch_nor_libp2p() -> None:
    program = (
        "import sys; from p2p.engines import engine; engine('hivemind'); from swarmd_engine_hivemind.p2pd"
        " import messages; messages()\nsys.exit(bool({'libp2p', 'torch', 'hivemind'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
