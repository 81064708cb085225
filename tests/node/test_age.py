"""The daemon's clock of rounds: what it hands on says in which of the trainer's rounds it was heard."""

import io
import itertools
import random
import time
from pathlib import Path

import trio
import trio.testing

from p2p.envelope import seal
from p2p.identity import Identity
from p2p.types import Verdict
from swarmd import link
from swarmd.cli.view_plain import JsonView, PlainView
from swarmd.config.config import NodeConfig
from swarmd.daemon.daemon import Daemon
from swarmd.exchange import offers, wire
from swarmd.tasks.curriculum import TINY_9
from swarmd.types import Completion, Rollout, TaskRef
from swarmd.workers.restarts import Death

OTHER = Identity.from_seed(b"o" * 32)


class Played:
    """A daemon without network or trainer, and the round in which each set that it hands on was heard."""

    def __init__(self, folder: Path) -> None:
        view = JsonView(io.StringIO(), PlainView(io.StringIO()))
        self.daemon = Daemon(NodeConfig.model_validate({"swarm": {"engine": "none"}}), folder, view)
        self.heard: list[int] = []
        self.daemon.child.tell = self._told  # type: ignore[method-assign]
        self._numbers = itertools.count(1)

    def _told(self, message: link.ToTrainer) -> None:
        if isinstance(message, link.Received):
            self.heard.append(message.heard)

    def gossip(self, kind: str, body: bytes) -> None:
        frame = seal(OTHER, self.daemon.topic.swarm_id, next(self._numbers), time.time(), kind, body)
        assert self.daemon.member.deliver(frame, None) is Verdict.ACCEPT

    def offer(self, n: int) -> None:
        """Of a rollout whose blob is at hand already: it is handed on as soon as it is chosen."""
        rollout = Rollout(TaskRef("bf", n), (Completion(random.Random(n).randbytes(2000).hex(), True),), OTHER.peer_id)
        (body,), (blob,) = offers.encode([rollout], 1, "m", TINY_9.specialties)
        self.daemon.member.hold(blob)
        self.gossip(offers.KIND, body)

    def trainer_says(self, message: link.ToDaemon) -> None:
        self.daemon.child.on_message(message)

    def round_done(self, number: int) -> None:
        self.trainer_says(link.RoundDone({"round": number, "rejected": {}, "reward_mean": 0.0}, {}, None))


def test_a_set_is_of_the_round_in_which_it_was_heard(tmp_path: Path) -> None:
    played = Played(tmp_path)
    played.gossip(wire.KIND, b"before the trainer has said where it is")
    played.trainer_says(link.TrainerReady({}, 7, []))
    played.gossip(wire.KIND, b"in its round 8")
    played.round_done(8)
    played.gossip(wire.KIND, b"in its round 9")
    played.daemon.child.on_death(Death("killed", 1, 0.0))
    played.gossip(wire.KIND, b"while there is none")
    played.trainer_says(link.TrainerReady({}, 3, []))
    played.gossip(wire.KIND, b"in round 4 again")
    assert played.heard == [0, 8, 9, 0, 4]


def test_what_is_fetched_is_of_the_round_in_which_its_offer_was_heard(tmp_path: Path) -> None:
    played = Played(tmp_path)
    played.trainer_says(link.TrainerReady({}, 7, []))
    played.offer(1)
    played.round_done(8)
    played.offer(2)

    async def gather() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(played.daemon.gatherer.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(gather)
    assert sorted(played.heard) == [8, 9]
