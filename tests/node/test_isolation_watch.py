"""A node that hears nobody says so after a minute, and why. The memory engine; its clock is trio's."""

import socket
from collections.abc import Callable, Sequence

import trio
import trio.testing

from p2p.engines.memory import MemorySwarm
from p2p.identity import Identity
from p2p.member import Member
from p2p.peers.census import Census
from p2p.topic import Topic
from p2p.types import PeerRequest
from swarmd.config.config import NodeConfig
from swarmd.daemon.isolation_watch import QUIET, IsolationWatch
from swarmd.daemon.roster import Roster
from swarmd.exchange.swarm_id import swarm_digest
from swarmd.tasks.curriculum import SAPO_9, TINY_9
from swarmd.testing import memory_member

TINY, SAPO = (Topic("main", swarm_digest(curriculum)) for curriculum in (TINY_9, SAPO_9))
START = 1_700_000_000.0


def member(swarm: MemorySwarm, n: int, topic: Topic, also: Sequence[Topic] = ()) -> Member:
    return memory_member(swarm, Identity.from_seed(bytes([n]) * 32), clock, topic=topic, also=also)


def clock() -> float:
    return START + trio.current_time()


def watched(play: Callable[[IsolationWatch, Roster, MemorySwarm, list[str]], object], *bootstrap: str) -> None:
    """play: an async function; it lives in a node of sapo-9."""

    async def main() -> None:
        swarm, roster, said = MemorySwarm(), Roster(), list[str]()
        us = member(swarm, 1, SAPO)
        config = NodeConfig.model_validate({"swarm": {"bootstrap": bootstrap}}).swarm
        watch = IsolationWatch(us, config, "sapo-9", roster, clock, said.append)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            await play(watch, roster, swarm, said)  # type: ignore[misc]
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.01 if bootstrap else 0.0))


def test_after_a_minute_and_only_while_nobody_is_heard() -> None:
    async def play(watch: IsolationWatch, roster: Roster, swarm: MemorySwarm, said: list[str]) -> None:
        await trio.sleep(QUIET - 5)
        assert watch.trouble is None
        await trio.sleep(10)
        assert watch.trouble is not None and "no bootstrap address is set" in watch.trouble.cause
        other = member(swarm, 2, SAPO)
        roster.heard(other.identity.peer_id, clock())
        await trio.sleep(5)
        assert watch.document() == {"trouble": None, "bootstrap": []}
        await trio.sleep(1000)
        assert watch.trouble is not None and "1 member connected, and none has shared" in watch.trouble.cause

    watched(play)


def test_only_nodes_of_another_curriculum() -> None:
    async def play(watch: IsolationWatch, roster: Roster, swarm: MemorySwarm, said: list[str]) -> None:
        helper = member(swarm, 2, TINY, also=[SAPO])
        # A memory swarm has no topics to count.
        helper.answers[PeerRequest.CENSUS] = Census(helper.topics, lambda topic: 4 if topic == TINY else 1, trains=False)
        await trio.sleep(QUIET + 5)
        assert watch.trouble is not None
        assert "in swarm main there is only 4 nodes of tiny-9, and this node is of sapo-9" in watch.trouble.cause

    watched(play)


def test_a_bootstrap_address_that_does_not_answer_is_named_once_and_again_when_it_does() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}/p2p/{Identity.from_seed(b'b' * 32).peer_id}"

        async def play(watch: IsolationWatch, roster: Roster, swarm: MemorySwarm, said: list[str]) -> None:
            await trio.sleep(QUIET - 5)
            assert len(said) == 1 and f"{address} does not answer: nothing listens on that port" in said[0]
            [dead] = watch.document()["bootstrap"]
            assert "ask its people" in dead["remedy"]
            await trio.sleep(60)
            assert watch.trouble is not None and address in watch.trouble.cause
            assert len(said) == 1  # tried again quietly
            member(swarm, ord("b"), SAPO)
            await trio.sleep(40)
            assert said[1:] == [f"bootstrap address {address} answers again"] and watch.document()["bootstrap"] == []

        watched(play, address)
