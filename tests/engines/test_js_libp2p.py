"""js-libp2p in a swarm with the libp2p engine; its peer is written from docs/wire.md and docs/vectors.

npm ci --prefix tests/engines/js     # once, 60 MB; without node or these packages the test is skipped
"""

import itertools
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p.admission import inbox
from p2p.blobs.blobs import content_id
from p2p.identity import Identity
from p2p.member import Member
from p2p.peers import introduction
from p2p.topic import Topic
from p2p.types import Envelope, PeerId, PeerRequest
from swarmd.exchange import wire
from swarmd.exchange.swarm_id import swarm_digest
from swarmd.state.folder import METRICS_FILE
from swarmd.state.metrics import read_metrics
from swarmd.tasks.curriculum import TINY_9
from swarmd.tasks.source import tasks_of
from swarmd.types import Completion, Rollout, TaskRef
from testbed.probe_process import ProbeProcess
from tests import ROOT, vectors
from tests.doubles import TIMEOUT_S, until
from tests.p2p.nat.figures import PORT, Net, obtain
from tests.p2p.nat.lab import Place, missing
from tests.p2p.real import TOPIC, real_engine
from tests.swarm import waiting
from tests.swarm.test_join import COMMON
from tests.swarm.test_meeting import started

PEER = ROOT / "tests" / "engines" / "js" / "peer.mjs"
FRAMES, AT_ONCE = 1_000, 50
# Seconds between bursts of AT_ONCE messages; a connection with a higher rate is cut off.
AT_ONCE_S = AT_ONCE / 200

pytestmark = [
    pytest.mark.net,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="needs node"),
    pytest.mark.skipif(
        not (PEER.parent / "node_modules").is_dir(), reason="needs `npm ci --prefix tests/engines/js`"
    ),
]


class JsPeer:
    """The js-libp2p peer, a process that prints a JSON document on each line and obeys commands."""

    def __init__(self, process: trio.Process) -> None:
        self._process, self._text = process, b""

    async def says(self, field: str, wanted: Callable[[Any], bool] = lambda _: True) -> Any:
        """Read documents until `field` has the value `wanted`; return that document."""
        assert self._process.stdout is not None
        while True:
            line, newline, rest = self._text.partition(b"\n")
            if newline:
                self._text = rest
                document = json.loads(line)
                assert "refused" not in document, document
                if field in document and wanted(document[field]):
                    return document
            else:
                more = await self._process.stdout.receive_some()
                assert more, "js-libp2p ended"
                self._text += more

    async def told(self, command: str, answer: str, argument: object = None) -> Any:
        assert self._process.stdin is not None
        line = json.dumps({"command": command, "argument": argument}) + "\n"
        await self._process.stdin.send_all(line.encode())
        return (await self.says(answer))[answer]


