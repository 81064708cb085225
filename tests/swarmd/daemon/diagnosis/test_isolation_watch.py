"""The watch for isolation: a lonely node says why within half a minute, and a healthy node says nothing.

The nodes use the memory engine and trio's clock.
"""

import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import trio
import trio.testing

from p2p.engines.memory import MemorySwarm
from p2p.identity import Identity
from p2p.member import Member
from p2p.peers.introduction import HELPING, TRAINING, Introducer
from p2p.topic import Topic
from p2p.types import PeerRequest, Reason
from swarmd.config.config import NodeConfig
from swarmd.daemon.diagnosis.isolation_watch import (
    CALM_S,
    LEFT_S,
    PATIENT_S,
    SETTLED_S,
    IsolationWatch,
)
from swarmd.daemon.diagnosis.reachability_survey import is_offline, whom_to_ask
from swarmd.daemon.local_api.roster import Roster
from swarmd.exchange.swarm_id import swarm_digest
from swarmd.tasks.curriculum import SAPO_9, TINY_9
from tests.doubles import memory_member

TINY, SAPO = (Topic("main", swarm_digest(curriculum)) for curriculum in (TINY_9, SAPO_9))
START = 1_700_000_000.0


def member(swarm: MemorySwarm, n: int, topic: Topic, also: Sequence[Topic] = ()) -> Member:
    return memory_member(swarm, Identity(bytes([n]) * 32), clock, topic=topic, also=also)


shift = 0.0  # seconds by which this machine's clock is changed


def clock() -> float:
    return START + trio.current_time() + shift


def watched(play: Callable[[IsolationWatch, Roster, MemorySwarm], object], *bootstrap: str) -> None:
    """Run an async function `play` in a node of the curriculum sapo-9 with a watch."""

    async def main() -> None:
        swarm, roster = MemorySwarm(), Roster()
        us = member(swarm, 1, SAPO)
        config = NodeConfig.model_validate({"swarm": {"bootstrap": bootstrap}}).swarm
        watch = IsolationWatch(us, config, "sapo-9", roster, clock, "swarmd 1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            await play(watch, roster, swarm)  # type: ignore[misc]
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.01 if bootstrap else 0.0))


