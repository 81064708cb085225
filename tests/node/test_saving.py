"""Saving while the next round generates: what waits for what, over real parts and a disk that can be held up or full."""

import errno
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from p2p.identity import Identity
from p2p.types import PeerId
from swarmd import link, node
from swarmd.checkpoint import Checkpoints, Content, DiskFull, RunState, Saver
from swarmd.config import NodeConfig
from swarmd.seams import Swarm
from swarmd.telemetry import read_metrics
from swarmd.types import Author, Completion, Generation, Rollout
from tests.node.test_checkpoint import policy, state

PATIENCE = 20.0  # seconds, where something waits in vain


class SlowDisk(Checkpoints):
    """Takes nothing until `let_go`, and then its time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.let_go, self.asked, self.late = threading.Event(), threading.Event(), 0.05

    def save(self, state: RunState, files: Iterable[tuple[str, Content]]) -> Path:
        self.asked.set()
        self.let_go.wait(PATIENCE)
        threading.Event().wait(self.late)  # long enough for whoever does not wait to be seen
        return super().save(state, files)

    def durable(self) -> int:
        """Rounds behind the newest checkpoint."""
        return max((int(p.name.removeprefix("round-")) for p in self.folder.glob("round-*")), default=0)


class SmallDisk(Checkpoints):
    """Full until there is `room`."""

    room, tries = False, 0

    def save(self, state: RunState, files: Iterable[tuple[str, Content]]) -> Path:
        def written() -> Iterator[tuple[str, Content]]:
            yield from files
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.tries += 1
        return super().save(state, written())


# The saver alone.


def test_whoever_saves_goes_on_and_settling_waits_until_it_is_durable(tmp_path: Path) -> None:
    disk, done = SlowDisk(tmp_path), []
    with Saver(disk) as saver:
        saver.begin(state(1), policy(), lambda: done.append(disk.durable()))
        assert disk.asked.wait(PATIENCE) and disk.durable() == 0 and not done
        disk.let_go.set()
        saver.settle()
        assert (disk.durable(), done) == (1, [1]), "told of when it was there, and before settling is over"
        saver.settle()
        assert done == [1]


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    disk, done = SlowDisk(tmp_path), []
    with Saver(disk) as saver:
        saver.begin(state(1), policy(), lambda: done.append(1))
        threading.Timer(0.05, disk.let_go.set).start()
        saver.begin(state(2), policy(), lambda: done.append(2))
        assert done[:1] == [1]
    assert done == [1, 2] and disk.durable() == 2


def test_who_leaves_waits_for_the_save_under_way(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    disk.let_go.set()
    with Saver(disk) as saver:
        saver.begin(state(1), policy(), lambda: None)
    assert disk.durable() == 1


def test_a_save_that_failed_is_told_and_tried_again_until_there_is_room(tmp_path: Path) -> None:
    disk, done = SmallDisk(tmp_path), []
    with Saver(disk) as saver:
        saver.begin(state(1), policy(), lambda: done.append(1))
        for tries in (2, 3):
            with pytest.raises(DiskFull, match="Free some space"):
                saver.settle()
            assert disk.tries == tries
        with pytest.raises(DiskFull):
            saver.begin(state(2), policy(), lambda: done.append(2))
        assert not done and list(tmp_path.iterdir()) == []
        disk.room = True
        saver.settle()
        saver.settle()
        assert done == [1] and disk.tries == 5
    found = disk.newest()
    assert found is not None and found[0] == state(1)


def test_a_mistake_of_ours_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    def mistake() -> None:
        raise ZeroDivisionError

    with Saver(Checkpoints(tmp_path)) as saver:
        saver.begin(state(1), policy(), mistake)
        with pytest.raises(ZeroDivisionError):
            saver.settle()


# A trainer, and what leaves it.


class Watched:
    """The swarm, with a look at the disk whenever something is shared."""

    def __init__(self, inner: Swarm, log: list[tuple[int, int]], durable: Callable[[], int]) -> None:
        self.inner, self.log, self.durable = inner, log, durable

    def share(self, rollouts: Sequence[Rollout], round_number: int) -> None:
        self.log.append((round_number, self.durable()))
        self.inner.share(rollouts, round_number)

    def collect(self) -> tuple[Sequence[Rollout], Mapping[str, int]]:
        return self.inner.collect()

    def author(self, peer: PeerId) -> Author:
        return self.inner.author(peer)

    def vouch(self, useful: Mapping[PeerId, int]) -> None:
        self.inner.vouch(useful)

    def charge(self, authors: Iterable[PeerId]) -> None:
        self.inner.charge(authors)


@contextmanager
def trainer_in(folder: Path, rounds: int, every: int = 1) -> Iterator[tuple[node.Trainer, socket.socket]]:
    """A trainer as its process has it, and the daemon's end of its link."""
    round_section = {"local": 2, "external": 0, "rounds": rounds, "checkpoint_every": every}
    config = NodeConfig.model_validate({"model": {"device": "cpu"}, "round": round_section})
    folder.mkdir(exist_ok=True)
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE)
    daemon = link.TrainerLink(theirs, on_eof=lambda: None)
    ours.sendall(link.pack(link.Start(config.model_dump_json(), str(folder), Identity.from_seed(bytes(32)).peer_id, 1)))
    try:
        with node.open_trainer(daemon.open(), daemon) as trainer:
            yield trainer, ours
    finally:
        daemon.close()
        ours.close()


