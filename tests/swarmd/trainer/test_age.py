"""The daemon uses the trainer's round numbers for the age of rollouts and for its choice of offers."""

import io
import itertools
import random
import time
from pathlib import Path
from typing import Any

import trio
import trio.testing

from p2p.blobs.blobs import content_id
from p2p.envelope import seal
from p2p.identity import Identity
from p2p.types import PeerId, Verdict
from swarmd import link
from swarmd.cli.views.plain import JsonView
from swarmd.config.config import NodeConfig
from swarmd.daemon.daemon import Daemon
from swarmd.daemon.supervision.restarts import Death
from swarmd.exchange import offers, wire
from swarmd.exchange.events import Deliver
from swarmd.state.status import ModelDescription
from swarmd.tasks.curriculum import TINY_9
from swarmd.types import Completion, Rollout, RoundLine, TaskRef
from tests.doubles import encoded

OTHER = Identity(b"o" * 32)


class Played:
    """A daemon without network or trainer, and the rollouts that it sends to the trainer."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        view = JsonView(io.StringIO(), io.StringIO())
        self.daemon = Daemon(
            NodeConfig.model_validate({"swarm": {"engine": "none"}, **sections}), folder, view
        )
        self.received: list[Rollout] = []
        self.daemon.child.tell = self._told  # type: ignore[method-assign]
        self._numbers = itertools.count(1)
        self.blobs: dict[bytes, bytes] = {}
        self.daemon.member.engine.request = self._answer  # type: ignore[method-assign]

    async def _answer(self, _peer: PeerId, question: bytes, _limit: int) -> bytes:
        return self.blobs[question[1:]]

    def _told(self, message: link.ToTrainer) -> None:
        if isinstance(message, Deliver):
            self.received.append(message.rollout)

    @property
    def heard(self) -> list[int]:
        """The round in which each rollout was heard."""
        return [rollout.heard for rollout in self.received]

    @property
    def refs(self) -> list[TaskRef]:
        return [rollout.ref for rollout in self.received]

    def gossip(self, kind: str, body: bytes) -> None:
        frame = seal(OTHER, self.daemon.sharing.topic.swarm_id, next(self._numbers), time.time(), kind, body)
        assert self.daemon.member.deliver(frame, None) is Verdict.ACCEPT

    def offer(self, n: int, specialty: str = "bf") -> None:
        """Offer a rollout, which is sent on request."""
        rollout = Rollout(
            TaskRef(specialty, n), (Completion(random.Random(n).randbytes(2000).hex(), True),), OTHER.peer_id
        )
        (body,), (blob,) = encoded([rollout], 1, "m", TINY_9.specialties)
        self.blobs[content_id(blob)] = blob
        self.gossip(offers.KIND, body)

    def trainer_says(self, message: link.ToDaemon) -> None:
        self.daemon.child.on_message(message)

    def round_done(self, number: int) -> None:
        self.trainer_says(link.RoundDone(RoundLine(round=number), None))

    def gather(self) -> None:
        """Let the daemon fetch the offers that it chooses."""

        async def gather() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.daemon.sharing.driver.run, self.daemon.member)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()

        trio.run(gather)


def test_a_message_counts_for_the_round_in_which_it_was_heard(tmp_path: Path) -> None:
    played, numbers = Played(tmp_path), itertools.count()

    def hear() -> None:
        sent = [Rollout(TaskRef("bf", next(numbers)), (Completion("a", True),), OTHER.peer_id)]
        played.gossip(wire.KIND, wire.encode(sent, 1, "m"))

    hear()  # before the trainer has reported its round
    played.trainer_says(link.TrainerReady(ModelDescription(), 7, []))
    hear()  # in its round 8
    played.round_done(8)
    hear()  # in its round 9
    played.daemon.child.on_death(Death("killed", 1, 0.0))
    hear()  # while there is no trainer
    played.trainer_says(link.TrainerReady(ModelDescription(), 3, []))
    hear()  # in round 4 again
    played.gather()
    assert played.heard == [0, 8, 9, 9, 4]


def test_a_fetched_rollout_counts_for_the_round_of_its_offer(tmp_path: Path) -> None:
    played = Played(tmp_path)
    played.trainer_says(link.TrainerReady(ModelDescription(), 7, []))
    played.offer(1)
    played.round_done(8)
    played.offer(2)
    played.gather()
    assert sorted(played.heard) == [8, 9]
