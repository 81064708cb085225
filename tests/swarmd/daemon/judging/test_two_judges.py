"""Two judges in one swarm, found by the DHT.

The node takes the one that its bootstrap peer tells of, and the other when that one dies.
"""

import itertools
import json
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from p2p.engines.memory import MemorySwarm
from p2p.identity import nickname
from p2p.member import QueuedMember
from p2p.types import PeerRequest
from swarmd import link
from swarmd.config.config import NodeConfig
from swarmd.daemon.judging import client, discovery
from swarmd.daemon.judging.discovery import JudgeAdvertiser, JudgeSearch, judges_topic
from swarmd.daemon.judging.judging import judging_of
from swarmd.daemon.local_api.roster import Roster
from swarmd.tasks.curriculum import TINY_9
from swarmd.testing import TIMEOUT_S, identity, memory_member, until
from tests.judge.test_client import graded, honest, judge, reply
from tests.swarmd.daemon.judging.test_judge_records import TOPIC, build_real

pytestmark = pytest.mark.net


class Judged:
    """A node with its side of judging, and a trainer that gives the same answer to every question."""

    def __init__(self, member: QueuedMember, config: NodeConfig, folder: Path) -> None:
        self.said: list[str] = []
        self._asked, self._questions = trio.open_memory_channel[link.JudgeQuestion](10)
        self.judging = judging_of(
            member, config, TINY_9, folder, lambda: "cpu", Roster(), self._told, self.said.append
        )

    def _told(self, message: link.ToTrainer) -> None:
        if isinstance(message, link.JudgeQuestion):
            self._asked.send_nowait(message)

    async def train(self) -> None:
        for number in itertools.count():
            await self.judging.ask(number)
            with trio.move_on_after(0.05):
                question = await self._questions.receive()
                await self.judging.answer(link.JudgeAnswer(question.id, "<answer>1</answer>", True))

    def graded_by(self, url: str) -> bool:
        document: dict[str, Any] = self.judging.document() or {}
        return document["url"] == url and document["n"] > 0


async def grade(stream: trio.SocketStream, request: bytes) -> None:
    """Return an honest judge's reply, with a receipt for this peer's own answer."""
    head, _, body = request.partition(b"\r\n\r\n")
    if b"/answers " not in head.splitlines()[0]:
        await stream.send_all(honest(request))
        return
    peer = next(
        line.split(b": ")[1].decode() for line in head.splitlines() if line.lower().startswith(b"swarmd-peer")
    )
    digests = [sha256(answer["text"].encode()).hexdigest() for answer in json.loads(body)["answers"]]
    await stream.send_all(reply(graded(peer=peer, answers=digests), 200))


async def joined(nursery: trio.Nursery) -> tuple[list[QueuedMember], str]:
    """Return three members on loopback, and the address of the first."""
    build, bootstrap, members = build_real, list[str](), []
    for number in (1, 2, 3):
        me = identity(number)
        members.append(
            QueuedMember(me, TOPIC, build(me, bootstrap), sequence=itertools.count(), clock=time.time)
        )
        addresses = await nursery.start(members[-1].run)
        bootstrap = bootstrap or list(addresses)
    return members, bootstrap[0]


async def test_the_other_judge_is_used_when_one_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "FIRST_S", 0.1)
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)
    async with judge(grade) as other, trio.open_nursery() as nursery:
        members, bootstrap = await joined(nursery)
        config = NodeConfig.model_validate(
            {"judge": {"url": "auto", "every": 1}, "swarm": {"bootstrap": (bootstrap,)}}
        )
        async with judge(grade) as chosen:
            for member, url in zip(members, (chosen, other), strict=False):
                advertiser = JudgeAdvertiser(member, [url])
                member.answers[PeerRequest.JUDGES] = advertiser.answer
                nursery.start_soon(advertiser.run)
            with trio.fail_after(TIMEOUT_S):
                while len(set(await members[2].engine.find(judges_topic(TOPIC)))) < 2:
                    await trio.sleep(0.05)
            node = Judged(members[2], config, tmp_path)
            nursery.start_soon(node.judging.run)
            nursery.start_soon(node.train)
            await until(lambda: node.graded_by(chosen))
        await until(lambda: node.graded_by(other))
        document = node.judging.document() or {}
        assert document["advertised_by"] == [
            {"id": members[1].identity.peer_id, "name": nickname(members[1].identity.peer_id)}
        ]
        assert [line.split()[3] for line in node.said if line.startswith("found the judge")] == [
            f"{chosen},",
            f"{other},",
        ]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("told", "lost", "taken"),
    [
        ("ab", "", "a"),
        ("ab", "a", "b"),
        ("ab", "ab", "a"),
        ("ab", "ba", "b"),
        ("abc", "ab", "c"),
        ("bc", "ab", "c"),
        ("a", "cb", "a"),
    ],
)
async def test_lost_judges_are_not_chosen_again_at_once(
    told: str, lost: str, taken: str, autojump_clock: trio.testing.MockClock
) -> None:
    swarm = MemorySwarm()
    members = [memory_member(swarm, number, time.time, topic=TOPIC) for number in range(1, 3)]
    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(member.run)
        advertiser = JudgeAdvertiser(members[0], [f"https://{name}.example" for name in told])
        members[0].answers[PeerRequest.JUDGES] = advertiser.answer
        nursery.start_soon(advertiser.run)
        found = await JudgeSearch(members[1], ()).run([f"https://{name}.example" for name in lost])
        assert found.url == f"https://{taken}.example"
        nursery.cancel_scope.cancel()