def heard(daemon: socket.socket) -> list[link.ToDaemon]:
    """All that the trainer said, to its last word."""
    unpacker, messages = link.from_trainer(), list[link.ToDaemon]()
    while not any(isinstance(m, link.Stopped) for m in messages):
        messages += unpacker.feed(daemon.recv(1 << 16))
    return messages


def figures(folder: Path) -> list[tuple[float, float, float]]:
    return [(line["reward_sum"], line["loss"], line["grad_norm"]) for line in read_metrics(folder / "metrics.jsonl")]


@dataclass
class Log:
    """Each thing that left the trainer: the round it is of, and the rounds that were durable then."""

    shared: list[tuple[int, int]] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)
    said: list[tuple[int, int]] = field(default_factory=list)


def watch(trainer: node.Trainer, durable: Callable[[], int]) -> Log:
    log, append, tell = Log(), trainer.metrics.append, trainer.link.tell

    def appended(line: Mapping[str, Any]) -> None:
        log.written.append((line["round"], durable()))
        append(line)

    def told(message: link.ToDaemon) -> None:
        if isinstance(message, link.RoundDone):
            log.said.append((message.line["round"], durable()))
        tell(message)

    trainer.metrics.append, trainer.link.tell = appended, told  # type: ignore[method-assign]
    trainer.node.swarm = Watched(trainer.exchange, log.shared, durable)
    return log


def test_nothing_of_a_round_leaves_before_the_one_before_is_durable(tmp_path: Path) -> None:
    """The disk takes nothing until someone waits for it, and then its time."""
    with trainer_in(tmp_path, 3) as (trainer, daemon):
        disk, settle = SlowDisk(trainer.checkpoints.folder), trainer.settle
        log = watch(trainer, disk.durable)

        def settled() -> None:
            disk.let_go.set()
            settle()
            disk.let_go.clear()

        trainer.saver, trainer.settle, trainer.node.settle = Saver(disk), settled, settled  # type: ignore[method-assign]
        trainer.run()
        assert heard(daemon)[-1] == link.Stopped(3)
    assert log == Log(shared=[(1, 0), (2, 1), (3, 2)], written=[(1, 0), (2, 1), (3, 2)], said=[(1, 1), (2, 2), (3, 3)])
    assert [line["seconds"]["checkpoint"] >= disk.late for line in read_metrics(tmp_path / "metrics.jsonl")] == [False, True, True]


def test_a_run_from_a_checkpoint_taken_meanwhile_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    """Round 1 is written to disk when round 2 has generated: it holds nothing of round 2."""
    with trainer_in(tmp_path / "whole", 3) as (trainer, _):
        trainer.run()
    with trainer_in(tmp_path / "cut", 3) as (trainer, _):
        disk, generate, begun = SlowDisk(trainer.checkpoints.folder), trainer.policy.generate, []

        def generated(questions: Sequence[str], completions: int) -> Sequence[Generation]:
            answers = generate(questions, completions)
            begun.append(disk.durable())
            if len(begun) == 2:
                disk.let_go.set()
            return answers

        trainer.saver, trainer.policy.generate = Saver(disk), generated  # type: ignore[method-assign]
        trainer._one_round()
        trainer._one_round()
        assert begun == [0, 0]
        trainer.saver.settle()
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / "round-00000002")
    with trainer_in(tmp_path / "cut", 3) as (trainer, _):
        assert trainer.round == 1 and len(figures(tmp_path / "cut")) == 1
        trainer.run()
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")
    for name in ("weights.safetensors", "training.safetensors", "run.msgpack"):
        ends = [(tmp_path / side / "checkpoints" / "round-00000003" / name).read_bytes() for side in ("cut", "whole")]
        assert ends[0] == ends[1], name