@asynccontextmanager
async def js_peer(
    address: str, topic: Topic | str = TOPIC, *more: str, place: Place | None = None
) -> AsyncIterator[JsPeer]:
    there = ["ip", "netns", "exec", place.name] if place is not None else []
    command = [*there, "node", str(PEER), address, str(topic), str(vectors.FOLDER), *more]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield JsPeer(process)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def test_js_libp2p_takes_part_fully(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    # High enough that quotas play no part here; other tests check them. The bursts stay below the limit of
    # messages on a connection.
    monkeypatch.setattr(inbox, "FRAMES_AT_ONCE", 2.0 * FRAMES)
    monkeypatch.setattr(inbox, "VIA_FRAMES_AT_ONCE", 2.0 * FRAMES)
    heard: list[Envelope] = []
    member = Member(
        Identity(bytes([1]) * 32),
        TOPIC,
        lambda handlers: real_engine("libp2p", 1, handlers),
        sequence=itertools.count(int(time.time() * 1000)),
        clock=time.time,
        admitted=heard.append,
    )
    stored = vectors.blobs()["good"][0]
    blob = bytes.fromhex(stored["blob"])
    with trio.fail_after(TIMEOUT_S):
        await nursery.start(member.run)
        member.blobs.put(blob)
        async with js_peer(member.addresses()[0]) as peer:
            met = await peer.says("me")
            js = PeerId(met["me"])
            good, bad = vectors.frames()["good"], vectors.frames()["bad"]
            reasons = [entry["reason"] for entry in bad]
            assert met["checked"] == len(good) + reasons.count("bad signature") + reasons.count(
                "of another swarm"
            )
            assert {"/meshsub/1.1.0", "/ipfs/kad/1.0.0", "/ipfs/ping/1.0.0", "/swarmd/ask/1"} <= set(
                met["protocols"]
            )
            assert [peer.id for peer in member.peers()] == [js]

            for sent in range(AT_ONCE, FRAMES + 1, AT_ONCE):
                for _ in range(AT_ONCE):
                    member.publish(wire.KIND, b"body")
                await peer.says("heard", lambda count, sent=sent: count == sent)
                assert await peer.told("publish", "published", AT_ONCE) == AT_ONCE
                await until(lambda sent=sent: len(heard) == sent)
                await trio.sleep(AT_ONCE_S)
            assert {envelope.author for envelope in heard} == {js} and not member.rejected
            (shared,) = {envelope.body for envelope in heard}
            decoded = wire.decode(shared, js)
            assert isinstance(decoded, wire.RolloutSet) and decoded.model == "tiny"

            dht = member.engine._discovery.connections
            await dht.provide(TOPIC)
            assert member.identity.peer_id in await peer.told("find", "found")
            assert await peer.told("provide", "provided")
            assert js in [record.peer for record in await dht.providers(TOPIC)]

            fetch = PeerRequest.BLOBS.message(content_id(blob))
            assert await peer.told("ask", "answer", fetch.hex()) == stored["blob"]
            assert await peer.told("ask", "answer", "ff") == ""
            assert await member.engine.request(js, fetch, len(blob)) == blob
            assert await member.engine.request(js, introduction.question(TOPIC.name), 100) == b""
        nursery.cancel_scope.cancel()


async def test_a_node_trains_on_rollouts_that_js_libp2p_shares(tmp_path: Path) -> None:
    """Both peers connect over IPv6."""
    ref = TaskRef("basic_arithmetic", 1)
    task = tasks_of(TINY_9.name).task(ref)
    assert task is not None
    completions = tuple(
        Completion(f"<answer>{answer}</answer>", ended=True) for answer in (task.entry["answer"], "none")
    )
    body = wire.encode([Rollout(ref, completions, PeerId("not sent"))], 1, "js")
    with ExitStack() as stack:
        listen = ["--listen", "/ip6/::1/tcp/0"]
        words = ["join", *COMMON, *listen, "--state-dir", str(tmp_path), "--pace", "0.5", "--json"]
        node = started(stack, *words, SWARMD_SWARM_NAME="js", SWARMD_SWARM_ENGINE="libp2p")
        until_it = partial(trio.to_thread.run_sync, waiting.until, tmp_path)
        status = await until_it(lambda status: status["addresses"], node)
        address = next(address for address in status["addresses"] if address.startswith("/ip6/::1/"))
        async with js_peer(address, Topic("js", swarm_digest(TINY_9))) as peer:
            await peer.says("me")
            assert await peer.told("share", "shared", body.hex())
            rounds = tmp_path / METRICS_FILE
            await until_it(lambda _: any(line.external for line in read_metrics(rounds)), node)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
async def test_relays_and_hole_punching_across_implementations(tmp_path: Path) -> None:
    """Nodes of both implementations reach each other through a relay of each implementation.

    Each node except the relays is behind a separate NAT.
    """
    stored = vectors.blobs()["good"][0]
    theirs = {"held": stored["id"], "size": len(stored["blob"]) // 2}
    with ExitStack() as stack, trio.fail_after(2 * TIMEOUT_S):
        net = Net(stack, tmp_path)
        boot = net.bootstrap("libp2p")
        hub = next(address for address in boot.addresses if address.startswith("/ip4/"))
        author, asker = (net.probe(net.lab.home(number), "libp2p") for number in (2, 3))
        author.order(hold=30_000)
        held = author.wait(lambda: author.last("held"), TIMEOUT_S)
        question = PeerRequest.BLOBS.message(bytes.fromhex(held["held"])).hex()
        for probe in (author, asker):
            probe.wait_for_peers(1, TIMEOUT_S)

        async def direct(peer: JsPeer, probe: ProbeProcess) -> set[str]:
            found = await peer.told("connections", "connections")
            return {at for who, at in found if who == probe.peer_id and "p2p-circuit" not in at}

        @asynccontextmanager
        async def behind(relay: str, number: int) -> AsyncIterator[tuple[JsPeer, str]]:
            """Start a js-libp2p peer behind a relay and a router; the author punches a hole to it."""
            more = (f"{relay}/p2p-circuit", f"/ip4/11.0.0.{number}/tcp/{PORT}", str(PORT))
            async with js_peer(relay, boot.topic, *more, place=net.lab.home(number)) as peer:
                js = (await peer.says("me"))["me"]
                where = f"{relay}/p2p-circuit/p2p/{author.peer_id}"
                while len(await peer.told("askAt", "answer", [where, question])) != 2 * held["size"]:
                    await trio.sleep(0.5)
                since, hole = time.monotonic(), f"/ip4/11.0.0.2/tcp/{PORT}/p2p/{author.peer_id}"
                while await direct(peer, author) != {hole}:
                    await trio.sleep(0.1)
                print(f"a hole through two routers after {time.monotonic() - since:.1f} s")
                while author.peer_id not in await peer.told("subscribers", "subscribers"):
                    await trio.sleep(0.1)
                await trio.to_thread.run_sync(author.wait, lambda: js in author.peers(), TIMEOUT_S)
                yield peer, js

        async with behind(hub, 6) as (peer, js):
            # Here js-libp2p starts the hole punching. Both sides then dial, and both take the role of the
            # client (swarmd as the specification says), so they mostly stay connected through the relay.
            while obtain(asker, theirs, [js])["bytes"] is None:
                await trio.sleep(0.5)
            said = list[str]()
            while sum(line.startswith("failed: ") for line in said) < 3 and not await direct(peer, asker):
                await trio.sleep(0.1)
                said = await peer.told("punching", "punching")
            assert {"B receiving connect from %p", "B dialing"} <= {*said}, said
            assert obtain(asker, theirs, [js])["bytes"] == theirs["size"]
        at = f"/ip4/11.0.0.5/tcp/{PORT}"
        async with js_peer(hub, boot.topic, at, at, place=net.lab.public(5)) as relay:
            own = f"{at}/p2p/{(await relay.says('me'))['me']}"
            since = time.monotonic()
            for probe in (author, asker):
                while probe.peer_id not in await relay.told("reservations", "reservations"):
                    await trio.sleep(0.5)
            print(f"js-libp2p relays for both after {time.monotonic() - since:.0f} s")
            assert await direct(relay, author)
            told = f"{own}/p2p-circuit/p2p/{author.peer_id}"
            while told not in await relay.told("addresses", "addresses", author.peer_id):
                await trio.sleep(0.1)
            async with behind(own, 7):
                pass
            boot.__exit__()
            while obtain(asker, held, [author.peer_id])["bytes"] is None:
                await trio.sleep(0.5)
            print(f"through it after {time.monotonic() - since:.0f} s")