@pytest.mark.skipif(
    subprocess.run(["unshare", "--user", "--net", "true"], capture_output=True).returncode != 0,
    reason="needs network namespaces",
)
def test_a_machine_without_a_route_is_offline() -> None:
    program = "from swarmd.daemon.diagnosis.reachability_survey import is_offline; print(is_offline([]))"
    for prefix, offline in (([], is_offline([])), (["unshare", "--user", "--net"], True)):
        done = subprocess.run(
            [*prefix, sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{offline}\n"
    assert not is_offline([f"/ip4/127.0.0.1/tcp/4001/p2p/{Identity(bytes(32)).peer_id}"])


def test_being_alone_is_reported_soon_and_silence_only_later() -> None:
    async def play(watch: IsolationWatch, roster: Roster, swarm: MemorySwarm) -> None:
        await trio.sleep(SETTLED_S - 3)
        assert watch.trouble is None
        await trio.sleep(10)
        assert watch.trouble is not None and "you are the first here" in watch.trouble.cause
        other = member(swarm, 2, SAPO)
        await trio.sleep(15)
        assert watch.trouble is None  # connected, and the peer's rounds may be long
        roster.heard(other.identity.peer_id, clock())
        await trio.sleep(PATIENT_S + 100)  # the peer is heard for the first 150 s
        assert watch.trouble is None
        await trio.sleep(100)
        assert watch.trouble is not None and "1 member connected, and none has shared" in watch.trouble.cause

    watched(play)


def test_a_node_that_finds_only_other_curricula_says_so() -> None:
    async def play(watch: IsolationWatch, roster: Roster, swarm: MemorySwarm) -> None:
        helper = member(swarm, 2, TINY, also=[SAPO])
        # A memory swarm has no topics, so the helper's answer is given here.
        helper.answers[PeerRequest.INTRODUCTION] = Introducer(
            helper.topics,
            lambda topic: 4 if topic == TINY else 1,
            "tiny-9",
            "swarmd 1",
            lambda: HELPING,
            lambda _: False,
            clock,
        )
        await trio.sleep(SETTLED_S + 5)
        assert watch.trouble is not None
        assert "swarm main has only 4 nodes of tiny-9, and this node trains on sapo-9" in watch.trouble.cause

    watched(play)


def introduced(
    swarm: MemorySwarm, n: int, topic: Topic = SAPO, refuses: bool = False, ahead: float = 0.0
) -> Member:
    other = member(swarm, n, topic)
    answer = Introducer(
        [topic],
        lambda _: 1,
        "the other",
        "swarmd 9",
        lambda: TRAINING,
        lambda _: refuses,
        lambda: clock() + ahead,
    )
    other.answers[PeerRequest.INTRODUCTION] = answer
    return other


@pytest.mark.parametrize(
    ("topic", "refuses", "settled", "said"),
    [
        (SAPO, True, CALM_S, "refused by all 2 peers asked"),
        (
            Topic("main", "0123456789abcdef"),
            False,
            SETTLED_S,
            "only 2 nodes of the other (0123456789abcdef) with swarmd 9, and this node trains on sapo-9"
            f" ({SAPO.digest}) with swarmd 1",
        ),
    ],
)
def test_peers_that_all_refuse_or_have_another_version_are_reported(
    topic: Topic, refuses: bool, settled: float, said: str
) -> None:
    async def play(watch: IsolationWatch, roster: Roster, swarm: MemorySwarm) -> None:
        for n in (2, 3):
            other = introduced(swarm, n, topic, refuses).identity.peer_id
            if refuses:
                roster.heard(other, clock())
        await trio.sleep(settled + 5)
        assert watch.trouble is not None and said in watch.trouble.cause

    watched(play)


def test_a_wrong_clock_is_reported_while_other_nodes_are_heard_too() -> None:
    async def play(watch: IsolationWatch, roster: Roster, swarm: MemorySwarm) -> None:
        others = [introduced(swarm, n, ahead=600) for n in (2, 3, 4)]
        for other in others:
            roster.heard(other.identity.peer_id, clock())
        await trio.sleep(CALM_S + 5)
        assert watch.trouble is not None and "clock is 10 minutes behind all 3 peers" in watch.trouble.cause
        # A peer that is asked first is too busy to answer.
        first, *_ = whom_to_ask(watch.member, [])
        del next(other for other in others if other.identity.peer_id == first).answers[
            PeerRequest.INTRODUCTION
        ]
        await trio.sleep(CALM_S + 5)
        assert watch.trouble is not None and "clock is 10 minutes behind all 2 peers" in watch.trouble.cause
        introduced(swarm, 5)  # a peer whose clock agrees with this node's
        await trio.sleep(CALM_S + 5)
        assert watch.trouble is None

    watched(play)


def test_a_clock_that_is_set_wrong_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(watch: IsolationWatch, roster: Roster, swarm: MemorySwarm) -> None:
        for n in (2, 3):
            roster.heard(introduced(swarm, n).identity.peer_id, clock())
        await trio.sleep(CALM_S + 8)
        assert watch.trouble is None
        monkeypatch.setattr("tests.swarmd.daemon.diagnosis.test_isolation_watch.shift", -600.0)
        for n in (2, 3):
            roster.heard(introduced(swarm, n, ahead=600).identity.peer_id, clock())
        await trio.sleep(CALM_S + 5)
        assert watch.trouble is not None and "clock is 10 minutes behind" in watch.trouble.cause

    watched(play)


def test_a_peer_of_a_small_swarm_whose_connection_ended_is_no_longer_heard() -> None:
    async def play(watch: IsolationWatch, roster: Roster, swarm: MemorySwarm) -> None:
        left = member(swarm, 2, SAPO).identity.peer_id
        relayed = Identity(b"r" * 32).peer_id  # never connected to this node
        for _ in range(3):
            roster.heard(left, clock())
            roster.heard(relayed, clock())
            await trio.sleep(50)
        swarm.partition([left])
        await trio.sleep(LEFT_S + 5)
        assert roster.present(clock()) == [relayed]
        # After this node leaves, it hears no author.
        watch.member.leave()
        await trio.sleep(5)
        assert roster.present(clock()) == [] and watch.trouble is None

    watched(play)


def test_it_is_reported_if_other_nodes_share_only_unusable_rollouts() -> None:
    async def play(watch: IsolationWatch, roster: Roster, swarm: MemorySwarm) -> None:
        other = member(swarm, 2, SAPO)
        watch.member.ignore(Reason.UNKNOWN_KIND)
        await trio.sleep(SETTLED_S + 5)
        assert watch.trouble is not None and "1 of a kind unknown to this version" in watch.trouble.cause
        roster.heard(other.identity.peer_id, clock())
        await trio.sleep(5)
        assert watch.trouble is None and roster.present(clock()) == [other.identity.peer_id]

    watched(play)


def test_a_bootstrap_address_that_does_not_answer_is_named_until_it_does() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}/p2p/{Identity(b'b' * 32).peer_id}"
        short = address.partition("/p2p/")[0]
        dead = f"bootstrap address {short} does not answer: nothing listens on that port"

        async def play(watch: IsolationWatch, roster: Roster, swarm: MemorySwarm) -> None:
            for _ in range(2):
                await trio.sleep(60)
                assert watch.trouble is not None and dead in watch.trouble.cause
                assert "ask its operator" in watch.trouble.remedy
            member(swarm, ord("b"), SAPO)
            await trio.sleep(40)
            assert watch.trouble is None

        watched(play, address)