def test_a_full_disk_pauses_the_round_before_it_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "RETRY_FULL_DISK", 0.01)
    with trainer_in(tmp_path, 2) as (trainer, daemon):
        disk = SmallDisk(trainer.checkpoints.folder)
        log, wait = watch(trainer, lambda: int(disk.room)), trainer.link.wait

        def waited(seconds: float) -> None:
            disk.room = disk.tries >= 4
            wait(seconds)

        trainer.saver, trainer.link.wait = Saver(disk), waited  # type: ignore[method-assign]
        trainer.run()
        states = [m for m in heard(daemon) if isinstance(m, link.State)]
    assert log.shared == log.written == [(1, 0), (2, 1)] and log.said == [(1, 1), (2, 1)]
    paused = [s for s in states if s.state == "paused"]
    assert paused and all("Free some space" in s.cause and "tried again" in s.remedy for s in paused) and states[-1].state == "training"


def test_a_run_told_to_stop_on_a_full_disk_ends_with_what_it_has(tmp_path: Path) -> None:
    with trainer_in(tmp_path, 0) as (trainer, daemon):
        disk = SmallDisk(trainer.checkpoints.folder)
        disk.room = True
        trainer.saver = Saver(disk)
        trainer._one_round()
        trainer.settle()
        disk.room = False
        trainer._one_round()
        daemon.sendall(link.pack(link.Stop()))
        while not trainer.link.stopping:
            trainer.link.wait(PATIENCE)
        with pytest.raises(DiskFull, match="Free some space"):
            trainer.run()
    with trainer_in(tmp_path, 0) as (trainer, _):
        assert trainer.round == 1 and len(figures(tmp_path)) == 1


def test_with_fewer_checkpoints_rounds_are_told_as_they_end_and_the_last_is_saved(tmp_path: Path) -> None:
    with trainer_in(tmp_path, 3, every=2) as (trainer, daemon):
        disk = SlowDisk(trainer.checkpoints.folder)
        log, trainer.saver = watch(trainer, disk.durable), Saver(disk)
        disk.let_go.set()
        trainer.run()
        heard(daemon)
    assert log.said == [(1, 0), (2, 2), (3, 2)] and disk.durable() == 3


def test_who_pauses_the_run_finds_it_saved(tmp_path: Path) -> None:
    with trainer_in(tmp_path, 0) as (trainer, daemon):
        disk, tell, paused = SlowDisk(trainer.checkpoints.folder), trainer.link.tell, []

        def told(message: link.ToDaemon) -> None:
            if isinstance(message, link.State) and message.state == "paused":
                paused.append(disk.durable())
                daemon.sendall(link.pack(link.Stop()))
            tell(message)

        trainer.saver, trainer.link.tell = Saver(disk), told  # type: ignore[method-assign]
        trainer._one_round()
        daemon.sendall(link.pack(link.Pause()))
        while not trainer.link.paused:
            trainer.link.wait(PATIENCE)
        threading.Timer(0.05, disk.let_go.set).start()
        trainer.run()
        assert heard(daemon)[-1] == link.Stopped(1)
    assert paused == [1]


def test_a_judge_is_answered_with_weights_that_cannot_be_lost(tmp_path: Path) -> None:
    with trainer_in(tmp_path, 1) as (trainer, daemon):
        disk, answer, durable = SlowDisk(trainer.checkpoints.folder), trainer.policy.answer, []
        disk.let_go.set()

        def answered(question: str) -> Completion:
            durable.append(disk.durable())
            return answer(question)

        trainer.saver, trainer.policy.answer = Saver(disk), answered  # type: ignore[method-assign]
        daemon.sendall(link.pack(link.Question("1", "2 + 2?")))
        trainer.link.wait(PATIENCE)
        trainer.run()
        assert any(isinstance(m, link.Answer) for m in heard(daemon))
    assert durable == [1]


def test_a_large_policy_is_saved_before_the_next_round_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "COPIED", 1000)
    with trainer_in(tmp_path, 2) as (trainer, daemon):
        disk, generate, begun = SlowDisk(trainer.checkpoints.folder), trainer.policy.generate, []
        disk.let_go.set()

        def generated(questions: Sequence[str], completions: int) -> Sequence[Generation]:
            begun.append(disk.durable())
            return generate(questions, completions)

        log = watch(trainer, disk.durable)
        trainer.checkpoints, trainer.policy.generate = disk, generated  # type: ignore[method-assign]
        trainer.run()
        heard(daemon)
    assert begun == [0, 1] and log.said == [(1, 1), (2, 2)]
    assert read_metrics(tmp_path / "metrics.jsonl")[1]["seconds"]["checkpoint"] >= disk.late
