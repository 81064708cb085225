"""A node without local questions (`round.local = 0`) waits for external rollouts without a busy loop."""

import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from p2p.identity import Identity
from p2p.types import PeerId
from swarmd import link
from swarmd.exchange.events import Deliver
from swarmd.experience.pool import Pool, PoolLimits
from swarmd.experience.replay_schedule import GuardState, ReplaySchedule
from swarmd.state.metrics import read_metrics
from swarmd.types import Completion, Rollout, Scored, TaskRef
from tests.swarmd.trainer.conftest import TrainerIn
from tests.swarmd.trainer.test_saving import shared

OTHER = Identity(b"\1" * 32).peer_id


def until(
    daemon: socket.socket, unpacker: "link.Unpacker[link.ToDaemon]", kind: type[link.ToDaemon]
) -> list[link.ToDaemon]:
    """Return the trainer's messages up to the first of this kind; a state must be "waiting"."""
    messages: list[link.ToDaemon] = []
    while not any(isinstance(m, kind) and getattr(m, "state", "waiting") == "waiting" for m in messages):
        messages += unpacker.feed(daemon.recv(1 << 16))
        assert sum(isinstance(m, link.RoundDone) for m in messages) < 5, (
            "the node runs empty rounds instead of waiting"
        )
    return messages


def test_a_node_without_local_questions_waits_for_external_rollouts(
    trainer_in: TrainerIn, tmp_path: Path
) -> None:
    with trainer_in(tmp_path / "other", 3) as (trainer, daemon):
        trainer.run()
        first, *_ = shared(daemon)
    with trainer_in(tmp_path / "node", 0, local=0, external=4) as (trainer, daemon):
        unpacker, thread = (
            link.Unpacker[link.ToDaemon](link.ToDaemon),
            threading.Thread(target=trainer.run, daemon=True),
        )
        thread.start()
        waiting = next(
            m
            for m in until(daemon, unpacker, link.TrainerState)
            if isinstance(m, link.TrainerState) and m.state == "waiting"
        )
        assert "round.local is 0" in waiting.cause and "swarmd peers" in waiting.remedy
        daemon.sendall(link.pack(Deliver(replace(first, author=OTHER))))
        heard = until(daemon, unpacker, link.TrainerState)
        (done,) = [m.line for m in heard if isinstance(m, link.RoundDone)]
        assert done.round == 1 and done.external > 0
        assert [m.state for m in heard if isinstance(m, link.TrainerState)] == ["training", "waiting"]
        daemon.sendall(link.pack(link.Stop()))
        assert link.Stopped(1) in until(daemon, unpacker, link.Stopped)
        thread.join()
    (line,) = read_metrics(tmp_path / "node" / "metrics.jsonl")
    assert line.external > 0 and line.reward_mean is None, (
        "a mean reward is reported although the node has answered nothing"
    )


def states(
    daemon: socket.socket, unpacker: "link.Unpacker[link.ToDaemon]", last: str
) -> list[link.ToDaemon | str]:
    """Return the trainer's states up to the state `last`, or up to its first message without news."""
    told = list[link.ToDaemon | str]()
    while last not in told and link.Alive() not in told:
        told += [getattr(m, "state", m) for m in unpacker.feed(daemon.recv(1 << 16))]
    return told


def test_a_waiting_node_reports_its_state_again_after_a_pause(
    trainer_in: TrainerIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the watchdog would expect a round and end the trainer.

    During the pause, the trainer frees cached memory.
    """
    given: list[torch.device] = []
    monkeypatch.setattr("swarmd.trainer.trainer.release_cached", given.append)
    with trainer_in(tmp_path, 0, local=0, external=4) as (trainer, daemon):
        unpacker, thread = (
            link.Unpacker[link.ToDaemon](link.ToDaemon),
            threading.Thread(target=trainer.run, daemon=True),
        )
        thread.start()
        until(daemon, unpacker, link.TrainerState)
        daemon.sendall(link.pack(link.Pause()))
        assert states(daemon, unpacker, "paused") == ["paused"]
        daemon.sendall(link.pack(link.Resume()))
        assert states(daemon, unpacker, "waiting") == ["training", "waiting"]
        daemon.sendall(link.pack(link.Stop()))
        until(daemon, unpacker, link.Stopped)
        thread.join()
    assert given == [torch.device("cpu")]


def test_a_long_pause_does_not_count_in_the_generators_speed(trainer_in: TrainerIn, tmp_path: Path) -> None:
    at: list[float] = []
    generators = SimpleNamespace(wait=lambda *_: True, rest=lambda *_: None)
    with trainer_in(tmp_path / "node", 2) as (trainer, _):
        trainer.workers = SimpleNamespace(report=at.append, generators=generators)  # type: ignore[assignment]
        trainer.run(lambda: setattr(trainer.link, "rested", 36_000.0))
    assert at[1] - at[0] < -35_000


def test_while_replay_pauses_only_new_rollouts_start_a_round(trainer_in: TrainerIn, tmp_path: Path) -> None:
    """Otherwise the pause, which is counted in rounds, would end at once through empty rounds."""

    def heard(n: int, number: int) -> Scored:
        answers = (Completion("1", True), Completion("2", True))
        return Scored(Rollout(TaskRef("bf", n), answers, PeerId(OTHER)), "?", (0.0, 1.0), number)

    with trainer_in(tmp_path, 0, local=0, external=4) as (trainer, _):
        pool = Pool(1000, 64, PoolLimits(trainer.parts.me, 1000))
        pool.add([heard(1, 1)])
        trainer.parts = replace(trainer.parts, pool=pool, schedule=ReplaySchedule(4))
        trainer.round, trainer.link.wait = 9, lambda *_, **__: None  # type: ignore[method-assign]
        assert trainer._supplied()
        trainer.parts.schedule.state = GuardState(resting=8)
        assert not trainer._supplied()
        pool.add([heard(2, 9)])
        assert trainer._supplied()
